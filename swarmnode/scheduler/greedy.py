"""A choice of workers close to the cheapest, in milliseconds for thousands of offers.

The linear relaxation says what bandwidth, budget and an owner's share are worth; greedy completion makes its
few fractions whole by cost per group; then single workers are dropped and swapped while that saves.
"""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from swarmnode.scheduler.problem import Chosen, Floats, Numbers, Problem, Solution, linear_form

MAX_ROUNDS = 2
MAX_SWAPS = 200
FEW = 64
"""Chosen workers up to which exchanges of two are tried: among many, single swaps come close enough."""
PAIR_CANDIDATES = 24
PAIR_TRIALS = 200
MAX_RAISES = 10
CANDIDATES = 150
"""Workers on each side of a swap that are looked at: the dearest chosen and the cheapest others, per group.
"""


def solve_greedy(problem: Problem) -> Solution | None:
    """A choice that satisfies every constraint; None if none was found."""
    order = np.argsort(problem.cost / np.maximum(problem.mean, 1e-12))
    enough = int(np.searchsorted(np.cumsum(problem.mean[order]), problem.need)) + 1
    deviation = math.sqrt(float(problem.variance[order[:enough]].sum()))
    best: Solution | None = None
    for _ in range(MAX_ROUNDS):
        found = _round(problem, deviation)
        if found is None or (best is not None and found.cost >= best.cost):
            break
        best = found
        moved = problem.deviation(found.chosen)
        if abs(moved - deviation) <= 0.05 * deviation:
            break
        deviation = moved
    return best


def most_capacity(problem: Problem) -> Solution:
    """As much mean capacity as the limits allow, whatever it costs."""
    # A tenth of the need still says which owners are large enough to be bounded.
    everyone = replace(problem, cost=-problem.mean, need=problem.need / 10, z=0.0)
    relaxed = _relax(everyone, problem.mean, 0.0)
    nobody = np.zeros(len(problem), dtype=bool)
    if relaxed is None:
        return Solution(nobody, 0.0, "greedy")
    share = relaxed[0]
    state = _State(
        everyone, problem.mean, math.inf, chosen=share > 1 - 1e-6, expected=float(problem.mean @ share)
    )
    state.complete(np.lexsort((-problem.mean, -share)))
    state.trim_to_limits()
    return Solution(state.chosen, problem.total_cost(state.chosen), "greedy")


def _round(problem: Problem, deviation: float) -> Solution | None:
    weights, need = problem.tangent(deviation)
    relaxed = _relax(problem, weights, need)
    if relaxed is None:
        return None
    share, bound, shadow_cost = relaxed
    worth = shadow_cost / np.maximum(weights, 1e-12)
    worth[weights <= 0] = np.inf
    state = _State(problem, weights, need, chosen=share > 1 - 1e-6, expected=float(problem.mean @ share))
    if not state.complete(np.lexsort((worth, -share))) and not state.raise_capacity(worth):
        return None
    state.improve(worth)
    if not problem.is_solution(state.chosen):
        return None
    return Solution(state.chosen, problem.total_cost(state.chosen), "greedy", bound)


def _relax(problem: Problem, weights: Floats, need: float) -> tuple[Floats, float, Floats] | None:
    """Shares in [0, 1], their cost, and each worker's cost with what it takes of scarce limits; None if
    infeasible."""
    from scipy.optimize import linprog

    n = len(problem)
    if n == 0:
        return None
    form = linear_form(problem, weights, need)
    if form.matrix.shape[0] == 1:
        return _relax_without_limits(problem, weights, need)
    result = linprog(
        form.cost,
        A_ub=form.matrix,
        b_ub=form.upper,
        A_eq=form.equality,
        b_eq=[0.0],
        bounds=[*([(0, 1)] * n), (0, None)],
        method="highs",
    )
    if result.x is None or result.status != 0:
        return None
    prices = -result.ineqlin.marginals
    prices[0] = 0.0
    scarce = form.matrix.T @ prices - form.equality.T @ result.eqlin.marginals
    return result.x[:n], float(result.fun), problem.cost + np.asarray(scarce).ravel()[:n]


