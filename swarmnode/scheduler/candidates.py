"""Offers that may be chosen, as columns, and what choices of them mean."""

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from swarmnode.scheduler.capacity import Demand, sufficient_shares
from swarmnode.scheduler.exact import solve_exact
from swarmnode.scheduler.greedy import most_capacity, solve_greedy
from swarmnode.scheduler.offers import WorkerOffer
from swarmnode.scheduler.problem import Chosen, Floats, Problem, Solution
from swarmnode.scheduler.reliability import shortfall_probability
from swarmnode.scheduler.settings import PlanSettings

MARGIN_STEPS = 8
"""Margins tried until the true probability is at the setting."""
FINE_UP_TO = 64
"""Offers up to which a margin that is larger than it must be is narrowed."""


class Candidates:
    """Offers that may be chosen, as columns, and the problem that they make."""

    def __init__(
        self, offers: Sequence[WorkerOffer], demand: Demand, settings: PlanSettings, *, budget: float
    ) -> None:
        self._settings = settings
        self._need = demand.floor_rate
        timings = [offer.timing for offer in offers]
        broadcast_s = np.array([timing.broadcast_s for timing in timings])
        latency_s = np.array([timing.latency_s for timing in timings])
        deviation_s = np.array([timing.latency_deviation_s for timing in timings])
        rate = np.array([timing.groups_per_s for timing in timings])
        if offers:
            rate = rate * sufficient_shares(demand, broadcast_s, latency_s, deviation_s)
        self._unusable: dict[bytes, str] = {}
        usable = []
        for index, offer in enumerate(offers):
            reason = _unusable(offer, float(rate[index]), settings)
            if reason:
                self._unusable[offer.worker] = reason
            else:
                usable.append(index)
        self.offers = [offers[index] for index in usable]
        self.rate: Floats = rate[usable] if usable else np.zeros(0)
        self.presence = np.array([offer.presence_for(settings.replacement_s) for offer in self.offers])
        self.spread = np.array([offer.rate_spread for offer in self.offers])
        # Paid for while it fetches weights: that part of the time that it may be expected to stay.
        stay_s = np.array([_stay_s(offer, settings) for offer in self.offers])
        self.start: Floats = np.array([offer.start_s for offer in self.offers]) / np.maximum(stay_s, 1.0)
        self.problem = self._problem(budget)

    def _problem(self, budget: float) -> Problem:
        settings, offers = self._settings, self.offers
        price = np.array([offer.price_per_hour for offer in offers])
        owners: dict[object, int] = {}
        regions: dict[str, int] = {}
        owner = [owners.setdefault(offer.owner or offer.worker, len(owners)) for offer in offers]
        region = [regions.setdefault(offer.region, len(regions)) for offer in offers]
        mean = self.presence * self.rate
        variance = mean * (1 - self.presence) * self.rate + self.presence * (self.spread * self.rate) ** 2
        return Problem(
            cost=np.maximum(price, settings.volunteer_price_per_hour),
            price=price,
            mean=mean,
            variance=variance,
            owner=np.array(owner, dtype=np.int64),
            region=np.array(region, dtype=np.int64),
            traffic_mbps=np.array([offer.traffic_mbps for offer in offers]),
            need=self._need,
            z=max(0.0, NormalDist().inv_cdf(1 - settings.shortfall_probability)),
            owner_share=settings.owner_share,
            region_mbps=np.array([settings.region_mbps.get(name, math.inf) for name in regions]),
            budget=budget,
        )

    def of(self, workers: Set[bytes]) -> Chosen:
        """Those of `workers` that may be chosen."""
        return np.array([offer.worker in workers for offer in self.offers], dtype=bool)

    def shortfall(self, chosen: Chosen) -> float:
        return shortfall_probability(
            self.rate[chosen], self.presence[chosen], self.spread[chosen], self._need
        )

    def suffices(self, chosen: Chosen, slack: float = 1.0) -> bool:
        """Whether a choice meets the rule with its margin and breaks no limit.

        `slack` multiplies the probability that is set.
        """
        return (
            float(self.problem.mean[chosen].sum()) >= self._need
            and self.shortfall(chosen) <= slack * self._settings.shortfall_probability
            and not self.problem.broken_limits(chosen)
        )

    def choose(self, active: Set[bytes]) -> tuple[Solution, bool]:
        """The cheapest that suffices, or the most that the limits allow, and which of both it is."""
        # Who is active counts as cheaper by the hysteresis: a change must be worth its trouble.
        current = self.of(active)
        cost = self.problem.cost * np.where(current, 1 - self._settings.hysteresis, 1 + self.start)
        problem = replace(self.problem, cost=cost)
        best: Solution | None = None
        too_little, enough = 0.0, math.inf
        for _ in range(MARGIN_STEPS):
            found = self._solve(problem)
            if found is None:
                break
            shortfall = self.shortfall(found.chosen)
            if shortfall <= self._settings.shortfall_probability * (1 + 1e-6):
                enough = problem.z
                if best is None or found.cost < best.cost:
                    best = found
            else:
                too_little = max(too_little, problem.z)
            # The normal approximation is rough for few workers: look for the margin that is just right.
            few = len(problem) <= FINE_UP_TO and problem.z > 0.05
            if best is not None and not (few and enough - too_little > 0.1):
                break
            z = (too_little + enough) / 2 if math.isfinite(enough) else 1.15 * problem.z + 0.05
            problem = replace(problem, z=z)
        if best is not None:
            return best, True
        most = most_capacity(self.problem)
        return most, self.suffices(most.chosen)

    def _solve(self, problem: Problem) -> Solution | None:
        solution = solve_greedy(problem)
        if len(problem) <= self._settings.exact_up_to:
            solution = solve_exact(problem, solution)
        return solution

    def limits(self) -> tuple[str, ...]:
        """What stands between these offers and the need: limits whose removal would help, or the offers."""
        problem = self.problem
        without = {
            "budget": replace(problem, budget=math.inf),
            "owner": replace(problem, owner_share=1.0),
            "region": replace(problem, region_mbps=np.full_like(problem.region_mbps, math.inf)),
        }
        standing = [name for name, freed in without.items() if freed.is_enough(most_capacity(freed).chosen)]
        return tuple(standing) or ("offers",)

    def spares(self, chosen: Chosen) -> tuple[bytes, ...]:
        """The cheapest of the others, until they make up for the largest one or the share that is set."""
        problem = self.problem
        others = np.flatnonzero(~chosen & (problem.price <= problem.budget))
        if not chosen.any() or self._settings.spare_share <= 0:
            return ()
        wanted = max(
            self._settings.spare_share * float(problem.mean[chosen].sum()), float(problem.mean[chosen].max())
        )
        order = others[np.argsort(problem.cost[others] / problem.mean[others], kind="stable")]
        count = int(np.searchsorted(np.cumsum(problem.mean[order]), wanted * (1 - 1e-9))) + 1
        return tuple(self.offers[index].worker for index in order[:count])

    def counted(self, workers: Set[bytes]) -> dict[bytes, float]:
        mean = self.problem.mean
        return {
            offer.worker: float(mean[index])
            for index, offer in enumerate(self.offers)
            if offer.worker in workers
        }

    def could_add(self, chosen: Chosen) -> bool:
        """Whether somebody else could work too within the limits."""
        problem = self.problem
        money = problem.budget - float(problem.price[chosen].sum())
        link = problem.region_mbps - problem.region_traffic(chosen)
        owned = problem.owner_capacity(chosen)[problem.owner] + problem.mean
        allowed = problem.owner_share * (problem.mean_capacity(chosen) + problem.mean)
        fits = (problem.price <= money) & (problem.traffic_mbps <= link[problem.region]) & (owned <= allowed)
        return bool((fits & ~chosen).any())

    def could_save(self, chosen: Chosen) -> float:
        """The share of the cost that the linear relaxation without limits says could be saved: an upper
        bound."""
        problem = self.problem
        cost = problem.total_cost(chosen)
        order = np.argsort(problem.cost / problem.mean, kind="stable")
        mean = np.cumsum(problem.mean[order])
        need = problem.need + problem.z * problem.deviation(chosen)
        whole = int(np.searchsorted(mean, need))
        if cost <= 0 or whole >= len(order):
            return 0.0
        before = float(mean[whole - 1]) if whole else 0.0
        last = order[whole]
        least = float(problem.cost[order[:whole]].sum())
        least += float(problem.cost[last]) * (need - before) / float(problem.mean[last])
        return 1 - least / cost

    def reasons(self, chosen: Chosen, spares: Set[bytes]) -> dict[bytes, str]:
        problem = self.problem
        per_thousand = problem.price / problem.mean / 3.6
        dearest = float(per_thousand[chosen].max()) if chosen.any() else 0.0
        said = dict(self._unusable)
        for index, offer in enumerate(self.offers):
            cost = float(per_thousand[index])
            if chosen[index]:
                text = f"${cost:.2f} per 1,000 groups that count"
            elif offer.worker in spares:
                text = f"${cost:.2f} per 1,000 groups that count; stands in first"
            elif cost > dearest * (1 + 1e-9):
                text = f"${cost:.2f} per 1,000 groups that count, the active ones cost up to ${dearest:.2f}"
            else:
                text = "not needed, or a limit (owner, region, budget) keeps it out"
            said[offer.worker] = text
        return said


def _stay_s(offer: WorkerOffer, settings: PlanSettings) -> float:
    """How long a worker that is activated now may be expected to stay active."""
    leaves_s = 3600 / offer.departures_per_hour if offer.departures_per_hour > 0 else math.inf
    return min(settings.stay_s, leaves_s, offer.available_for_s)


def _unusable(offer: WorkerOffer, admissible_rate: float, settings: PlanSettings) -> str:
    """Why an offer cannot be used at all; empty if it can."""
    timing = offer.timing
    if timing.groups_per_s <= 0:
        return "it has no measured rate"
    if offer.memory_gb < settings.least_memory_gb:
        return f"{offer.memory_gb:g} GB of memory, {settings.least_memory_gb:g} are needed"
    if offer.available_for_s < settings.least_available_s:
        return f"available for {offer.available_for_s:.0f} s more only"
    if offer.price_per_hour > settings.budget_per_hour:
        return "its price alone is above the budget"
    if admissible_rate <= 0:
        return (
            f"its groups would be too stale: a version takes {timing.broadcast_s:.1f} s to it, "
            f"a group {timing.latency_s:.1f} s back"
        )
    return ""
