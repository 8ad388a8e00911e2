"""The choice of workers as numbers: minimise cost so that capacity falls short with a small probability at
most.

A chosen worker i brings mean_i groups per second with variance_i, independently of the others. Capacity
counts as what it exceeds with the wanted probability, by the normal approximation: Σ mean − z·√(Σ variance) ≥
need. Linear solvers get the tangent of the root at t: √V ≤ (V/t + t)/2, exact where V = t², so that what they
find always satisfies the true constraint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Problem:
    """n offers in columns of shape [n]; regions and owners are numbered from 0."""

    cost: Floats
    """Dollars per hour that are minimised."""
    price: Floats
    """Dollars per hour that count against the budget."""
    mean: Floats
    """Admissible groups per second, times the chance that the worker is there."""
    variance: Floats
    owner: Numbers
    region: Numbers
    traffic_mbps: Floats
    need: float
    """Groups per second."""
    z: float
    """Standard deviations of capacity that must be to spare."""
    owner_share: float
    """Most that one owner may have of the chosen mean capacity."""
    region_mbps: Floats
    """By region; infinite without a limit."""
    budget: float

    def __len__(self) -> int:
        return len(self.cost)

    def total_cost(self, chosen: Chosen) -> float:
        return float(self.cost[chosen].sum())

    def mean_capacity(self, chosen: Chosen) -> float:
        return float(self.mean[chosen].sum())

    def deviation(self, chosen: Chosen) -> float:
        """Standard deviation of the capacity."""
        return math.sqrt(float(self.variance[chosen].sum()))

    def capacity(self, chosen: Chosen) -> float:
        """What the capacity exceeds with the wanted probability."""
        return self.mean_capacity(chosen) - self.z * self.deviation(chosen)

    def owner_capacity(self, chosen: Chosen) -> Floats:
        """Mean capacity by owner."""
        owners = int(self.owner.max(initial=-1)) + 1
        return np.bincount(self.owner[chosen], self.mean[chosen], minlength=owners).astype(float)

    def region_traffic(self, chosen: Chosen) -> Floats:
        """Traffic by region."""
        return np.bincount(
            self.region[chosen], self.traffic_mbps[chosen], minlength=len(self.region_mbps)
        ).astype(float)

    def broken_limits(self, chosen: Chosen) -> list[str]:
        """The limits that a choice breaks, capacity not counted."""
        broken = []
        if float(self.price[chosen].sum()) > self.budget * (1 + TOLERANCE) + TOLERANCE:
            broken.append("budget")
        if (self.region_traffic(chosen) > self.region_mbps * (1 + TOLERANCE)).any():
            broken.append("region")
        allowed = self.owner_share * self.mean_capacity(chosen)
        if (self.owner_capacity(chosen) > allowed * (1 + 1e-6) + TOLERANCE).any():
            broken.append("owner")
        return broken

    def is_enough(self, chosen: Chosen) -> bool:
        return self.capacity(chosen) >= self.need * (1 - 1e-7)

    def is_solution(self, chosen: Chosen) -> bool:
        return self.is_enough(chosen) and not self.broken_limits(chosen)

    def tangent(self, t: float) -> tuple[Floats, float]:
        """Weights and right-hand side of the linear capacity constraint at deviation `t`."""
        if self.z == 0 or t <= 0:
            return self.mean, self.need
        return self.mean - self.z * self.variance / (2 * t), self.need + self.z * t / 2


@dataclass(frozen=True)
class Solution:
    chosen: Chosen
    cost: float
    method: str
    bound: float = -math.inf
    """No choice costs less, as far as is known (for the linear constraint that was solved)."""


@dataclass(frozen=True)
class LinearForm:
    """The linear program of a problem at one tangent: minimise cost·y, y = (x, M), with M = Σ mean·x in units
    of the need."""

    cost: Floats
    matrix: Any
    upper: Floats
    equality: Any
    """One row: Σ mean·x − M = 0, in those units."""


def linear_form(problem: Problem, weights: Floats, need: float) -> LinearForm:
    """Rows: capacity, budget, regions with a limit, owners who could exceed their share."""
    from scipy.sparse import csr_matrix, vstack

    n = len(problem)
    # In units of the need and of each limit: a solver's tolerances are absolute.
    unit = 1 / need if need > 0 else 1.0
    rows: list[Any] = [csr_matrix(np.append(-weights * unit, 0.0))]
    upper = [-need * unit]
    if math.isfinite(problem.budget):
        money = 1 / max(problem.budget, 1e-9)
        rows.append(csr_matrix(np.append(problem.price * money, 0.0)))
        upper.append(problem.budget * money)
    for region in np.flatnonzero(np.isfinite(problem.region_mbps)):
        link = 1 / max(float(problem.region_mbps[region]), 1e-9)
        traffic = np.where(problem.region == region, problem.traffic_mbps * link, 0.0)
        rows.append(csr_matrix(np.append(traffic, 0.0)))
        upper.append(float(problem.region_mbps[region]) * link)
    for owner in _owners_to_bound(problem):
        members = np.flatnonzero(problem.owner == owner)
        columns = np.append(members, n)
        values = np.append(problem.mean[members] * unit, -problem.owner_share)
        rows.append(csr_matrix((values, (np.zeros(len(columns), int), columns)), shape=(1, n + 1)))
        upper.append(0.0)
    return LinearForm(
        cost=np.append(problem.cost, 0.0),
        matrix=vstack(rows, format="csr"),
        upper=np.array(upper),
        equality=csr_matrix(np.append(problem.mean * unit, -1.0)),
    )


def _owners_to_bound(problem: Problem) -> Sequence[int]:
    """Owners whose whole offer exceeds their share of the least capacity there can be."""
    if problem.owner_share >= 1:
        return []
    everything = problem.owner_capacity(np.ones(len(problem), dtype=bool))
    return [int(owner) for owner in np.flatnonzero(everything > problem.owner_share * problem.need)]