def _relax_without_limits(
    problem: Problem, weights: Floats, need: float
) -> tuple[Floats, float, Floats] | None:
    """Only capacity is asked for: the cheapest per group first, a part of the last one."""
    share = np.zeros(len(problem))
    order = np.argsort(problem.cost / np.where(weights > 0, weights, 1e-12), kind="stable")
    order = order[weights[order] > 0]
    covered = np.cumsum(weights[order])
    whole = int(np.searchsorted(covered, need))
    if need > 0 and whole >= len(order):
        return None
    share[order[:whole]] = 1.0
    if need > 0:
        before = covered[whole - 1] if whole else 0.0
        share[order[whole]] = (need - before) / weights[order[whole]]
    # A negative cost (the most capacity that there can be) is worth taking whatever is needed.
    share[problem.cost < 0] = 1.0
    return share, float(problem.cost @ share), problem.cost


class _State:
    """A choice and what is left of each limit. Invariant: no limit is broken once `complete` said True."""

    def __init__(
        self, problem: Problem, weights: Floats, need: float, *, chosen: Chosen, expected: float
    ) -> None:
        self.problem = problem
        self.weights = weights
        self.need = need
        self.chosen = chosen
        self.expected = expected
        """Mean capacity that the choice will have in the end, for the owners' shares."""
        self.spare = float(weights[chosen].sum()) - need
        self.mean = problem.mean_capacity(chosen)
        self.region_left = problem.region_mbps - problem.region_traffic(chosen)
        self.owned = problem.owner_capacity(chosen)
        self.money_left = problem.budget - float(problem.price[chosen].sum())

    def turn(self, index: int) -> None:
        """Choose a worker, or no longer."""
        problem = self.problem
        sign = -1.0 if self.chosen[index] else 1.0
        self.chosen[index] = not self.chosen[index]
        self.spare += sign * float(self.weights[index])
        self.mean += sign * float(problem.mean[index])
        self.region_left[problem.region[index]] -= sign * problem.traffic_mbps[index]
        self.owned[problem.owner[index]] += sign * problem.mean[index]
        self.money_left -= sign * float(problem.price[index])

    def complete(self, order: Numbers) -> bool:
        """Choose in this order what the limits allow until there is enough."""
        problem = self.problem
        self._trim_owners()
        for index in order:
            if self.spare >= 0:
                break
            if self.chosen[index] or self.weights[index] <= 0:
                continue
            owner = problem.owner[index]
            allowed = problem.owner_share * max(self.expected, self.mean + problem.mean[index])
            if (
                problem.traffic_mbps[index] <= self.region_left[problem.region[index]]
                and problem.price[index] <= self.money_left
                and self.owned[owner] + problem.mean[index] <= allowed
            ):
                self.turn(int(index))
        return self.spare >= 0 and not problem.broken_limits(self.chosen)

    def _trim_owners(self) -> None:
        """Rounding may have left an owner above its share: its smallest go."""
        allowed = self.problem.owner_share * self.expected
        for owner in np.flatnonzero(self.owned > allowed * (1 + 1e-9)):
            members = np.flatnonzero(self.chosen & (self.problem.owner == owner))
            for index in members[np.argsort(self.problem.mean[members])]:
                if self.owned[owner] <= allowed * (1 + 1e-9):
                    break
                self.turn(int(index))

    def trim_to_limits(self) -> None:
        """Let the smallest of the largest owner go until no owner has too much."""
        problem = self.problem
        while "owner" in problem.broken_limits(self.chosen):
            members = np.flatnonzero(self.chosen & (problem.owner == int(self.owned.argmax())))
            self.turn(int(members[problem.mean[members].argmin()]))

    def improve(self, worth: Floats) -> None:
        """Drop or swap workers while that saves."""
        for _ in range(MAX_SWAPS):
            swap = self._best_swap(worth)
            if swap is None and int(self.chosen.sum()) <= FEW:
                swap = self._best_exchange(worth)
            if swap is None:
                return
            for index in swap:
                self.turn(index)

    def _candidates(self, worth: Floats, count: int) -> tuple[Numbers, Numbers]:
        """The dearest chosen and the cheapest others, by cost per group."""
        members = np.flatnonzero(self.chosen)
        others = np.flatnonzero(~self.chosen & (self.weights > 0))
        return members[np.argsort(-worth[members])[:count]], others[np.argsort(worth[others])[:count]]

    def _best_exchange(self, worth: Floats) -> list[int] | None:
        """Up to two who go for up to two who come: among few, one large worker may do for two small ones."""
        goes, comes = self._candidates(worth, PAIR_CANDIDATES)
        outs, ins = _up_to_two(goes)[1:], _up_to_two(comes)
        cost, weight = self.problem.cost, self.weights
        saves = _totals(cost, outs)[:, None] - _totals(cost, ins)[None, :]
        fits = self.spare - _totals(weight, outs)[:, None] + _totals(weight, ins)[None, :] >= 0
        return self._first_within_limits(np.where(fits, saves, 0.0), outs, ins)

    def raise_capacity(self, worth: Floats) -> bool:
        """Exchange workers for ones that bring more, where limits left too little room to add any."""
        for _ in range(MAX_RAISES):
            if self.spare >= 0:
                break
            goes, comes = self._candidates(worth, PAIR_CANDIDATES)
            outs, ins = _up_to_two(goes), _up_to_two(comes)
            gain = _totals(self.weights, ins)[None, :] - _totals(self.weights, outs)[:, None]
            turned = self._first_within_limits(np.minimum(gain, -self.spare), outs, ins)
            if turned is None:
                break
            for index in turned:
                self.turn(index)
        return self.spare >= 0 and not self.problem.broken_limits(self.chosen)

    def _first_within_limits(
        self, value: Floats, outs: list[list[int]], ins: list[list[int]]
    ) -> list[int] | None:
        """The most valuable exchange of value [outs, ins] that breaks no limit; None if none has a value."""
        flat = value.ravel()
        for position in np.argsort(-flat, kind="stable")[:PAIR_TRIALS]:
            if flat[position] <= 1e-9:
                break
            row, column = divmod(int(position), len(ins))
            turned = [*outs[row], *ins[column]]
            tried = self.chosen.copy()
            tried[turned] = ~tried[turned]
            if not self.problem.broken_limits(tried):
                return turned
        return None

    def _best_swap(self, worth: Floats) -> list[int] | None:
        """One who goes, and perhaps one who comes, that saves most within the limits."""
        problem = self.problem
        goes, comes = self._candidates(worth, CANDIDATES)
        # A last column of nobody: the one who goes is only dropped.
        cost = np.append(problem.cost[comes], 0.0)
        weight = np.append(self.weights[comes], 0.0)
        mean = np.append(problem.mean[comes], 0.0)
        price = np.append(problem.price[comes], 0.0)
        traffic = np.append(problem.traffic_mbps[comes], 0.0)
        region = np.append(problem.region[comes], -1)
        owner = np.append(problem.owner[comes], -1)

        saves = problem.cost[goes][:, None] - cost[None, :]
        fits = self.spare - self.weights[goes][:, None] + weight[None, :] >= 0
        fits &= price[None, :] - problem.price[goes][:, None] <= self.money_left
        same_region = problem.region[goes][:, None] == region[None, :]
        freed = np.where(same_region, problem.traffic_mbps[goes][:, None], 0.0)
        fits &= traffic[None, :] - freed <= np.append(self.region_left, 0.0)[region][None, :]
        if problem.owner_share < 1:
            total = self.mean - problem.mean[goes][:, None] + mean[None, :]
            allowed = problem.owner_share * total
            same_owner = problem.owner[goes][:, None] == owner[None, :]
            owned = np.append(self.owned, 0.0)[owner][None, :] + mean[None, :]
            fits &= owned - np.where(same_owner, problem.mean[goes][:, None], 0.0) <= allowed
            # Every owner's allowance shrinks when the total does: the largest must fit too, after who goes is
            # gone.
            first = int(self.owned.argmax())
            second = float(np.partition(self.owned, -2)[-2]) if len(self.owned) > 1 else 0.0
            of_first = problem.owner[goes] == first
            largest = np.where(
                of_first, np.maximum(second, self.owned[first] - problem.mean[goes]), self.owned[first]
            )
            fits &= largest[:, None] <= allowed
        saves = np.where(fits, saves, 0.0)
        if not saves.size or saves.max() <= 1e-9:
            return None
        row, column = np.unravel_index(int(saves.argmax()), saves.shape)
        return [int(goes[row]), *map(int, comes[column : column + 1])]


def _up_to_two(indices: Numbers) -> list[list[int]]:
    """Nobody, each one, each two."""
    each = [int(index) for index in indices]
    return [[], *([one] for one in each), *(list(two) for two in combinations(each, 2))]


def _totals(column: Floats, sets: list[list[int]]) -> Floats:
    return np.array([sum(float(column[index]) for index in one) for one in sets])
