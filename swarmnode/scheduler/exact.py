"""The cheapest choice of workers, solved exactly with HiGHS' mixed-integer solver.

The root of the variance is bounded by lines from both sides. A tangent lies above it: what is enough there,
is enough. Over an interval of variances the chord lies below it: what is optimal for the chord bounds the
optimum of all choices with such a variance. The interval with the lowest bound is split until the best choice
is proved to be within the gap.
"""

import heapq
import math
from dataclasses import replace

import numpy as np

from swarmnode.scheduler.problem import Chosen, Floats, Problem, Solution, linear_form

GAP = 0.002
MAX_SEARCHES = 24
"""Intervals looked at; then the best choice stands, with the bound that was proved."""
NODE_LIMIT = 20_000
"""Of one search tree. A limit that does not depend on the machine: plans are the same on all."""


def solve_exact(
    problem: Problem, start: Solution | None = None, *, gap: float = GAP, searches: int = MAX_SEARCHES
) -> Solution | None:
    """The optimum to `gap`, or the best that was found, with its bound; None if nothing was found.

    `start` is a solution already known: a good one saves most of the work.
    """
    best = None if start is None else replace(start, method="exact")
    closed = math.inf
    pending = [(-math.inf, 0.0, float(problem.variance.sum()))]
    for _ in range(searches):
        if not pending or (best is not None and pending[0][0] >= best.cost * (1 - gap)):
            break
        bound, low, high = heapq.heappop(pending)
        found, proved = _search_chord(problem, low, high, best, gap)
        bound = max(bound, proved)
        if found is None:
            closed = min(closed, bound)
            continue
        if problem.is_solution(found.chosen):
            best, closed = found, min(closed, bound)
            continue
        near = _search_tangent(problem, problem.deviation(found.chosen), best, gap)
        best = best if near is None else near
        split = float(problem.variance[found.chosen].sum())
        if not low < split < high:
            split = (low + high) / 2
        heapq.heappush(pending, (bound, low, split))
        heapq.heappush(pending, (bound, split, high))
    if best is None:
        return None
    least = min([closed, *(bound for bound, _, _ in pending)])
    return replace(best, bound=min(best.cost, least))


def _search_chord(
    problem: Problem, low: float, high: float, best: Solution | None, gap: float
) -> tuple[Solution | None, float]:
    """The optimum for the chord over variances in [low, high], and a bound on all choices with such a
    variance.

    None if none is cheaper than the best by the gap.
    """
    roots = math.sqrt(low) + math.sqrt(high)
    weights, need = problem.mean, problem.need
    if roots > 0:
        weights = problem.mean - problem.z * problem.variance / roots
        need = problem.need + problem.z * (math.sqrt(low) - low / roots)
    return _search(problem, weights, need, best, gap, variance_between=(low, high))


def _search_tangent(problem: Problem, deviation: float, best: Solution | None, gap: float) -> Solution | None:
    """A solution cheaper than the best, near a deviation; None if there is none."""
    weights, need = problem.tangent(deviation)
    found, _ = _search(problem, weights, need, best, gap)
    return found if found is not None and problem.is_solution(found.chosen) else None


def _search(
    problem: Problem,
    weights: Floats,
    need: float,
    best: Solution | None,
    gap: float,
    variance_between: tuple[float, float] | None = None,
) -> tuple[Solution | None, float]:
    # Imported here: it takes half a second, which a node that plans nothing need not wait for.
    from scipy.optimize import Bounds, LinearConstraint, milp

    if len(problem) == 0:
        return None, math.inf
    form = linear_form(problem, weights, need)
    # M = Σ mean·x put in, so that all variables are whole.
    matrix = form.matrix[:, :-1] + form.matrix[:, [-1]] @ form.equality[:, :-1]
    constraints = [LinearConstraint(matrix, -np.inf, form.upper)]
    if variance_between is not None:
        constraints.append(LinearConstraint(problem.variance[None, :], *variance_between))
    limit = math.inf
    if best is not None:
        limit = best.cost * (1 - gap)
        constraints.append(LinearConstraint(problem.cost[None, :], -np.inf, limit))
    result = milp(
        problem.cost,
        constraints=constraints,
        integrality=np.ones(len(problem)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": gap / 2, "node_limit": NODE_LIMIT},
    )
    if result.x is None:
        infeasible = result.status == 2
        return None, limit if infeasible else _bound(result)
    chosen: Chosen = result.x > 0.5
    return Solution(chosen, problem.total_cost(chosen), "exact"), min(limit, _bound(result))


def _bound(result: object) -> float:
    bound = getattr(result, "mip_dual_bound", None)
    return -math.inf if bound is None or not math.isfinite(bound) else float(bound)
