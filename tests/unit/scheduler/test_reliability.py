"""The probability of falling short, against exact values and counting."""

from math import comb

import numpy as np
import pytest

from swarmnode.scheduler.reliability import EXACT_UP_TO, TOLERANCE, shortfall_probability


def binomial_below(n: int, p: float, k: int) -> float:
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k))


@pytest.mark.parametrize(("workers", "needed"), [(3, 3), (4, 3), (10, 8), (40, 36)])
def test_equal_workers_without_variation_are_binomial(workers: int, needed: int) -> None:
    rate = np.full(workers, 2.0)
    presence = np.full(workers, 0.9)
    got = shortfall_probability(rate, presence, np.zeros(workers), 2.0 * needed - 0.5)
    assert got == pytest.approx(binomial_below(workers, 0.9, needed), abs=1e-3)


def test_unequal_workers_agree_with_counting() -> None:
    rng = np.random.default_rng(3)
    rate, presence = rng.lognormal(0, 0.6, 25), rng.uniform(0.8, 1, 25)
    spread = np.full(25, 0.1)
    need = 0.85 * float((rate * presence).sum())
    there = rng.random((200_000, 25)) < presence
    totals = (there * rate * rng.normal(1, 0.1, (200_000, 25))).sum(axis=1)
    assert shortfall_probability(rate, presence, spread, need) == pytest.approx(
        float((totals < need * (1 - TOLERANCE)).mean()), abs=0.005
    )


def test_many_workers_are_as_good_as_normal() -> None:
    rng = np.random.default_rng(4)
    rate, presence, spread = (
        rng.lognormal(0, 0.5, EXACT_UP_TO),
        np.full(EXACT_UP_TO, 0.95),
        np.full(EXACT_UP_TO, 0.1),
    )
    need = 0.93 * float(rate.sum())
    few = shortfall_probability(rate, presence, spread, need)
    one_more = (np.append(rate, 1e-9), np.append(presence, 0.95), np.append(spread, 0.1))
    assert shortfall_probability(*one_more, need) == pytest.approx(few, abs=0.01)


def test_no_need_never_falls_short_and_nobody_always_does() -> None:
    nobody = np.zeros(0)
    assert shortfall_probability(nobody, nobody, nobody, 0.0) == 0.0
    assert shortfall_probability(nobody, nobody, nobody, 1.0) == 1.0
