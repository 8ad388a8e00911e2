"""What the learner measures of itself and its workers, streaming and with confidence. No clock: time is
given.

Everything is seen from the learner's side. A worker's own word (its offer) is only the prior: its rate is the
number of groups that it works on at once over the time that one takes (Little's law), which holds for a
worker that is short of credit too.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnode.scheduler.capacity import Timing
from swarmnode.scheduler.estimates import CONFIDENCE, Estimate, EventRate, Lengths, MovingMean

MAX_WORKERS = 16_384
"""Workers remembered; the one heard of least recently goes first."""
MAX_KINDS = 64
MAX_FAMILIES = 256

CLAIM_WORTH_GROUPS = 3.0
"""A claimed rate counts like this many groups seen at that rate, so that it is soon overruled."""
RATE_MEMORY_S, LONGEST_RATE_MEMORY_S = 1800.0, 6 * 3600.0
RATE_MEMORY_GROUPS = 100.0
"""A worker's rate is that of about its last half hour of full work, or of so many groups if they take longer:
a rate of few groups is mostly chance, and plans would follow that."""
KIND_MEMORY = 1_000.0
"""Groups of a kind of worker that count for how long its groups take."""
KIND_WORTH_GROUPS = 10.0
"""What is known of a worker's kind counts like this many groups of its own."""
DEPARTURES_PRIOR_PER_S = 0.05 / 3600
"""Believed of a kind of worker before any was seen: one in twenty leaves within an hour."""


@dataclass
class WorkerMeasurements:
    """One worker's streams."""

    kind: str
    claimed_groups_per_s: float
    rate: EventRate
    latency_s: MovingMean = field(default_factory=MovingMean)
    broadcast_s: MovingMean = field(default_factory=MovingMean)
    round_trip_s: MovingMean = field(default_factory=MovingMean)
    upload_mbps: MovingMean = field(default_factory=MovingMean)
    download_mbps: MovingMean = field(default_factory=MovingMean)
    present_since_s: float | None = None
    at_once: int | None = None
    """Groups that it works on at once: the fewest that it had and asked for together in this stay. More are
    those that are done and still on their way when it asks."""


def _of_many() -> MovingMean:
    return MovingMean(KIND_MEMORY)


@dataclass
class _Kind:
    """Workers expected to leave alike (rented by bid, a volunteer's machine, a cluster's node)."""

    departures: float = 0.0
    past_s: float = 0.0
    present: int = 0
    since_sum_s: float = 0.0
    latency: MovingMean = field(default_factory=_of_many)
    """Over what the worker's claimed rate would give."""
    latency_variance: MovingMean = field(default_factory=_of_many)
    """Relative to a worker's own mean."""

    def rate(self, now: float) -> EventRate:
        rate = EventRate(DEPARTURES_PRIOR_PER_S)
        rate.add(self.departures, max(0.0, self.past_s + self.present * now - self.since_sum_s))
        return rate


