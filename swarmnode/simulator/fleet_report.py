"""The report of a simulated fleet: shares and means after the warm-up, whole time lines."""

from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.scheduler.assessment import assess
from swarmnode.scheduler.capacity import Timing, required_rate
from swarmnode.simulator.accounts import Report, as_plain, mean_of
from swarmnode.simulator.worker import State

if TYPE_CHECKING:
    from swarmnode.simulator.fleet import FleetSimulation


def fleet_report(fleet: "FleetSimulation", before: dict[str, float]) -> Report:
    """Everything as plain values; `before` are the counters at the end of the warm-up."""
    after = fleet.snapshot()
    over = {name: after[name] - before[name] for name in after}
    scenario, learner, run = fleet.scenario, fleet.learner, fleet.scenario.run
    span_s, updates = over["time_s"], over["updates"]
    staleness = learner.staleness - fleet.staleness_at_warmup
    consumed = sum(staleness.values())
    finished = over["finished"]
    hours = span_s / 3600
    dollars = over["dollars"] + run.learner_price_per_hour * hours
    tokens = consumed * run.group_size * run.completion_tokens
    capacity = over["capacity_s"] / span_s
    need = _need(fleet)
    return {
        "scenario": scenario.name,
        "kind": "fleet",
        "seed": scenario.seed,
        "policy": scenario.plan.policy,
        "simulated_s": scenario.duration_s,
        "events": fleet.clock.handled,
        "invariants_checked": fleet.invariants.checked,
        "nodes": len(fleet.workers),
        "utilization": over["busy_s"] / span_s,
        "updates": int(updates),
        "updates_per_min": 60 * updates / span_s,
        "groups": {
            "started": int(over["started"]),
            "finished": int(finished),
            "accepted": int(over["accepted"]),
            "consumed": consumed,
            "lost_with_their_worker": int(over["lost_with_worker"]),
            "refused": dict(sorted(learner.refused.items())),
            "stale_in_queue": int(over["stale_in_queue"]),
            "from_cheats_consumed": int(over["bad_consumed"]),
        },
        "waste": (over["lost_with_worker"] + over["refused"] + over["stale_in_queue"])
        / max(1.0, finished + over["lost_with_worker"]),
        "stale_share_of_accepted": over["stale_in_queue"] / max(1.0, over["accepted"]),
        "completed_share": over["accepted"] / max(1.0, over["started"]),
        "transfer_share": _transfer_share(over),
        "staleness": as_plain(staleness),
        "mean_staleness": mean_of(staleness),
        "capacity": {
            "active_groups_per_s": capacity,
            "rule_groups_per_s": need,
            "over_rule": capacity / need if need > 0 else 0.0,
            "mean_active": sum(fleet.timeline.columns.get("active", [0.0]))
            / max(1, len(fleet.timeline.columns.get("active", [0.0]))),
        },
        "cost": {
            "dollars": dollars,
            "workers_dollars": over["dollars"],
            "per_hour": dollars / hours,
            "per_update": dollars / updates if updates else None,
            "per_million_tokens": dollars / tokens * 1e6 if tokens else None,
            "highest_workers_per_hour": fleet.money.highest_per_hour,
        },
        "activation": {
            "plans": fleet.dispatcher.plans,
            "reasons": dict(sorted(fleet.dispatcher.reasons.items())),
            "activations": int(over["activations"]),
            "of_cold_workers": int(over["cold_activations"]),
            "stood_in": fleet.dispatcher.stood_in,
            "departures": int(over["departures"]),
            "joins": int(over["joins"]),
            "excluded_cheats": sum(w.excluded and w.machine.is_cheat for w in fleet.workers),
            "excluded_honest": sum(w.excluded and not w.machine.is_cheat for w in fleet.workers),
            "cheats": sum(w.machine.is_cheat for w in fleet.workers),
        },
        "weights_gigabytes": over["sent_bytes"] / 1e9,
        "timeline": fleet.timeline.columns,
    }


def _need(fleet: "FleetSimulation") -> float:
    """The rule's Σμ for the workers that are active at the end, with the times that were measured of them."""
    timings = []
    for worker in fleet.workers:
        if worker.state is State.ACTIVE:
            machine = worker.machine
            latency_s = machine.kind.groups_in_hand / machine.groups_per_s + machine.link.round_trip_s
            word = Timing(machine.groups_per_s, fleet.scenario.weights.load_s, latency_s)
            timings.append(
                replace(fleet.measured.timing(worker.key, word), groups_per_s=machine.groups_per_s)
            )
    if not timings:
        return required_rate(fleet.demand, 0.0)
    return assess(fleet.demand, timings).required_rate


def _transfer_share(over: dict[str, float]) -> float:
    """Of the workers' time on groups, what went into moving groups and, where they stop for them, weights."""
    moving = over["upload_s"] + over["paused_s"]
    return moving / max(1e-9, moving + over["work_s"])
