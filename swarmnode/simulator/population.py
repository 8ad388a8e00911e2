"""The machines of a scenario, drawn from its classes with its seed."""

import math
import random
from dataclasses import dataclass

from swarmnode.scheduler.broadcast import Link
from swarmnode.simulator.scenario import NodeClass, Scenario

LEAST = 0.05
"""Of a class's mean: no machine is drawn slower or narrower than this."""


@dataclass(frozen=True)
class Machine:
    """What a machine is; what it does is elsewhere."""

    number: int
    key: bytes
    kind: NodeClass
    owner: str
    groups_per_s: float
    link: Link
    price_per_hour: float
    is_cheat: bool
    present: bool


def lognormal(rng: random.Random, mean: float, spread: float) -> float:
    """A positive number with this mean and relative standard deviation."""
    if spread <= 0:
        return mean
    variance = math.log(1 + spread * spread)
    return mean * math.exp(rng.gauss(-variance / 2, math.sqrt(variance)))


def draw_machines(scenario: Scenario, rng: random.Random) -> list[Machine]:
    """All machines, numbered from 1 (0 is the learner)."""
    machines: list[Machine] = []
    for kind in scenario.nodes:
        for index in range(kind.count):
            number = len(machines) + 1
            width = max(LEAST, lognormal(rng, 1.0, kind.bandwidth_spread))
            behind_nat = rng.random() < kind.nat_share
            owner = f"{kind.name} owner {index % kind.owners}" if kind.owners else f"owner of {number}"
            machines.append(
                Machine(
                    number=number,
                    key=number.to_bytes(8, "big"),
                    kind=kind,
                    owner=owner,
                    groups_per_s=kind.groups_per_min / 60 * max(LEAST, lognormal(rng, 1.0, kind.rate_spread)),
                    link=Link(
                        upload_mbps=kind.upload_mbps * width,
                        download_mbps=kind.download_mbps * width,
                        # A relay is one more way there and back.
                        round_trip_s=kind.round_trip_ms / 1000 * (2 if behind_nat else 1),
                        serves=not behind_nat,
                    ),
                    price_per_hour=lognormal(rng, kind.price_per_hour, kind.price_spread),
                    is_cheat=rng.random() < kind.cheat_share,
                    present=rng.random() < kind.present_share,
                )
            )
    return machines
