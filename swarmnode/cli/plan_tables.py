"""What `swarmnode plan` shows: tables for people, plain values for JSON."""

import math
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.scheduler.activation import Plan
from swarmnode.scheduler.offers import WorkerOffer
from swarmnode.scheduler.planning import Planned, Run

MOST_GROUPS = 20
"""Rows of the table of workers; equal offers share one."""


def print_plan(console: Console, planned: Planned, run: Run, *, everyone: bool) -> None:
    """Capacity against need, money, who is active and why."""
    console.print(_facts(planned, run))
    console.print(_workers(planned, everyone=everyone))
    left_out = Counter(
        _kind(reason) for worker, reason in planned.plan.reasons.items() if not _has_cost(reason)
    )
    for reason, count in left_out.most_common():
        console.print(Text(f"{count} offers not used: {reason}"))


def _facts(planned: Planned, run: Run) -> Table:
    plan, money, demand = planned.plan, planned.economics, run.demand
    assessment = plan.assessment
    table = Table(show_header=False, box=None, pad_edge=False)

    def row(label: str, text: str) -> None:
        table.add_row(Text(label, style="bold"), Text(text))

    row(
        "run",
        f"R = {demand.batch_groups} groups per update of {demand.train_s:g} s, S = {demand.max_staleness}, "
        f"κ = {demand.kappa}, {demand.form} form of the rule",
    )
    need = "no amount of these workers" if not assessment.feasible else _per_min(assessment.required_rate)
    row("need", f"{need} (the learner consumes {_per_min(demand.floor_rate)})")
    row(
        "capacity",
        f"{_per_min(assessment.offered_rate)} from {len(plan.active)} workers, "
        f"{100 * assessment.ratio:.0f} % of the need; short with a probability of "
        f"{100 * plan.shortfall_probability:.1f} %",
    )
    row(
        "learner",
        f"trains {100 * assessment.utilization:.1f} % of the time, "
        f"an update every {_seconds(money.update_s)}",
    )
    row(
        "cost",
        f"${money.cost_per_hour:.2f} per hour (workers ${plan.cost_per_hour:.2f}), "
        f"${money.dollars_per_update:.4g} per update, "
        f"${money.dollars_per_million_tokens:.4g} per million tokens",
    )
    proved = (
        f", nothing below ${plan.bound_per_hour:.2f} per hour is enough" if plan.bound_per_hour > 0 else ""
    )
    row("chosen by", f"{plan.method} search{proved}")
    row("standby", f"{len(plan.spares)} workers with warm weights")
    if not plan.is_enough:
        row("not enough", f"in the way: {', '.join(plan.limits)}")
    for advice in assessment.advice:
        row("would help", advice.text)
    return table


def _workers(planned: Planned, *, everyone: bool) -> Table:
    plan = planned.plan
    active, spares = set(plan.active), set(plan.spares)
    rows: dict[tuple[str, ...], list[WorkerOffer]] = {}
    for offer in planned.offers:
        state = "active" if offer.worker in active else "standby" if offer.worker in spares else "not used"
        if state == "not used" and not everyone:
            continue
        what = offer.device or offer.name
        why = plan.reasons.get(offer.worker, "")
        key = (
            state,
            what,
            offer.region,
            f"{offer.price_per_hour:g}",
            _kind(why) if state == "active" else why,
        )
        rows.setdefault(key, []).append(offer)
    table = Table(title="workers")
    for column in ("state", "what", "region", "count", "$ per hour", "groups/min", "why"):
        table.add_column(
            column, justify="right" if column in ("count", "$ per hour", "groups/min") else "left"
        )
    order = {"active": 0, "standby": 1, "not used": 2}
    listed = sorted(rows.items(), key=lambda item: (order[item[0][0]], item[0]))
    for (state, what, region, price, _), offers in listed if everyone else listed[:MOST_GROUPS]:
        rate = sum(offer.timing.groups_per_s for offer in offers)
        why = plan.reasons.get(offers[0].worker, "")
        cells = [state, what, region, str(len(offers)), price, f"{60 * rate:.1f}", why]
        table.add_row(*(Text(cell) for cell in cells))
    if not everyone and len(listed) > MOST_GROUPS:
        table.caption = f"{len(listed) - MOST_GROUPS} more rows with --all"
    return table


def print_sensitivity(
    console: Console, by_staleness: list[tuple[int, Planned]], by_bandwidth: list[tuple[float, Planned]]
) -> None:
    """What other bounds and other links would cost."""
    table = Table(title="if S were")
    for column in ("S", "κ", "workers", "need groups/min", "$ per update", "learner trains"):
        table.add_column(column, justify="right")
    for bound, planned in by_staleness:
        cells = (str(bound), str(planned.demand.kappa), *_outcome(planned))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    table = Table(title="if all links were")
    for column in ("× bandwidth", "workers", "need groups/min", "$ per update", "learner trains"):
        table.add_column(column, justify="right")
    for factor, planned in by_bandwidth:
        table.add_row(*(Text(cell) for cell in (f"{factor:g}", *_outcome(planned))))
    console.print(table)


def _outcome(planned: Planned) -> tuple[str, str, str, str]:
    assessment = planned.plan.assessment
    need = f"{60 * assessment.required_rate:.1f}" if assessment.feasible else "none suffices"
    return (
        str(len(planned.plan.active)),
        need,
        f"{planned.economics.dollars_per_update:.4g}",
        f"{100 * assessment.utilization:.1f} %",
    )


def as_json(planned: Planned, run: Run) -> dict[str, Any]:
    """The plan as plain values."""
    plan, assessment, money = planned.plan, planned.plan.assessment, planned.economics
    return {
        "is_enough": plan.is_enough,
        "limits": list(plan.limits),
        "method": plan.method,
        "bound_per_hour": _finite(plan.bound_per_hour),
        "need_groups_per_s": _finite(assessment.required_rate),
        "capacity_groups_per_s": assessment.offered_rate,
        "admissible_groups_per_s": assessment.admissible_rate,
        "consumed_groups_per_s": run.demand.floor_rate,
        "utilization": assessment.utilization,
        "shortfall_probability": plan.shortfall_probability,
        "cost_per_hour": money.cost_per_hour,
        "workers_cost_per_hour": plan.cost_per_hour,
        "update_s": _finite(money.update_s),
        "dollars_per_update": _finite(money.dollars_per_update),
        "dollars_per_million_tokens": _finite(money.dollars_per_million_tokens),
        "advice": [{"knob": one.knob, "value": one.value, "text": one.text} for one in assessment.advice],
        "workers": [_worker_json(offer, plan) for offer in planned.offers],
    }


def _worker_json(offer: WorkerOffer, plan: Plan) -> dict[str, Any]:
    state = (
        "active" if offer.worker in plan.active else "standby" if offer.worker in plan.spares else "not used"
    )
    return {
        "name": offer.name,
        "state": state,
        "price_per_hour": offer.price_per_hour,
        "groups_per_s": offer.timing.groups_per_s,
        "broadcast_s": _finite(offer.timing.broadcast_s),
        "latency_s": _finite(offer.timing.latency_s),
        "why": plan.reasons.get(offer.worker, ""),
    }


def _has_cost(reason: str) -> bool:
    return reason.startswith(("$", "not needed"))


def _kind(reason: str) -> str:
    """A reason without its numbers, to count equal ones."""
    return "".join("…" if char.isdigit() else char for char in reason).replace("……", "…") if reason else ""


def _per_min(rate: float) -> str:
    return f"{60 * rate:.1f} groups/min"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if math.isfinite(value) else "never"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
