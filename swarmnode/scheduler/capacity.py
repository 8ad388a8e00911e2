"""The capacity rule: how many groups per second the active workers must make so that the learner never waits.

The rule Σμ ≥ κR / (κ·T_train − T_bcast) with κ = max(1, S − 1) is a reconstruction of ECHO-2's, whose formula
was not seen; `docs/capacity.md` derives it. Rates are groups per second, times are seconds.

A worker's groups count only while they can still be consumed within the staleness bound S. A version is
published every κ updates, at time 0 say, and the next one κ·T' later, T' being the time from update to
update. A worker is ready with it at B (its T_bcast) and starts groups with it until it turns to the next
version: at κT' in the conservative form, where it stops to load, at κT' + B in the overlapped form, where it
generates meanwhile. The last update that may consume them begins at (S+1)·T' − T_train, so a group that takes
L from its start to the learner must start L before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Form = Literal["conservative", "overlapped"]

Floats = npt.NDArray[np.float64]

MOST_STALENESS = 10_000
"""As far as `RunSpec.max_staleness` goes; advice looks no further."""

SPEED_UPS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Factors of bandwidth that advice tries."""


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
    """From a group's start to its arrival at the learner."""


def required_rate(demand: Demand, broadcast_s: float) -> float:
    """The rule in closed form: Σμ for workers that all need `broadcast_s`; infinite if no Σμ suffices."""
    cycle_s = demand.kappa * demand.train_s
    if broadcast_s >= cycle_s:
        return math.inf
    if demand.form == "overlapped":
        return demand.floor_rate
    return demand.kappa * demand.batch_groups / (cycle_s - broadcast_s)


def admissible_shares(
    demand: Demand, broadcast_s: Floats, latency_s: Floats, period_s: float | None = None
) -> Floats:
    """`admissible_share` of many workers at once."""
    period = demand.train_s if period_s is None else period_s
    cycle = demand.kappa * period
    turns_away = cycle if demand.form == "conservative" else cycle + broadcast_s
    last_start = (demand.max_staleness + 1) * period - demand.train_s - latency_s
    share = np.maximum(0.0, np.minimum(turns_away, last_start) - broadcast_s) / cycle
    # However much is overlapped, a worker that needs longer than a cycle for a version falls ever further
    # behind.
    return np.where(broadcast_s >= cycle, 0.0, share)


def admissible_share(
    demand: Demand, broadcast_s: float, latency_s: float, period_s: float | None = None
) -> float:
    """The share of a worker's time in which it starts groups that can still be consumed, from 0 to 1.

    `period_s` is the time from update to update (T'), T_train if the learner never waits.
    """
    return float(admissible_shares(demand, np.array([broadcast_s]), np.array([latency_s]), period_s)[0])


class _Fleet:
    """The workers' numbers as arrays."""

    def __init__(self, workers: Sequence[Timing]) -> None:
        columns = [(worker.groups_per_s, worker.broadcast_s, worker.latency_s) for worker in workers]
        table = np.array(columns, dtype=float).reshape(len(columns), 3)
        self.rate, self.broadcast_s, self.latency_s = table.T

    def faster_links(self, factor: float) -> "_Fleet":
        faster = _Fleet([])
        faster.rate, faster.broadcast_s, faster.latency_s = (
            self.rate,
            self.broadcast_s / factor,
            self.latency_s,
        )
        return faster

    def shares(self, demand: Demand, period_s: float | None = None) -> Floats:
        return admissible_shares(demand, self.broadcast_s, self.latency_s, period_s)

    def admissible_rate(self, demand: Demand, period_s: float | None = None) -> float:
        return float(self.rate @ self.shares(demand, period_s))

    def mean_share(self, demand: Demand) -> float:
        """Weighted by rate; plain while none has one."""
        if not len(self.rate):
            return 0.0
        total = float(self.rate.sum())
        return self.admissible_rate(demand) / total if total > 0 else float(self.shares(demand).mean())


def admissible_rate(demand: Demand, workers: Sequence[Timing], period_s: float | None = None) -> float:
    """Groups per second that these workers make and the learner may consume."""
    return _Fleet(workers).admissible_rate(demand, period_s)


def update_period_s(demand: Demand, workers: Sequence[Timing]) -> float:
    """The time from update to update that the model expects; infinite if nothing is ever consumed.

    With too little capacity the learner waits, which stretches the cycle that a broadcast takes its part of:
    T' is the least period in which admissible groups for one update are made. With equal workers in the
    conservative form that is R/Σμ + T_bcast/κ.
    """
    fleet = _Fleet(workers)
    if not (fleet.rate > 0).any():
        return math.inf

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


def pacing_batches_needed(demand: Demand, latency_s: float) -> int:
    """Batches that must exist at once: one that fills, and what is made while a group takes `latency_s`."""
    return 1 + math.ceil(latency_s / demand.train_s - 1e-9)


@dataclass(frozen=True)
class Advice:
    """One way out: which knob, from where to where."""

    knob: Literal["max_staleness", "publish_every", "batch_groups", "bandwidth", "workers", "pacing_batches"]
    text: str
    value: float | None = None
    """The least (`bandwidth`: factor) value that helps; None where the text says all."""


