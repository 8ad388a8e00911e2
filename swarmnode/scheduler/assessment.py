"""Capacity against need, and what to change: which of S, κ, R, bandwidth or workers, by how much."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from swarmnode.scheduler.capacity import (
    Demand,
    Fleet,
    Timing,
    default_publish_every,
    fleet_period_s,
    pacing_batches_needed,
    start_window,
)

MOST_STALENESS = 10_000
"""As far as `RunSpec.max_staleness` goes; advice looks no further."""

NARROW = 0.5
"""Share of a cycle for starts below which a person is told."""

BOUNDS_TRIED = 17
"""Advice for workers that nearly suffice looks so far above the bound, at every κ."""

SPEED_UPS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Factors of bandwidth that advice tries."""


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
    fleet = Fleet(workers)
    offered = float(fleet.rate.sum())
    share = fleet.mean(fleet.sufficient_shares(demand))
    required = demand.floor_rate / share if share > 0 else math.inf
    period = fleet_period_s(demand, fleet)
    return Assessment(
        required_rate=required,
        offered_rate=offered,
        admissible_rate=fleet.admissible_rate(demand),
        period_s=period,
        utilization=demand.train_s / period,
        advice=_advice(demand, fleet, offered, required),
    )


def _advice(demand: Demand, fleet: Fleet, offered: float, required: float) -> tuple[Advice, ...]:
    if not len(fleet.rate):
        return (Advice("workers", f"no workers; the learner consumes {_per_min(demand.floor_rate)}"),)
    advice: list[Advice] = []
    if math.isinf(required):
        advice += _ways_to_feasible(demand, fleet)
    elif offered < required * (1 - 1e-9):
        missing = required - offered
        advice.append(Advice("workers", f"{_per_min(missing)} of more workers like these", missing))
        advice += _ways_to_less(demand, fleet, offered)
    elif _narrow(demand, fleet):
        text = "a larger S or a smaller κ: groups may start in less than half of a cycle, and predictions are"
        advice.append(Advice("max_staleness", f"{text} optimistic then"))
    latency = fleet.mean(fleet.latency_s)
    needed = pacing_batches_needed(demand, latency, fleet.mean(fleet.shares(demand)))
    if demand.pacing_batches is not None and demand.pacing_batches < needed:
        text = f"groups take {latency:.1f} s, and only {demand.pacing_batches} batches may exist"
        advice.append(Advice("pacing_batches", f"pacing_batches = {needed}: {text}", needed))
    return tuple(advice)


def _narrow(demand: Demand, fleet: Fleet) -> bool:
    """Whether a worker that is like the mean of them has little time to start groups in."""
    mean = Timing(
        1.0,
        fleet.mean(fleet.broadcast_s),
        fleet.mean(fleet.latency_s),
        fleet.mean(fleet.latency_deviation_s),
    )
    return start_window(demand, mean) < NARROW


def _ways_to_feasible(demand: Demand, fleet: Fleet) -> list[Advice]:
    """No amount of these workers suffices: the least change of each knob that lets some of their groups
    count."""
    fastest = int(np.argmin(fleet.broadcast_s + fleet.latency_s))
    broadcast, latency = float(fleet.broadcast_s[fastest]), float(fleet.latency_s[fastest])
    why = f"a version takes {broadcast:.1f} s to the fastest worker, a group {latency:.1f} s back"
    found: list[Advice] = []

    def with_batch(groups: int) -> Demand:
        # An update of more groups takes proportionally longer.
        return replace(demand, batch_groups=groups, train_s=demand.train_s * groups / demand.batch_groups)

    old = demand.max_staleness
    # The least κ whose cycle is longer than a broadcast leaves the most updates for a version's way.
    least = max(1, math.floor(broadcast / demand.train_s + 1e-9) + 1) if math.isfinite(broadcast) else 1
    staleness = _least(
        max(old + 1, least - 1),
        MOST_STALENESS,
        lambda bound: fleet.could_suffice(replace(demand, max_staleness=bound, publish_every=least)),
    )
    if staleness is not None:
        text = f"S = {staleness} with publish_every = {least}: {why}"
        found.append(Advice("max_staleness", text, staleness))
    kappas = (
        kappa for kappa in range(1, old + 2) if fleet.could_suffice(replace(demand, publish_every=kappa))
    )
    kappa = next(kappas, None)
    if kappa is not None:
        found.append(Advice("publish_every", f"publish_every = {kappa} instead of {demand.kappa}", kappa))
    batch = _least(
        demand.batch_groups + 1,
        1000 * demand.batch_groups,
        lambda groups: fleet.could_suffice(with_batch(groups)),
    )
    if batch is not None:
        text = f"batches of {batch} groups instead of {demand.batch_groups}, so that an update takes longer"
        found.append(Advice("batch_groups", text, batch))
    factor = next((factor for factor in SPEED_UPS if fleet.faster_links(factor).could_suffice(demand)), None)
    if factor is not None:
        found.append(Advice("bandwidth", f"{factor:g} × the bandwidth", factor))
    return found


def _ways_to_less(demand: Demand, fleet: Fleet, offered: float) -> list[Advice]:
    """Knobs that bring the need below what there is."""
    found: list[Advice] = []

    def met(changed: Demand, speed: float = 1.0) -> bool:
        faster = fleet.faster_links(speed)
        counted = float(faster.rate @ faster.sufficient_shares(changed))
        return counted >= changed.floor_rate * (1 - 1e-9)

    if offered >= demand.floor_rate:
        changes = (
            (bound, kappa)
            for bound in range(demand.max_staleness + 1, demand.max_staleness + BOUNDS_TRIED)
            for kappa in range(default_publish_every(bound), 0, -1)
            if met(replace(demand, max_staleness=bound, publish_every=kappa))
        )
        change = next(changes, None)
        if change is not None:
            text = f"S = {change[0]} with publish_every = {change[1]}: these workers suffice"
            found.append(Advice("max_staleness", text, change[0]))
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
