"""How published versions reach workers: each fetches the newest when it is free to, as the node does.

Nothing is scheduled per worker and version: a worker's state is brought up to the time at which it is looked
at.
"""

from dataclasses import dataclass

from swarmnode.scheduler.broadcast import MBIT, broadcast_from_totals
from swarmnode.simulator.population import Machine
from swarmnode.simulator.scenario import WeightsSection


@dataclass(frozen=True)
class Publication:
    version: int
    time_s: float
    swarm_s_per_byte: float
    """What source and all receivers' uplinks together take for a byte."""


class WorkerWeights:
    """Where one worker stands. Times only go forward."""

    __slots__ = (
        "follows",
        "free_at_s",
        "paused_s",
        "ready_s",
        "started_s",
        "steady",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.version: int | None = None
        self.free_at_s = 0.0
        self.target: int | None = None
        """The version being fetched."""
        self.started_s = 0.0
        self.ready_s = 0.0
        self.paused_s = 0.0
        """Time that fetching took so far, those that are done."""
        self.follows = False
        self.steady = False
        """Whether it has had a version since it follows: from then on its fetches say how long a broadcast
        takes."""

    def fetching_for_s(self, now: float) -> float:
        """Time that fetching has taken up to now, the one under way included."""
        under_way = now - self.started_s if self.target is not None else 0.0
        return self.paused_s + under_way


class Weights:
    """The publications, and what they mean to each worker."""

    def __init__(self, section: WeightsSection) -> None:
        self._section = section
        self.publications: list[Publication] = []
        self.receivers = 0
        self.serving_mbps = 0.0
        self.sent_bytes = 0.0
        self.broadcast_log: list[tuple[Machine, float]] = []
        """Workers that became ready, and how long after the publication; emptied by who measures."""

    def publish(self, version: int, now: float) -> None:
        """A version is there from now on."""
        broadcast = broadcast_from_totals(
            1e6,
            self._section.source_upload_mbps,
            receivers=max(1, self.receivers),
            serving_mbps=self.serving_mbps,
            overhead=self._section.overhead,
        )
        self.publications.append(Publication(version, now, broadcast.overhead * broadcast.swarm_s / 1e6))

    def follow(self, machine: Machine, weights: WorkerWeights, now: float, *, follows: bool) -> None:
        """A worker begins to fetch versions (active or on warm standby), or stops to."""
        if weights.follows == follows:
            return
        self.advance(machine, weights, now)
        weights.follows = follows
        weights.steady = False
        sign = 1 if follows else -1
        self.receivers += sign
        if machine.link.serves:
            self.serving_mbps += sign * machine.link.upload_mbps
        if follows:
            weights.free_at_s = max(weights.free_at_s, now)
            self.advance(machine, weights, now)
        elif weights.target is not None:
            weights.target = None

    def start_s(self, machine: Machine, weights: WorkerWeights) -> float:
        """From an activation now until the worker has weights to generate with."""
        if weights.follows and weights.version is not None:
            return 0.0
        section = self._section
        own_s = section.snapshot_mb * 1e6 / (machine.link.download_mbps * MBIT)
        return section.overhead * own_s + machine.link.round_trip_s + section.load_s

    def lose(self, machine: Machine, weights: WorkerWeights, now: float) -> None:
        """The machine is gone, and what it had with it."""
        self.follow(machine, weights, now, follows=False)
        weights.version = None

    def advance(self, machine: Machine, weights: WorkerWeights, now: float) -> None:
        """Bring a worker's state up to now."""
        while True:
            if weights.target is not None:
                if weights.ready_s > now:
                    return
                weights.version = weights.target
                weights.free_at_s = weights.ready_s
                weights.paused_s += weights.ready_s - weights.started_s
                weights.target = None
                weights.steady = True
            if not weights.follows or not self.publications:
                return
            wanted = self._newest_at(weights.free_at_s, weights.version)
            if wanted is None or wanted.time_s > now:
                return
            self._start(machine, weights, wanted)

    def _newest_at(self, free_at_s: float, version: int | None) -> Publication | None:
        """The newest one at the time when the worker is free, or the next one to come after that."""
        newer: Publication | None = None
        for publication in reversed(self.publications):
            if version is not None and publication.version <= version:
                break
            if publication.time_s <= free_at_s:
                return publication
            newer = publication
        return newer

    def _start(self, machine: Machine, weights: WorkerWeights, publication: Publication) -> None:
        section = self._section
        size = section.snapshot_mb * 1e6
        if weights.version is not None:
            missed = 0
            for one in reversed(self.publications):
                if one.version <= weights.version:
                    break
                missed += one.version <= publication.version
            size = min(size, missed * section.delta_mb * 1e6)
        own_s = size / (machine.link.download_mbps * MBIT)
        transfer_s = max(size * publication.swarm_s_per_byte, section.overhead * own_s)
        weights.started_s = max(weights.free_at_s, publication.time_s)
        weights.ready_s = weights.started_s + transfer_s + machine.link.round_trip_s + section.load_s
        weights.target = publication.version
        self.sent_bytes += size
        if weights.steady:
            self.broadcast_log.append((machine, weights.ready_s - publication.time_s))
