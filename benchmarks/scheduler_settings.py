"""Random settings of a fleet for the scheduler's benchmark: what a run and its workers may be like, with the
model's prediction for each."""

import random
from dataclasses import dataclass, replace
from typing import Any

from swarmnode.scheduler.capacity import (
    Demand,
    Fleet,
    Timing,
    expected_utilization,
    pacing_batches_needed,
    start_window,
)
from swarmnode.simulator.scenario import Scenario, parse_scenario

LONGEST_GROUP = 1.25
"""Updates that a group takes on average, at most."""
MOST_SPREAD = 0.4
"""Deviation of a group's time, relative, at most."""
LONGEST_BROADCAST = 0.6
"""Of a cycle, at most."""
LEAST_WINDOW = 0.55
"""Share of a cycle in which groups may start: below a half `swarmnode plan` says that predictions are
optimistic."""
LEAST_SHARE, SLOWER = 0.5, 1.1
"""Of a worker's time that may be counted, even if groups took a tenth longer: below that a person would heed
the advice and change S or κ, as too much hangs by a hair."""


@dataclass(frozen=True)
class Setting:
    """A run, equal workers, and how many of them the rule demands."""

    seed: int
    demand: Demand
    timing: Timing
    """What the model is told of a worker: its rate includes the round trip between two groups."""
    kind: dict[str, Any]
    """The worker as a class of the simulator."""
    spread: float
    rule: float
    """Workers that the rule demands; not whole."""

    def scenario(self, workers: int, **plan: Any) -> Scenario:
        """So many of these workers, simulated for some sixty updates and at least twenty broadcasts."""
        demand = self.demand
        cycles = 60 + 20 * demand.kappa
        return parse_scenario(
            {
                "name": f"setting {self.seed}",
                "seed": self.seed,
                "duration_s": demand.train_s * cycles,
                "warmup_s": demand.train_s * (6 + 3 * demand.kappa),
                "run": {
                    "batch_groups": demand.batch_groups,
                    "train_s": demand.train_s,
                    "train_spread": 0.02,
                    "max_staleness": demand.max_staleness,
                    "publish_every": demand.publish_every,
                    "pacing_batches": demand.pacing_batches,
                    "form": demand.form,
                    "completion_tokens": 1,
                    "length_spread": self.spread,
                },
                "weights": {"load_s": self.timing.broadcast_s, "delta_mb": 0.001, "snapshot_mb": 0.001},
                "plan": plan,
                "nodes": [self.kind | {"count": workers}],
            },
            "setting",
        )

    def predicted(self, workers: int) -> float:
        return expected_utilization(self.demand, [self.timing] * workers)


def draw_setting(seed: int) -> Setting:
    """Redrawn until the model says that enough of the workers can keep the learner busy."""
    rng = random.Random(seed)
    while True:
        setting = _draw(seed, rng)
        if setting is not None:
            return setting


def _draw(seed: int, rng: random.Random) -> Setting | None:
    staleness = rng.randint(2, 12)
    kappa = rng.choice([max(1, staleness - 1), rng.randint(1, max(1, staleness - 1))])
    train_s = rng.uniform(5, 90)
    batch = rng.choice([32, 64, 128, 256])
    spread = rng.uniform(0.1, MOST_SPREAD)
    round_trip_s = rng.uniform(0.01, 0.3)
    broadcast_s = rng.uniform(0, LONGEST_BROADCAST) * kappa * train_s
    form = rng.choice(["conservative", "overlapped"])
    # About so many workers would do if all that they make counted.
    plain_rate = batch / train_s / rng.randint(12, 80)
    in_hand = max(1, round(plain_rate * rng.uniform(0.1, LONGEST_GROUP) * train_s))
    group_s = in_hand / plain_rate
    if group_s + round_trip_s > LONGEST_GROUP * train_s:
        return None
    timing = Timing(
        groups_per_s=in_hand / (group_s + round_trip_s),
        broadcast_s=broadcast_s,
        latency_s=group_s + round_trip_s,
        latency_deviation_s=spread * group_s,
    )
    demand = Demand(batch, train_s, staleness, kappa, form)  # type: ignore[arg-type]
    fleet = Fleet([timing])
    share = float(fleet.sufficient_shares(demand)[0])
    if start_window(demand, timing) < LEAST_WINDOW:
        return None
    slower = replace(timing, latency_s=SLOWER * timing.latency_s)
    if float(Fleet([slower]).sufficient_shares(demand)[0]) < LEAST_SHARE:
        return None
    pacing = pacing_batches_needed(demand, timing.latency_s, float(fleet.shares(demand)[0]))
    demand = Demand(batch, train_s, staleness, kappa, form, min(staleness + 1, pacing))  # type: ignore[arg-type]
    kind = {
        "name": "worker",
        "groups_per_min": 60 * plain_rate,
        "groups_in_hand": in_hand,
        "round_trip_ms": 1000 * round_trip_s,
        "rate_wobble": 0.0,
        "price_per_hour": 1.0,
    }
    return Setting(seed, demand, timing, kind, spread, demand.floor_rate / (share * timing.groups_per_s))