class Measurements:
    """The learner's view. Bounded in memory whatever peers claim to be."""

    def __init__(self) -> None:
        self.train_s = MovingMean()
        self.lengths: dict[str, Lengths] = {}
        """Completion lengths by task family."""
        self.source_upload_mbps = MovingMean()
        self._workers: OrderedDict[bytes, WorkerMeasurements] = OrderedDict()
        self._kinds: dict[str, _Kind] = {}

    # What happens

    def update_finished(self, train_s: float) -> None:
        """One update took `train_s`, waiting for groups not counted."""
        self.train_s.add(train_s)

    def joined(self, worker: bytes, now: float, *, kind: str, claimed_groups_per_s: float) -> None:
        """A worker is here. One that was here before keeps what was measured."""
        known = self._workers.get(worker)
        if known is None:
            memory_s = max(RATE_MEMORY_S, RATE_MEMORY_GROUPS / max(claimed_groups_per_s, 1e-9))
            known = WorkerMeasurements(
                kind if kind in self._kinds or len(self._kinds) < MAX_KINDS else "other",
                claimed_groups_per_s,
                EventRate(
                    claimed_groups_per_s,
                    prior_events=CLAIM_WORTH_GROUPS,
                    memory_s=min(memory_s, LONGEST_RATE_MEMORY_S),
                ),
            )
            self._workers[worker] = known
            while len(self._workers) > MAX_WORKERS:
                self._forget(next(iter(self._workers)), now)
        self._workers.move_to_end(worker)
        if known.present_since_s is None:
            known.present_since_s = now
            group = self._kinds.setdefault(known.kind, _Kind())
            group.present += 1
            group.since_sum_s += now

    def left(self, worker: bytes, now: float, *, by_choice_of_ours: bool = False) -> None:
        """A worker is gone. One that was sent away does not count as a departure."""
        known = self._workers.get(worker)
        if known is None or known.present_since_s is None:
            return
        known.at_once = None
        group = self._kinds[known.kind]
        group.present -= 1
        group.since_sum_s -= known.present_since_s
        group.past_s += now - known.present_since_s
        group.departures += not by_choice_of_ours
        known.present_since_s = None

    def credit_asked(self, worker: bytes, *, wanted: int, outstanding: int) -> None:
        """A worker that has `outstanding` groups granted and not delivered asks for more."""
        known = self._workers.get(worker)
        if known is not None and wanted + outstanding > 0:
            together = wanted + outstanding
            known.at_once = together if known.at_once is None else min(known.at_once, together)

    def group_arrived(self, worker: bytes, latency_s: float) -> None:
        """A group came so long after its credit was granted; time in which the worker stood still for weights
        is left out."""
        known = self._workers.get(worker)
        if known is None or latency_s < 0:
            return
        kind, mean, count = self._kinds[known.kind], known.latency_s.value, known.latency_s.samples
        if count >= 2 and mean > 0:
            kind.latency_variance.add(((latency_s - mean) / mean) ** 2 * count / (count + 1))
        known.latency_s.add(latency_s)
        if known.at_once is not None:
            known.rate.add(1.0, latency_s / known.at_once)
            kind.latency.add(latency_s * known.claimed_groups_per_s / known.at_once)

    def completion(self, family: str, tokens: int) -> None:
        """A completion of a task family has this many tokens."""
        lengths = self.lengths.get(family)
        if lengths is None:
            lengths = self.lengths.setdefault(
                family if len(self.lengths) < MAX_FAMILIES else "other", Lengths()
            )
        lengths.add(tokens)

    def version_ready(self, worker: bytes, seconds: float) -> None:
        """A worker was ready with a version so long after its publication."""
        if worker in self._workers:
            self._workers[worker].broadcast_s.add(seconds)

    def round_trip(self, worker: bytes, seconds: float) -> None:
        """An answer came so long after its question."""
        if worker in self._workers:
            self._workers[worker].round_trip_s.add(seconds)

    def transferred(
        self, worker: bytes, *, up_mbps: float | None = None, down_mbps: float | None = None
    ) -> None:
        """A transfer from (`up`) or to (`down`) a worker ran at this rate."""
        known = self._workers.get(worker)
        if known is None:
            return
        if up_mbps is not None:
            known.upload_mbps.add(up_mbps)
        if down_mbps is not None:
            known.download_mbps.add(down_mbps)

    # What is known

    def worker(self, worker: bytes) -> WorkerMeasurements | None:
        """The streams of one worker."""
        return self._workers.get(worker)

    def groups_per_s(self, worker: bytes, confidence: float = CONFIDENCE) -> Estimate | None:
        """The worker's rate; its claim while nothing was seen. None for an unknown worker."""
        known = self._workers.get(worker)
        return None if known is None else known.rate.estimate(confidence)

    def departures_per_s(self, worker: bytes, now: float, confidence: float = CONFIDENCE) -> Estimate | None:
        """How often workers of its kind leave, pooled: one worker leaves too seldom to be measured alone."""
        known = self._workers.get(worker)
        return None if known is None else self._kinds[known.kind].rate(now).estimate(confidence)

    def departure_rate(self, worker: bytes, now: float) -> float:
        """The value of `departures_per_s`, 0 for an unknown worker."""
        known = self._workers.get(worker)
        return 0.0 if known is None else self._kinds[known.kind].rate(now).value

    def timing(self, worker: bytes, otherwise: Timing) -> Timing:
        """Measured where there are measurements, `otherwise` where there are none."""
        known = self._workers.get(worker)
        if known is None:
            return otherwise
        latency_s, deviation_s = self._latency(known, otherwise)
        return Timing(
            groups_per_s=known.rate.value,
            broadcast_s=known.broadcast_s.value if known.broadcast_s else otherwise.broadcast_s,
            latency_s=latency_s,
            latency_deviation_s=deviation_s,
        )

    def _latency(self, known: WorkerMeasurements, otherwise: Timing) -> tuple[float, float]:
        """Mean and deviation: the worker's own, drawn towards its kind's while they rest on few groups.

        A plan would else choose those whose few groups happened to be short.
        """
        kind = self._kinds[known.kind]
        if not kind.latency or known.at_once is None or known.claimed_groups_per_s <= 0:
            own = known.latency_s
            return (own.value, own.deviation) if own else (otherwise.latency_s, otherwise.latency_deviation_s)
        alike_s = kind.latency.value * known.at_once / known.claimed_groups_per_s
        count = known.latency_s.samples
        latency_s = (count * known.latency_s.value + KIND_WORTH_GROUPS * alike_s) / (
            count + KIND_WORTH_GROUPS
        )
        if not kind.latency_variance:
            return latency_s, otherwise.latency_deviation_s
        return latency_s, math.sqrt(kind.latency_variance.value) * latency_s

    def tokens_per_completion(self, mix: dict[str, float]) -> float | None:
        """Mean length under a task mix of weights; None if a family of it was never seen.

        A worker's groups per second under another mix are as much fewer as its completions are longer.
        """
        if not mix or any(family not in self.lengths for family in mix):
            return None
        total = sum(mix.values())
        return sum(weight * self.lengths[family].mean() for family, weight in mix.items()) / total

    def _forget(self, worker: bytes, now: float) -> None:
        self.left(worker, now, by_choice_of_ours=True)
        del self._workers[worker]
