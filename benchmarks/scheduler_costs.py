"""What rollouts cost: the documented market against one data centre, and the planner against simpler
policies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.scheduler.capacity import Demand
from swarmnode.scheduler.offers_csv import OfferRow, read_offers
from swarmnode.scheduler.planning import Planned, Run, plan_rows
from swarmnode.scheduler.settings import PlanSettings
from swarmnode.simulator.run import simulate
from swarmnode.simulator.scenario import Scenario, parse_scenario

OFFERS = Path(__file__).resolve().parents[1] / "docs" / "examples" / "offers.csv"
CENTRAL = "runpod-h100-eu"
"""The row of the table that a centralised fleet rents for everything: H100 SXM in one data centre."""
LEARNER_GPUS = 8
TRAIN_S = 120.0
GROUP_SIZE, COMPLETION_TOKENS = 16, 4000.0
DELTA_MB, SNAPSHOT_MB = 600.0, 15_200.0
OWNER_SHARE = 0.3


def market() -> list[OfferRow]:
    return read_offers(OFFERS)


def central(rows: list[OfferRow]) -> list[OfferRow]:
    return [row for row in rows if row.name.startswith(CENTRAL)]


def example_run(rows: list[OfferRow], generating_per_training: float, form: str = "overlapped") -> Run:
    """Updates of a size for which a centralised fleet generates on so many GPUs for each one that trains."""
    h100 = central(rows)[0]
    tokens_per_group = GROUP_SIZE * COMPLETION_TOKENS
    rate = LEARNER_GPUS * generating_per_training * h100.groups_per_s(tokens_per_group)
    demand = Demand(round(rate * TRAIN_S), TRAIN_S, 6, None, form)  # type: ignore[arg-type]
    return Run(
        demand,
        group_size=GROUP_SIZE,
        completion_tokens=COMPLETION_TOKENS,
        version_bytes=DELTA_MB * 1e6,
        source_upload_mbps=1000.0,
        load_s=6.0,
        learner_price_per_hour=LEARNER_GPUS * h100.price_per_hour,
    )


def planned_costs(generating_per_training: float) -> dict[str, float]:
    """Dollars per update, planned: the market under limits, and the same rule in one data centre."""
    rows = market()
    run = example_run(rows, generating_per_training)
    swarm = plan_rows(rows, run, PlanSettings(owner_share=OWNER_SHARE))
    # One owner, one room: as fast a source as its machines, and no limit on an owner's share.
    alone = plan_rows(central(rows), replace(run, source_upload_mbps=10_000.0), PlanSettings())
    return {
        "generating_per_training": generating_per_training,
        "groups_per_update": run.demand.batch_groups,
        "swarm_per_update": swarm.economics.dollars_per_update,
        "central_per_update": alone.economics.dollars_per_update,
        "learner_per_update": run.learner_price_per_hour * TRAIN_S / 3600,
        "saving": 1 - swarm.economics.dollars_per_update / alone.economics.dollars_per_update,
        "rollout_saving": 1 - swarm.plan.cost_per_hour / alone.plan.cost_per_hour,
        "swarm_is_enough": float(_is_enough(swarm)),
        "central_is_enough": float(_is_enough(alone)),
    }


def _is_enough(planned: Planned) -> bool:
    return planned.plan.is_enough


def market_scenario(
    rows: list[OfferRow],
    run: Run,
    *,
    seed: int,
    hours: float,
    source_upload_mbps: float = 1000.0,
    departures: float = 1.0,
    price_walk_per_hour: float = 0.05,
    **plan: Any,
) -> Scenario:
    """The rows as machines that come and go, at prices that move; every row that differs is a class.

    `departures` multiplies how often each leaves.
    """
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row.device, row.owner, row.region, row.price_per_hour, row.upload_mbps)
        kind = kinds.get(key)
        if kind is not None:
            kind["count"] += 1
            continue
        kinds[key] = {
            "name": " ".join(map(str, key)),
            "count": 1,
            "region": row.region,
            "groups_per_min": 60 * row.groups_per_s(run.tokens_per_group),
            "rate_spread": 0.05,
            "groups_in_hand": int(row.groups_in_hand),
            "upload_mbps": row.upload_mbps,
            "download_mbps": row.download_mbps,
            "bandwidth_spread": 0.2,
            "round_trip_ms": row.round_trip_ms,
            "price_per_hour": row.price_per_hour,
            "price_spread": 0.05,
            "price_walk_per_hour": price_walk_per_hour,
            "departures_per_hour": departures * row.departures_per_hour,
            "returns_after_s": 1800,
            "owners": 1,
        }
    demand = run.demand
    return parse_scenario(
        {
            "name": "market",
            "seed": seed,
            "duration_s": 3600 * hours,
            "warmup_s": 1800,
            "run": {
                "batch_groups": demand.batch_groups,
                "train_s": demand.train_s,
                "max_staleness": demand.max_staleness,
                "publish_every": demand.publish_every,
                "form": demand.form,
                "group_size": run.group_size,
                "completion_tokens": run.completion_tokens,
                "learner_price_per_hour": run.learner_price_per_hour,
            },
            "weights": {
                "delta_mb": DELTA_MB,
                "snapshot_mb": SNAPSHOT_MB,
                "source_upload_mbps": source_upload_mbps,
                "load_s": run.load_s,
            },
            "plan": {"exact_up_to": 0} | plan,
            "nodes": list(kinds.values()),
        },
        "market",
    )


def simulated_costs(generating_per_training: float, seed: int, hours: float) -> dict[str, Any]:
    """Both fleets over hours in which machines leave and prices move."""
    rows = market()
    run = example_run(rows, generating_per_training)
    swarm = simulate(market_scenario(rows, run, seed=seed, hours=hours, owner_share=OWNER_SHARE))
    alone = simulate(
        market_scenario(
            central(rows), run, seed=seed, hours=hours, source_upload_mbps=10_000.0, price_walk_per_hour=0.0
        )
    )
    return {"seed": seed, "swarm": _outcome(swarm), "central": _outcome(alone)}


def policy_outcome(policy: str, overbuy: float, seed: int, hours: float, churn: float) -> dict[str, Any]:
    """One policy on the market when so many of the machines leave per hour, those by bid the most."""
    rows = market()
    mean = sum(row.departures_per_hour for row in rows) / len(rows)
    run = example_run(rows, 3.0)
    scenario = market_scenario(
        rows,
        run,
        seed=seed,
        hours=hours,
        departures=churn / mean,
        policy=policy,
        overbuy=overbuy,
        owner_share=OWNER_SHARE if policy == "plan" else 1.0,
    )
    return _outcome(simulate(scenario)) | {"overbuy": overbuy}


def _outcome(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "utilization": report["utilization"],
        "per_update": report["cost"]["per_update"],
        "per_million_tokens": report["cost"]["per_million_tokens"],
        "workers_dollars": report["cost"]["workers_dollars"],
        "completed_share": report["completed_share"],
        "transfer_share": report["transfer_share"],
        "weights_gigabytes": report["weights_gigabytes"],
        "over_rule": report["capacity"]["over_rule"],
        "mean_active": report["capacity"]["mean_active"],
        "stale_share_of_accepted": report["stale_share_of_accepted"],
        "waste": report["waste"],
    }