@dataclass(frozen=True)
class Assessment:
    """Capacity against need."""

    required_rate: float
    """Σμ that the rule demands of these workers' mix; infinite if no amount of them suffices."""
    offered_rate: float
    """Their Σμ."""
    admissible_rate: float
    """What of it can still be consumed when the learner never waits."""
    period_s: float
    utilization: float
    advice: tuple[Advice, ...]

    @property
    def feasible(self) -> bool:
        """Whether more of the same workers could ever suffice."""
        return math.isfinite(self.required_rate)

    @property
    def is_met(self) -> bool:
        return self.offered_rate >= self.required_rate * (1 - 1e-9)

    @property
    def ratio(self) -> float:
        """Capacity over need; 0 when nothing suffices."""
        return self.offered_rate / self.required_rate


def assess(demand: Demand, workers: Sequence[Timing]) -> Assessment:
    """Compare capacity with need and say what to change.

    For unequal workers the required Σμ is R/T_train over the mean admissible share, each weighted by its
    rate.
    """
    fleet = _Fleet(workers)
    offered = float(fleet.rate.sum())
    share = fleet.mean_share(demand)
    required = demand.floor_rate / share if share > 0 else math.inf
    period = update_period_s(demand, workers)
    return Assessment(
        required_rate=required,
        offered_rate=offered,
        admissible_rate=offered * share,
        period_s=period,
        utilization=demand.train_s / period,
        advice=_advice(demand, fleet, offered, required),
    )


def _advice(demand: Demand, fleet: _Fleet, offered: float, required: float) -> tuple[Advice, ...]:
    if not len(fleet.rate):
        return (Advice("workers", f"no workers; the learner consumes {_per_min(demand.floor_rate)}"),)
    advice: list[Advice] = []
    if math.isinf(required):
        advice += _ways_to_feasible(demand, fleet)
    elif offered < required * (1 - 1e-9):
        missing = required - offered
        advice.append(Advice("workers", f"{_per_min(missing)} of more workers like these", missing))
        advice += _ways_to_less(demand, fleet, offered)
    latency = float(np.average(fleet.latency_s, weights=fleet.rate if offered > 0 else None))
    needed = pacing_batches_needed(demand, latency)
    if demand.pacing_batches is not None and demand.pacing_batches < needed:
        text = f"groups take {latency:.1f} s, and only {demand.pacing_batches} batches may exist"
        advice.append(Advice("pacing_batches", f"pacing_batches = {needed}: {text}", needed))
    return tuple(advice)


def _ways_to_feasible(demand: Demand, fleet: _Fleet) -> list[Advice]:
    """No amount of these workers suffices: the least change of each knob that lets some of their groups
    count."""
    fastest = int(np.argmin(fleet.broadcast_s + fleet.latency_s))
    broadcast, latency = float(fleet.broadcast_s[fastest]), float(fleet.latency_s[fastest])
    why = f"a version takes {broadcast:.1f} s to the fastest worker, a group {latency:.1f} s back"
    found: list[Advice] = []

    def feasible(changed: Demand) -> bool:
        return bool((fleet.shares(changed) > 0).any())

    def with_batch(groups: int) -> Demand:
        # An update of more groups takes proportionally longer.
        return replace(demand, batch_groups=groups, train_s=demand.train_s * groups / demand.batch_groups)

    old = demand.max_staleness
    staleness = _least(old + 1, MOST_STALENESS, lambda bound: feasible(replace(demand, max_staleness=bound)))
    if staleness is not None:
        found.append(Advice("max_staleness", f"S = {staleness} instead of {old}: {why}", staleness))
    kappas = (kappa for kappa in range(1, old + 2) if feasible(replace(demand, publish_every=kappa)))
    kappa = next(kappas, None)
    if kappa is not None:
        found.append(Advice("publish_every", f"publish_every = {kappa} instead of {demand.kappa}", kappa))
    batch = _least(
        demand.batch_groups + 1, 1000 * demand.batch_groups, lambda groups: feasible(with_batch(groups))
    )
    if batch is not None:
        text = f"batches of {batch} groups instead of {demand.batch_groups}, so that an update takes longer"
        found.append(Advice("batch_groups", text, batch))
    room = min(demand.kappa * demand.train_s, demand.max_staleness * demand.train_s - latency)
    if 0 < room <= broadcast:
        text = (
            f"more than {broadcast / room:.2f} × the bandwidth: versions must be ready in under {room:.1f} s"
        )
        found.append(Advice("bandwidth", text, broadcast / room))
    return found


def _ways_to_less(demand: Demand, fleet: _Fleet, offered: float) -> list[Advice]:
    """Knobs that bring the need below what there is."""
    found: list[Advice] = []

    def met(changed: Demand, speed: float = 1.0) -> bool:
        return fleet.faster_links(speed).admissible_rate(changed) >= changed.floor_rate * (1 - 1e-9)

    if offered >= demand.floor_rate:
        staleness = _least(
            demand.max_staleness + 1,
            MOST_STALENESS,
            lambda bound: met(replace(demand, max_staleness=bound, publish_every=None)),
        )
        if staleness is not None:
            kappa = default_publish_every(staleness)
            text = f"S = {staleness} with publish_every = {kappa}: these workers suffice"
            found.append(Advice("max_staleness", text, staleness))
        factor = next((factor for factor in SPEED_UPS if met(demand, factor)), None)
        if factor is not None:
            found.append(Advice("bandwidth", f"{factor:g} × the bandwidth: these workers suffice", factor))
    groups = math.floor(demand.batch_groups * offered / demand.floor_rate)
    if 1 <= groups < demand.batch_groups:
        text = f"{groups} groups per update of {demand.train_s:.1f} s is the most that these workers make"
        found.append(Advice("batch_groups", text, groups))
    return found


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The least number in [low, high] that holds, for a condition that holds from some number on."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _per_min(rate: float) -> str:
    return f"{60 * rate:.1f} groups/min"
