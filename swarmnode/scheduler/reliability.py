"""The probability that the capacity of a choice of workers falls short of the need."""

import math
from statistics import NormalDist

import numpy as np

from swarmnode.scheduler.problem import Floats

EXACT_UP_TO = 300
"""Workers up to which the distribution is computed; beyond, it is as good as normal."""
BINS = 4096
TOLERANCE = 0.005
"""Relative to the need: capacity that comes so close does not count as short. A rate between two bins is
split over both, which blurs a sum by less than that, and exactly enough must be enough."""


def shortfall_probability(rate: Floats, presence: Floats, rate_spread: Floats, need: float) -> float:
    """P(Σ < need), where worker i brings a rate about `rate` (relative deviation `rate_spread`) if present,
    else none.

    Workers are independent: what all lose together (a provider's outage) is for the bound on an owner's
    share.
    """
    need *= 1 - TOLERANCE
    if need <= 0:
        return 0.0
    mean = float((presence * rate).sum())
    if mean <= 0:
        return 1.0
    if len(rate) > EXACT_UP_TO:
        variance = presence * (1 - presence) * rate**2 + presence * (rate_spread * rate) ** 2
        deviation = math.sqrt(float(variance.sum()))
        return NormalDist().cdf((need - mean) / deviation) if deviation > 0 else float(mean < need)
    return _by_convolution(rate, presence, rate_spread, need)


def _by_convolution(rate: Floats, presence: Floats, rate_spread: Floats, need: float) -> float:
    """Who is there: sums of whole bins, exactly. How fast they then are together: normal around each sum."""
    width = max(float(rate.sum()), need) / (BINS - 1)
    mass = np.zeros(BINS)
    mass[0] = 1.0
    for one, there in zip(rate, presence, strict=True):
        steps, part = divmod(float(one) / width, 1.0)
        low = int(steps)
        moved = np.zeros(BINS)
        moved[low:] += (1 - part) * mass[: BINS - low]
        moved[low + 1 :] += part * mass[: BINS - low - 1]
        mass = (1 - there) * mass + there * moved
    sums = np.arange(BINS) * width
    total = float(rate.sum())
    spread = math.sqrt(float(((rate_spread * rate) ** 2).sum()))
    if spread <= 0:
        return float(mass[sums < need].sum())
    # A smaller sum has fewer workers' variations.
    deviation = spread * np.sqrt(np.maximum(sums, width) / total)
    normal = NormalDist()
    return float(
        sum(
            m * normal.cdf((need - s) / d) for m, s, d in zip(mass, sums, deviation, strict=True) if m > 1e-15
        )
    )
