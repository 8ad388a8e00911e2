"""The exact solver against every choice there is, the greedy one against the exact one."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.offer_tables import random_problem
from swarmnode.scheduler.exact import solve_exact
from swarmnode.scheduler.greedy import most_capacity, solve_greedy
from swarmnode.scheduler.problem import Problem


def best_of_all(problem: Problem) -> float:
    """The least cost over all 2^n choices; infinite if none is a solution."""
    n = len(problem)
    choices = (np.arange(2**n)[:, None] >> np.arange(n)) & 1 == 1
    capacity = choices @ problem.mean - problem.z * np.sqrt(choices @ problem.variance)
    cost = np.where(capacity >= problem.need, choices @ problem.cost, math.inf)
    for index in np.argsort(cost):
        if math.isinf(cost[index]) or not problem.broken_limits(choices[index]):
            return float(cost[index])
    return math.inf


@pytest.mark.parametrize("seed", range(30))
def test_the_exact_choice_is_the_best_of_all_choices(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 11)
    best = best_of_all(problem)
    found = solve_exact(problem, solve_greedy(problem))
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert problem.is_solution(found.chosen)
    assert best * (1 - 1e-6) <= found.cost <= best * 1.002
    assert found.bound <= best * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_choice_satisfies_everything_and_is_within_one_percent_for_many_offers(seed: int) -> None:
    problem = random_problem(np.random.default_rng(100 + seed), 250)
    found = solve_greedy(problem)
    assert found is not None
    assert problem.is_solution(found.chosen)
    assert found.cost <= found.bound * 1.01, "the linear relaxation bounds every choice from below"


@pytest.mark.parametrize("seed", range(30))
def test_what_the_greedy_finds_is_a_solution_however_tight_the_limits(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    problem = random_problem(rng, int(rng.integers(1, 40)))
    found = solve_greedy(problem)
    assert found is None or problem.is_solution(found.chosen)


@pytest.mark.parametrize("seed", range(30))
def test_the_most_capacity_breaks_no_limit(seed: int) -> None:
    rng = np.random.default_rng(300 + seed)
    problem = random_problem(rng, int(rng.integers(1, 40)))
    tight = replace(problem, need=float(problem.mean.sum()) * 2, budget=float(problem.price.sum()) * 0.3)
    most = most_capacity(tight)
    assert not tight.broken_limits(most.chosen)


def test_nobody_is_no_solution_and_no_error() -> None:
    nobody = random_problem(np.random.default_rng(0), 3)
    nobody = replace(
        nobody,
        **{
            name: getattr(nobody, name)[:0]
            for name in ("cost", "price", "mean", "variance", "owner", "region")
        },
        traffic_mbps=nobody.traffic_mbps[:0],
    )
    assert solve_greedy(nobody) is None
    assert solve_exact(nobody) is None
    assert most_capacity(nobody).chosen.size == 0


def test_the_tangent_never_takes_for_enough_what_is_not() -> None:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, 30, limits=False)
    for _ in range(200):
        chosen = rng.random(30) < rng.random()
        weights, need = problem.tangent(float(rng.uniform(0.1, 3)))
        if float(weights[chosen].sum()) >= need:
            assert problem.is_enough(chosen)
    own = problem.deviation(chosen)
    weights, need = problem.tangent(own)
    assert float(weights[chosen].sum()) - need == pytest.approx(problem.capacity(chosen) - problem.need)
