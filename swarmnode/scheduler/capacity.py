"""The capacity rule: how many groups per second the active workers must make so that the learner never waits.

The rule Σμ ≥ κR / (κ·T_train − T_bcast) with κ = max(1, S − 1) is a reconstruction of ECHO-2's, whose formula
was not seen; `docs/capacity.md` derives it. Rates are groups per second, times are seconds.

A worker's groups count only while they can still be consumed within the staleness bound S. A version is
published every κ updates, at time 0 say, and the next one κ·T' later, T' being the time from update to
update. A worker is ready with it at B (its T_bcast) and starts groups with it until it turns to the next
version: at κT' in the conservative form, where it stands still to fetch, at κT' + B in the overlapped form,
where it generates meanwhile. The last update that may consume them begins at (S+1)·T' − T_train, so a group
that takes L to the learner must start L before. What was started in time runs on while no more may start, so
that a worker is idle for less than that time.

And the learner must not run dry between two versions: the first update that may not consume the old one's
groups begins (S+1−κ)·T_train after the new one's publication, and by then the new one must have arrived and
made a whole batch.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Form = Literal["conservative", "overlapped"]

Floats = npt.NDArray[np.float64]

SLOWEST_IN_DEVIATIONS = 1.5
"""A group may start if it would still count though it were slower than the mean by so many deviations: more
makes workers idle before each new version, less makes more groups too late."""

MOST_RESTARTS = 6
"""Of a place within a version: counted one by one up to here, as a line beyond."""

DRY_ALLOWED = 0.04
"""Of a cycle: so long may the learner wait for the first batch of a version before more workers are demanded
for that."""


def default_publish_every(max_staleness: int) -> int:
    """Updates between published versions (κ) for a bound S: ECHO-2's S − 1, at least one."""
    return max(1, max_staleness - 1)


@dataclass(frozen=True)
class Demand:
    """What the learner consumes. Raises ValueError for values that no run can have."""

    batch_groups: int
    """Groups consumed by one update (R)."""
    train_s: float
    """Time of one update (T_train)."""
    max_staleness: int
    """The bound S."""
    publish_every: int | None = None
    """Updates between published versions; None is κ = max(1, S − 1)."""
    form: Form = "conservative"
    """Whether workers stop while they fetch and load a version, or generate on."""
    pacing_batches: int | None = None
    """Batches of groups that the learner lets exist at once; None is as many as the bound allows."""

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or not 0 < self.train_s < math.inf or self.max_staleness < 0:
            raise ValueError("batch_groups is at least 1, train_s positive, max_staleness not negative")
        if not 1 <= self.kappa <= self.max_staleness + 1:
            raise ValueError(
                f"publish_every = {self.kappa} is not from 1 to {self.max_staleness + 1}, max_staleness + 1: "
                "a version would be too old before the next one is published"
            )

    @property
    def kappa(self) -> int:
        return default_publish_every(self.max_staleness) if self.publish_every is None else self.publish_every

    @property
    def floor_rate(self) -> float:
        """R / T_train: what the learner consumes when it never waits."""
        return self.batch_groups / self.train_s


@dataclass(frozen=True)
class Timing:
    """What the model must know of one worker."""

    groups_per_s: float
    """Its rate while it has all the groups that it wants (μ)."""
    broadcast_s: float = 0.0
    """From the publication of a version to being ready with it (T_bcast)."""
    latency_s: float = 0.0
    """From a group's start to its arrival at the learner, on average."""
    latency_deviation_s: float = 0.0
    """How much that varies from group to group."""


def required_rate(demand: Demand, broadcast_s: float) -> float:
    """The rule in closed form: Σμ for workers that all need `broadcast_s`; infinite if no Σμ suffices."""
    cycle_s = demand.kappa * demand.train_s
    if broadcast_s >= cycle_s:
        return math.inf
    if demand.form == "overlapped":
        return demand.floor_rate
    return demand.kappa * demand.batch_groups / (cycle_s - broadcast_s)


