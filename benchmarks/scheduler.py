"""Whether the capacity rule holds, and what it saves: simulated fleets, the node's own decisions on virtual
time.

python -m benchmarks.scheduler --json build/scheduler.json [--plot docs/img/scheduler.png] [--quick] [--parts
...]

`met`: random settings; the planner buys for the rule from twice the workers that it demands; learner
utilization and capacity over the rule. `below`: the same settings with 60 to 95 % of the rule; utilization
against the prediction. `cost`: the documented market (docs/examples/offers.csv) against one data centre of
H100 at the same throughput. `policies`: the planner against activating everyone, the lowest price per hour,
the lowest price per group, and at random, with 20 % of the machines leaving per hour; each of them buys the
least over the rule (in steps of 5 %) with which its utilization is the planner's. `size`: 10,000 volunteers
for an hour, processor time.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import table, write_report
from benchmarks.scheduler_costs import planned_costs, policy_outcome, simulated_costs
from benchmarks.scheduler_settings import draw_setting
from swarmnode.cli.quiet_solver import quiet_solver
from swarmnode.simulator.run import simulate
from swarmnode.simulator.scenario import load_scenario

PARTS = ("met", "below", "cost", "policies", "size")
UTILIZATION_BAR, BOUGHT_BAR = 0.95, 1.10
POINTS_BAR = 0.05
SAVING_BAR = 0.40
SECONDS_BAR = 60.0
RATIOS = (0.6, 0.75, 0.85, 0.95)
SPLITS = (1.0, 2.0, 3.0, 4.0)
EXAMPLE_SPLIT = 3.0
"""GPUs that generate for each one that trains, where costs are compared: an assumption."""
CHURN_PER_HOUR = 0.20
OTHER_POLICIES = ("everyone", "cheapest", "cheapest_per_group", "random")
OVERBUY = (0.85, 1.65)
OVERBUY_TOLERANCE = 0.0125


def main() -> None:
    arguments = _arguments()
    quick = arguments.quick
    results: dict[str, Any] = {}
    with quiet_solver():
        if "met" in arguments.parts:
            results["met"] = _met(6 if quick else 100)
        if "below" in arguments.parts:
            results["below"] = _below(4 if quick else 100)
        if "cost" in arguments.parts:
            results["cost"] = _cost(range(1) if quick else range(3), 1.5 if quick else 6.0)
        if "policies" in arguments.parts:
            results["policies"] = _policies(range(1) if quick else range(3), 1.5 if quick else 4.0)
        if "size" in arguments.parts:
            results["size"] = _size()
    _print(results)
    if arguments.json:
        write_report(arguments.json, "scheduler", results)
    if arguments.plot:
        from benchmarks.scheduler_plot import plot

        plot(arguments.plot, results)


def _met(settings: int) -> dict[str, Any]:
    rows = []
    for seed in range(settings):
        setting = draw_setting(seed)
        report = simulate(setting.scenario(max(4, round(2 * setting.rule)), exact_up_to=0, spare_share=0.05))
        rows.append(
            {
                "seed": seed,
                "utilization": report["utilization"],
                "over_rule": report["capacity"]["over_rule"],
                "stale_share_of_accepted": report["stale_share_of_accepted"],
                "workers": report["capacity"]["mean_active"],
            }
        )
        _progress(f"met {seed}: {rows[-1]}")
    return {
        "settings": settings,
        "utilization": _spread([row["utilization"] for row in rows]),
        "at_the_bar": sum(row["utilization"] >= UTILIZATION_BAR for row in rows),
        "over_rule": _spread([row["over_rule"] for row in rows]),
        "within_the_bought_bar": sum(row["over_rule"] <= BOUGHT_BAR for row in rows),
        "stale_share_of_accepted": _spread([row["stale_share_of_accepted"] for row in rows]),
        "rows": rows,
    }


def _below(settings: int) -> dict[str, Any]:
    rows = []
    for seed in range(settings):
        setting = draw_setting(seed)
        workers = max(1, round(setting.rule * RATIOS[seed % len(RATIOS)]))
        report = simulate(setting.scenario(workers, policy="everyone"))
        predicted = setting.predicted(workers)
        rows.append(
            {
                "seed": seed,
                "ratio": workers / setting.rule,
                "predicted": predicted,
                "utilization": report["utilization"],
                "difference": report["utilization"] - predicted,
            }
        )
        _progress(f"below {seed}: {rows[-1]}")
    differences = [abs(row["difference"]) for row in rows]
    return {
        "settings": settings,
        "difference": _spread([row["difference"] for row in rows]),
        "largest": max(differences),
        "within_the_bar": sum(difference <= POINTS_BAR for difference in differences),
        "rows": rows,
    }


def _cost(seeds: range, hours: float) -> dict[str, Any]:
    planned = [planned_costs(split) for split in SPLITS]
    simulated = []
    for seed in seeds:
        simulated.append(simulated_costs(EXAMPLE_SPLIT, seed, hours))
        _progress(f"cost {seed}: {simulated[-1]}")
    saving = [1 - one["swarm"]["per_update"] / one["central"]["per_update"] for one in simulated]
    return {"planned": planned, "simulated": simulated, "simulated_saving": _spread(saving), "hours": hours}


def _policies(seeds: range, hours: float) -> dict[str, Any]:
    plan = [policy_outcome("plan", 1.0, seed, hours, CHURN_PER_HOUR) for seed in seeds]
    target = min(1.0, _mean(plan, "utilization")) - 0.005
    outcomes: dict[str, Any] = {"plan": _mean_outcome(plan)}
    _progress(f"policies, plan: {outcomes['plan']}")
    for policy in OTHER_POLICIES:
        low, high = (1.0, 1.0) if policy == "everyone" else OVERBUY
        outcomes[policy] = _bought(policy, high, seeds, hours)
        while high - low > OVERBUY_TOLERANCE:
            middle = (low + high) / 2
            tried = _bought(policy, middle, seeds, hours)
            if tried["utilization"] >= target:
                high, outcomes[policy] = middle, tried
            else:
                low = middle
    return {"churn_per_hour": CHURN_PER_HOUR, "hours": hours, "target": target, "outcomes": outcomes}


def _bought(policy: str, overbuy: float, seeds: range, hours: float) -> dict[str, float]:
    outcome = _mean_outcome([policy_outcome(policy, overbuy, seed, hours, CHURN_PER_HOUR) for seed in seeds])
    _progress(f"policies, {policy} at {overbuy:.3f}: {outcome}")
    return outcome


def _size() -> dict[str, Any]:
    started = time.process_time()
    report = simulate(load_scenario("volunteers_10000"))
    return {
        "nodes": report["nodes"],
        "simulated_s": report["simulated_s"],
        "events": report["events"],
        "processor_s": time.process_time() - started,
        "bar_s": SECONDS_BAR,
    }


def _print(results: dict[str, Any]) -> None:
    rows = []
    if "met" in results:
        met = results["met"]
        count, settings = met["at_the_bar"], met["settings"]
        worst, bought = met["utilization"]["worst_low"], met["over_rule"]
        rows += [
            ["utilization when the rule is met", f"{count} of {settings}, least {worst:.3f}", "≥ 0.95"],
            [
                "capacity over the rule",
                f"median {bought['median']:.3f}, most {bought['worst_high']:.3f}",
                "≤ 1.10",
            ],
            [
                "accepted groups that go stale",
                f"median {met['stale_share_of_accepted']['median']:.4f}, "
                f"most {met['stale_share_of_accepted']['worst_high']:.4f}",
                "< 0.02",
            ],
        ]
    if "below" in results:
        below = results["below"]
        inside = (
            f"{below['within_the_bar']} of {below['settings']}, largest {100 * below['largest']:.1f} points"
        )
        rows.append(["below the rule: off the prediction", inside, "≤ 5 points"])
    if "cost" in results:
        for one in results["cost"]["planned"]:
            rows.append(
                [
                    f"planned saving, {one['generating_per_training']:g} GPUs generate per training one",
                    f"{100 * one['saving']:.1f} % (rollouts alone {100 * one['rollout_saving']:.1f} %)",
                    "≥ 40 % at 3" if one["generating_per_training"] == EXAMPLE_SPLIT else "",
                ]
            )
        rows.append(
            [
                "simulated saving at 3",
                f"{100 * results['cost']['simulated_saving']['median']:.1f} %",
                "≥ 40 %",
            ]
        )
    if "size" in results:
        rows.append(["10,000 nodes, one hour", f"{results['size']['processor_s']:.1f} s", "≤ 60 s"])
    print(table(["what", "measured", "bar"], rows))
    if "policies" in results:
        print()
        print(_policy_table(results["policies"]))


def _policy_table(policies: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{one['overbuy']:.2f}",
            f"{one['utilization']:.3f}",
            f"${one['per_update']:.3f}",
            f"{one['mean_active']:.0f}",
            f"{100 * one['completed_share']:.2f} %",
            f"{100 * one['transfer_share']:.2f} %",
            f"{one['weights_gigabytes']:.0f} GB",
        ]
        for name, one in policies["outcomes"].items()
    ]
    header = [
        "policy",
        "bought × rule",
        "utilization",
        "$ per update",
        "active",
        "completed",
        "moving data",
        "weights",
    ]
    return table(header, rows)


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def _mean_outcome(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: _mean(runs, name) for name in runs[0]}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "worst_low": min(values), "worst_high": max(values)}


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw prediction and policies")
    parser.add_argument("--quick", action="store_true", help="few settings, short hours: whether it works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
