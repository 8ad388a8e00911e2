"""Random tables of offers, for the planner's benchmark and its tests."""

import math

import numpy as np

from swarmnode.scheduler.capacity import Timing
from swarmnode.scheduler.offers import WorkerOffer
from swarmnode.scheduler.problem import Floats, Numbers, Problem


def random_problem(rng: np.random.Generator, offers: int, *, limits: bool = True) -> Problem:
    """Prices that follow speed loosely, some volunteers, and in half of the tables each kind of limit."""
    rate = rng.lognormal(0, 0.8, offers)
    price = rate * rng.lognormal(-1, 0.4, offers)
    price[rng.random(offers) < 0.1] = 0
    presence = rng.uniform(0.85, 1, offers)
    mean = presence * rate
    regions = int(rng.integers(1, 5))
    region = rng.integers(0, regions, offers)
    owner = rng.integers(0, max(2, offers // 3), offers)
    traffic = rng.uniform(5, 20, offers) + rate * rng.uniform(2, 20)
    cost = np.maximum(price, 0.01)
    limited = limits and rng.random() < 0.5
    return Problem(
        cost=cost,
        price=price,
        mean=mean,
        variance=mean * (1 - presence) * rate + presence * (0.1 * rate) ** 2,
        owner=owner,
        region=region,
        traffic_mbps=traffic,
        need=float(mean.sum() * rng.uniform(0.1, 0.5)),
        z=1.645,
        owner_share=float(rng.uniform(0.3, 0.6)) if limits and rng.random() < 0.5 else 1.0,
        region_mbps=_links(rng, region, traffic, regions) if limited else np.full(regions, math.inf),
        budget=float(cost.sum() * rng.uniform(0.3, 0.9)) if limits and rng.random() < 0.3 else math.inf,
    )


def _links(rng: np.random.Generator, region: Numbers, traffic: Floats, regions: int) -> Floats:
    """By region, room for a part of the traffic that all its workers would make."""
    everyone = np.bincount(region, traffic, minlength=regions)
    return everyone * rng.uniform(0.4, 0.9, regions)


def random_offers(rng: np.random.Generator, count: int) -> list[WorkerOffer]:
    """A market: prices that follow speed loosely, four regions, owners of about three, one in ten free."""
    rate = rng.lognormal(-3, 0.7, count)
    price = rate * rng.lognormal(2, 0.4, count)
    price[rng.random(count) < 0.1] = 0
    owners = rng.integers(0, max(1, count // 3), count)
    regions = rng.integers(0, 4, count)
    broadcast_s = rng.uniform(2, 30, count)
    latency_s = rng.uniform(5, 40, count)
    return [
        WorkerOffer(
            worker=index.to_bytes(8, "big"),
            timing=Timing(float(rate[index]), float(broadcast_s[index]), float(latency_s[index])),
            name=f"w{index}",
            owner=f"owner {owners[index]}",
            region=f"region {regions[index]}",
            price_per_hour=float(price[index]),
            presence=float(rng.uniform(0.95, 1)),
            departures_per_hour=float(rng.uniform(0, 0.3)),
            traffic_mbps=float(rng.uniform(5, 20)),
        )
        for index in range(count)
    ]