def admissible_shares(
    demand: Demand,
    broadcast_s: Floats,
    latency_s: Floats,
    latency_deviation_s: Floats,
    period_s: float | None = None,
) -> Floats:
    """`admissible_share` of many workers at once."""
    period = demand.train_s if period_s is None else period_s
    cycle = demand.kappa * period
    stands_still = broadcast_s if demand.form == "conservative" else np.zeros_like(broadcast_s)
    turns_away = cycle + broadcast_s - stands_still
    # A group of mean length counts if it starts before this, a slow one must start a margin earlier.
    mean_start = _last_consumed(demand, period, stands_still) - latency_s
    last_start = np.minimum(turns_away, mean_start - SLOWEST_IN_DEVIATIONS * latency_deviation_s)
    starts = last_start - broadcast_s
    # From the last start until the next version nothing that counts can start, and groups in hand run on.
    barred = turns_away - last_start
    idle = _idle_s(starts, barred, latency_s, latency_deviation_s)
    late = _late_share(mean_start - last_start, starts, latency_deviation_s)
    share = (1 - late) * (cycle - stands_still - idle) / cycle
    # However much is overlapped, a worker that needs longer than a cycle for a version falls ever further
    # behind.
    return np.where((broadcast_s >= cycle) | (starts <= 0), 0.0, np.clip(share, 0.0, 1.0))


def _idle_s(starts_s: Floats, barred_s: Floats, latency_s: Floats, deviation_s: Floats) -> Floats:
    """How long a place for a group is empty in a cycle of `starts_s` and `barred_s`.

    Barred for less than a group takes: groups end evenly over their time, or later if all began a short time
    before. Barred for longer, all places are empty at a new version: each takes one group at once, and
    another whenever one ends while starts count.
    """
    latency_s = np.maximum(latency_s, 1e-9 * np.maximum(np.abs(starts_s) + barred_s, 1e-9))
    runs_on = np.maximum(latency_s / 2, latency_s - starts_s / 2)
    between = np.minimum(barred_s, barred_s**2 / (4 * runs_on))
    groups = 1 + _restarts(starts_s, latency_s, deviation_s)
    return np.where(barred_s < latency_s, between, np.maximum(0.0, starts_s + barred_s - latency_s * groups))


def _restarts(starts_s: Floats, latency_s: Floats, deviation_s: Floats) -> Floats:
    """How often, on average, a place that takes a group at once takes another in `starts_s` (renewals)."""
    ratio = np.maximum(starts_s, 0.0) / latency_s
    spread = np.maximum(deviation_s / latency_s, 1e-6)
    few = np.zeros_like(ratio)
    for count in range(1, MOST_RESTARTS + 4):
        few += ndtr((ratio - count) / (spread * math.sqrt(count)))
    return np.where(ratio > MOST_RESTARTS, ratio - 0.5 + spread**2 / 2, few)


def _last_consumed(demand: Demand, period_s: float, stands_still: Floats) -> Floats:
    """When a group must be done with: the start of the last update that may consume it.

    Less the time that a worker stands still, for a group that is in hand then; that is at the end of the
    cycle.
    """
    last = (demand.max_staleness + 1) * period_s - demand.train_s
    cycle = demand.kappa * period_s
    return np.where(stands_still > 0, np.maximum(last - stands_still, min(cycle, last)), last)


def _late_share(margin_s: Floats, starts_s: Floats, deviation_s: Floats) -> Floats:
    """Of groups that start evenly over `starts_s`, those slower than the mean by more than what is left.

    The last ones have `margin_s` left, earlier ones more; lengths are taken as normal.
    """
    margins = margin_s / np.maximum(deviation_s, 1e-12)
    beyond = np.exp(-0.5 * np.minimum(margins, 40) ** 2) / math.sqrt(2 * math.pi) - margins * ndtr(-margins)
    late = deviation_s * np.maximum(beyond, 0.0) / np.maximum(starts_s, 1e-12)
    return np.where(deviation_s > 0, np.clip(late, 0.0, 1.0), 0.0)


