"""Random tables of offers, as columns."""

import math

import numpy as np

from swarmnode.scheduler.problem import Problem


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
        region_mbps=np.array(
            [
                traffic[region == r].sum() * rng.uniform(0.4, 0.9) if limited else math.inf
                for r in range(regions)
            ]
        ),
        budget=float(cost.sum() * rng.uniform(0.3, 0.9)) if limits and rng.random() < 0.3 else math.inf,
    )
