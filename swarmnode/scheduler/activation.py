"""Who works: the cheapest workers whose capacity meets the rule with a margin, and what becomes of the
others.

A plan is a pure function of offers, demand, settings and who is active now. It changes little for little:
what is active stays while it suffices and a new choice would save less than the hysteresis.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.scheduler.assessment import Assessment, assess
from swarmnode.scheduler.candidates import Candidates
from swarmnode.scheduler.capacity import Demand
from swarmnode.scheduler.offers import WorkerOffer
from swarmnode.scheduler.settings import PlanSettings

KEEP_SLACK = 2.0
"""What is active stays up to this many times the probability that is set: measurements always move a little.
"""


@dataclass(frozen=True)
class Plan:
    """Who is active, draining, on warm standby; the rest is on standby without weights."""

    active: tuple[bytes, ...]
    draining: tuple[bytes, ...]
    """Active until now: they drain (finish the groups in hand, get no more credit) once those who come in
    their place have weights (`may_drain`)."""
    spares: tuple[bytes, ...]
    """On standby with their weights kept warm, in the order in which they are to be called."""
    counted: dict[bytes, float]
    """Groups per second that are counted on, of active ones, spares and those that drain."""
    reasons: dict[bytes, str]
    """Why, for each offer, in one line."""
    cost_per_hour: float
    """Of the active ones."""
    assessment: Assessment
    """Capacity against need of the active ones."""
    shortfall_probability: float
    """That so many are gone or slow within the replacement time that the learner must wait."""
    is_enough: bool
    """Whether the rule is met with its margin; else this is the most that the limits allow."""
    limits: tuple[str, ...]
    """What stands in the way if it is not: budget, region, owner, offers."""
    could_save: float
    """Of the cost, what choosing without limits and whole workers could save at most; later offers are
    compared with this."""
    method: str
    bound_per_hour: float
    """No choice of these offers costs less, as far as was proved (volunteers counted at their nominal price).
    """


def make_plan(
    offers: Sequence[WorkerOffer],
    demand: Demand,
    settings: PlanSettings,
    *,
    active: Set[bytes] = frozenset(),
    draining: Set[bytes] = frozenset(),
) -> Plan:
    """Choose. `draining` are still paid, so that the budget holds for all together."""
    paid = sum(o.price_per_hour for o in offers if o.worker in draining and o.worker not in active)
    candidates = Candidates(offers, demand, settings, budget=settings.budget_per_hour - paid)
    solution, is_enough = candidates.choose(active)
    current = candidates.of(active)
    if (
        is_enough
        and candidates.suffices(current, slack=KEEP_SLACK)
        and candidates.problem.total_cost(current)
        <= (1 + settings.hysteresis) * candidates.problem.total_cost(solution.chosen)
    ):
        solution = replace(solution, chosen=current, method="kept")
    limits = () if is_enough else candidates.limits()
    chosen = [candidates.offers[i] for i in np.flatnonzero(solution.chosen)]
    names = tuple(offer.worker for offer in chosen)
    spares = candidates.spares(solution.chosen)
    return Plan(
        active=names,
        draining=tuple(sorted(set(active).difference(names))),
        spares=spares,
        counted=candidates.counted({*names, *spares, *active}),
        reasons=candidates.reasons(solution.chosen, set(spares)),
        cost_per_hour=sum(offer.price_per_hour for offer in chosen),
        assessment=assess(demand, [offer.timing for offer in chosen]),
        shortfall_probability=candidates.shortfall(solution.chosen),
        is_enough=is_enough,
        limits=limits,
        could_save=candidates.could_save(solution.chosen),
        method=solution.method,
        bound_per_hour=solution.bound,
    )


def stand_ins(plan: Plan, active: Set[bytes], ready: Set[bytes]) -> list[bytes]:
    """Spares to call now that `active` are left, in order, until as much is made as the plan counted on.

    `ready` are those that have weights and may work.
    """
    wanted = sum(plan.counted[worker] for worker in plan.active)
    made = sum(plan.counted.get(worker, 0.0) for worker in sorted(active))
    called = []
    for spare in plan.spares:
        if made >= wanted * (1 - 1e-9):
            break
        if spare in ready and spare not in active:
            called.append(spare)
            made += plan.counted[spare]
    return called


def may_drain(plan: Plan, active: Set[bytes], have_weights: Set[bytes]) -> list[bytes]:
    """Who of the active ones that the plan does without may drain now: those whose place is taken."""
    wanted = sum(plan.counted[worker] for worker in plan.active)
    made = sum(plan.counted.get(worker, 0.0) for worker in sorted(active & have_weights))
    leaving = []
    for worker in plan.draining:
        made_by_it = plan.counted.get(worker, 0.0) if worker in have_weights else 0.0
        if worker in active and made - made_by_it >= wanted * (1 - 1e-9):
            leaving.append(worker)
            made -= made_by_it
    return leaving


def replan_reason(
    plan: Plan,
    offers: Sequence[WorkerOffer],
    demand: Demand,
    settings: PlanSettings,
) -> str | None:
    """Why to plan anew; None while nothing has changed enough. `offers` and `demand` are those of now."""
    present = {offer.worker for offer in offers}
    gone = [worker for worker in plan.active if worker not in present]
    if gone:
        return f"{len(gone)} active workers left"
    candidates = Candidates(offers, demand, settings, budget=settings.budget_per_hour)
    current = candidates.of(set(plan.active))
    if int(current.sum()) < len(plan.active):
        return "an active worker can no longer be used"
    price = float(candidates.problem.price[current].sum())
    if price > settings.budget_per_hour * (1 + 1e-9):
        return "prices rose above the budget"
    if abs(price - plan.cost_per_hour) > settings.hysteresis * max(plan.cost_per_hour, 1e-9):
        return "prices changed"
    if candidates.problem.broken_limits(current):
        return f"a limit is broken: {', '.join(candidates.problem.broken_limits(current))}"
    if not candidates.suffices(current, slack=KEEP_SLACK):
        # Whether a plan can mend that, only planning tells; not again while nobody new could help.
        return "capacity fell below the need" if plan.is_enough or candidates.could_add(current) else None
    if not plan.is_enough:
        return "capacity suffices again"
    if candidates.could_save(current) > max(0.0, plan.could_save) + settings.hysteresis:
        return "cheaper workers are offered"
    return None