def admissible_share(demand: Demand, timing: Timing, period_s: float | None = None) -> float:
    """The share of a worker's time that goes into groups that can still be consumed, from 0 to 1.

    `period_s` is the time from update to update (T'), T_train if the learner never waits.
    """
    return float(Fleet([timing]).shares(demand, period_s)[0])


def sufficient_shares(
    demand: Demand, broadcast_s: Floats, latency_s: Floats, latency_deviation_s: Floats
) -> Floats:
    """What of each worker's rate may be counted so that R/T_train in all keeps the learner from waiting.

    The admissible share, and no more than its part of a version's first batch that is there in time.
    """
    shares = admissible_shares(demand, broadcast_s, latency_s, latency_deviation_s)
    cycle_s = demand.kappa * demand.train_s
    room_s = _must_be_there_s(demand) + DRY_ALLOWED * cycle_s - broadcast_s - latency_s
    # A batch in `room_s` asks for more than the admissible share does; then there is capacity to spare,
    # workers
    # wait for the version with empty hands for a part of the cycle, and begin all their groups at once.
    barred_s = np.minimum(_barred_s(demand, broadcast_s, latency_s, latency_deviation_s), latency_s)
    busy = (room_s + barred_s / 2) / demand.train_s
    waiting = (room_s + (barred_s + cycle_s) / 2) / (
        demand.train_s + cycle_s / (2 * np.maximum(shares, 1e-9))
    )
    empty = (room_s + latency_s / 2) / demand.train_s
    return np.clip(np.minimum(shares, np.maximum(busy, np.minimum(waiting, empty))), 0.0, 1.0)


def _barred_s(demand: Demand, broadcast_s: Floats, latency_s: Floats, latency_deviation_s: Floats) -> Floats:
    """How long before a new version is there nothing may start that could still be consumed."""
    stands_still = broadcast_s if demand.form == "conservative" else np.zeros_like(broadcast_s)
    slowest_s = latency_s + SLOWEST_IN_DEVIATIONS * latency_deviation_s
    last_start = _last_consumed(demand, demand.train_s, stands_still) - slowest_s
    return np.maximum(demand.kappa * demand.train_s + broadcast_s - stands_still - last_start, 0.0)


def _must_be_there_s(demand: Demand) -> float:
    """From a version's publication until the first update that cannot consume the one before."""
    return (demand.max_staleness + 1 - demand.kappa) * demand.train_s


def start_window(demand: Demand, timing: Timing) -> float:
    """The share of a cycle in which groups may start that still count.

    Below a half much hangs on when groups begin and end, and the model, which reckons with means, is
    optimistic.
    """
    stands_still = timing.broadcast_s if demand.form == "conservative" else 0.0
    barred_s = float(_barred_s(demand, *(np.array([value]) for value in _times(timing)))[0])
    cycle_s = demand.kappa * demand.train_s
    return max(0.0, cycle_s - stands_still - barred_s) / cycle_s


def _times(timing: Timing) -> tuple[float, float, float]:
    return timing.broadcast_s, timing.latency_s, timing.latency_deviation_s


class Fleet:
    """The workers' numbers as arrays."""

    def __init__(self, workers: Sequence[Timing]) -> None:
        columns = [
            (worker.groups_per_s, worker.broadcast_s, worker.latency_s, worker.latency_deviation_s)
            for worker in workers
        ]
        table = np.array(columns, dtype=float).reshape(len(columns), 4)
        self.rate, self.broadcast_s, self.latency_s, self.latency_deviation_s = table.T

    def faster_links(self, factor: float) -> "Fleet":
        faster = copy(self)
        faster.broadcast_s = self.broadcast_s / factor
        return faster

    def shares(self, demand: Demand, period_s: float | None = None) -> Floats:
        return admissible_shares(demand, self.broadcast_s, self.latency_s, self.latency_deviation_s, period_s)

    def admissible_rate(self, demand: Demand, period_s: float | None = None) -> float:
        return float(self.rate @ self.shares(demand, period_s))

    def sufficient_shares(self, demand: Demand) -> Floats:
        return sufficient_shares(demand, self.broadcast_s, self.latency_s, self.latency_deviation_s)

    def could_suffice(self, demand: Demand) -> bool:
        """Whether enough of some of these workers would keep the learner from waiting."""
        return bool((self.sufficient_shares(demand) > 0).any())

    def mean(self, values: Floats) -> float:
        """Weighted by rate; plain while none has one, 0 without workers."""
        if not len(self.rate):
            return 0.0
        return float(np.average(values, weights=self.rate if self.rate.any() else None))

    def first_batch_s(self, demand: Demand) -> float:
        """From a publication until a batch of groups of that version is there.

        Workers that are idle before, as nothing that counts could start or enough is there, begin all their
        groups at once; the others when one of the old ones ends.
        """
        spare = 1 - demand.floor_rate / max(self.admissible_rate(demand), demand.floor_rate)
        barred_s = _barred_s(demand, self.broadcast_s, self.latency_s, self.latency_deviation_s)
        idle_s = np.minimum(barred_s + spare * demand.kappa * demand.train_s, self.latency_s)
        ready_s = self.broadcast_s + self.latency_s - idle_s / 2
        made = (self.rate > 0) & np.isfinite(ready_s)
        order = np.argsort(ready_s[made], kind="stable")
        ready_s, rate = ready_s[made][order], np.cumsum(self.rate[made][order])
        # Between two workers' first groups the batch fills at the rate of those that have begun.
        filled = 0.0
        for index in range(len(ready_s)):
            until = ready_s[index + 1] if index + 1 < len(ready_s) else math.inf
            missing_s = (demand.batch_groups - filled) / rate[index]
            if ready_s[index] + missing_s <= until:
                return float(ready_s[index] + missing_s)
            filled += rate[index] * (until - ready_s[index])
        return math.inf


def admissible_rate(demand: Demand, workers: Sequence[Timing], period_s: float | None = None) -> float:
    """Groups per second that these workers make and the learner may consume."""
    return Fleet(workers).admissible_rate(demand, period_s)


def update_period_s(demand: Demand, workers: Sequence[Timing]) -> float:
    """The time from update to update that the model expects; infinite if nothing is ever consumed.

    With too little capacity the learner waits, which stretches the cycle that a broadcast takes its part of:
    T' is the least period in which admissible groups for one update are made, with equal workers in the
    conservative form R/Σμ + T_bcast/κ; and no less than a cycle's mean if the learner runs dry once in it.
    """
    return fleet_period_s(demand, Fleet(workers))


def fleet_period_s(demand: Demand, fleet: Fleet) -> float:
    """`update_period_s` of workers as arrays."""
    if not (fleet.rate > 0).any():
        return math.inf
    # Once in a cycle the learner may have to wait for the first batch of a version.
    dry_s = max(0.0, fleet.first_batch_s(demand) - _must_be_there_s(demand))
    return max(_rate_period_s(demand, fleet), demand.train_s + dry_s / demand.kappa)


def _rate_period_s(demand: Demand, fleet: Fleet) -> float:
    def enough(period: float) -> bool:
        return fleet.admissible_rate(demand, period) * period >= demand.batch_groups * (1 - 1e-9)

    if enough(demand.train_s):
        return demand.train_s
    low = high = demand.train_s
    while not enough(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def expected_utilization(demand: Demand, workers: Sequence[Timing]) -> float:
    """The share of time that the learner trains, as the model predicts it."""
    return demand.train_s / update_period_s(demand, workers)


def pacing_batches_needed(demand: Demand, latency_s: float, share: float = 1.0) -> int:
    """Batches that must exist: the one in training, one that fills, what is made during `latency_s`, and what
    is made ahead for the part of a cycle, 1 − `share`, in which nothing is."""
    ahead = demand.kappa * (1 - share)
    return 2 + math.ceil(latency_s / demand.train_s + ahead - 1e-9)
