"""Simulated fleets: the model's predictions, the rules that hold after every event, and equal seeds."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from swarmnode.scheduler.capacity import Demand, Timing, expected_utilization
from swarmnode.simulator.fleet import FleetSimulation
from swarmnode.simulator.invariants import InvariantBroken
from swarmnode.simulator.run import simulate
from swarmnode.simulator.scenario import parse_scenario
from swarmnode.simulator.worker import State


def scenario(nodes: list[dict[str, Any]], **sections: Any) -> Any:
    plain: dict[str, Any] = {"name": "test", "duration_s": 3600, "warmup_s": 600, "nodes": nodes}
    plain["weights"] = {"delta_mb": 0.01, "snapshot_mb": 0.01, "load_s": 2}
    return parse_scenario(plain | sections, "test")


STEADY = {"name": "steady", "groups_per_min": 6, "groups_in_hand": 2, "round_trip_ms": 20}
RUN = {"batch_groups": 20, "train_s": 20, "max_staleness": 4, "publish_every": 1, "length_spread": 0.2}
HARSH = [
    STEADY | {"count": 10, "price_per_hour": 1.0, "price_walk_per_hour": 0.5, "owners": 3},
    STEADY
    | {
        "name": "shaky",
        "count": 20,
        "price_per_hour": 0.4,
        "price_spread": 0.3,
        "price_walk_per_hour": 0.5,
        "departures_per_hour": 4.0,
        "returns_after_s": 300,
        "rate_spread": 0.5,
        "cheat_share": 0.2,
        "nat_share": 0.5,
        "present_share": 0.7,
        "claims": 2.0,
        "region": "far",
        "upload_mbps": 5,
    },
]


def test_enough_workers_keep_the_learner_training() -> None:
    report = simulate(scenario([STEADY | {"count": 30}], run=RUN))
    assert report["utilization"] > 0.99
    assert report["capacity"]["over_rule"] < 1.10
    assert report["stale_share_of_accepted"] < 0.02
    assert report["waste"] < 0.01


@pytest.mark.parametrize("form", ["conservative", "overlapped"])
@pytest.mark.parametrize("workers", [5, 8])
def test_too_few_workers_make_the_learner_wait_as_predicted(form: str, workers: int) -> None:
    run = RUN | {"form": form, "train_spread": 0.0}
    nodes = [STEADY | {"count": workers}]
    weights = {"delta_mb": 0.01, "snapshot_mb": 0.01, "load_s": 5}
    report = simulate(scenario(nodes, run=run, plan={"policy": "everyone"}, weights=weights, duration_s=7200))
    demand = Demand(20, 20.0, 4, 1, form)  # type: ignore[arg-type]
    timing = Timing(0.1 * 20 / 20.02, broadcast_s=5.02, latency_s=20.02, latency_deviation_s=4.0)
    assert report["utilization"] == pytest.approx(expected_utilization(demand, [timing] * workers), abs=0.03)


def test_a_learner_that_allows_no_staleness_takes_turns_with_its_workers() -> None:
    run = RUN | {"max_staleness": 0, "train_spread": 0.0}
    report = simulate(scenario([STEADY | {"count": 10}], run=run, plan={"policy": "everyone"}))
    assert set(report["staleness"]) == {"0"}
    # 2 s for the version, one round of 20 groups that take 20 s (the slowest some 40 % longer), 20 s of
    # training.
    assert 0.38 < report["utilization"] < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_every_rule_holds_after_every_event_whatever_happens(seed: int) -> None:
    plan = {"budget_per_hour": 6.0, "owner_share": 0.4, "check_every_s": 20, "exact_up_to": 0}
    simulation = FleetSimulation(scenario(HARSH, run=RUN, plan=plan, seed=seed, duration_s=2400))
    report = simulation.run()
    assert report["invariants_checked"] == report["events"] > 3_000
    assert report["activation"]["departures"] > 20
    assert 0 < report["cost"]["highest_workers_per_hour"] <= 6.0
    assert max(map(int, report["staleness"])) <= 4


@pytest.mark.parametrize("policy", ["everyone", "cheapest", "cheapest_per_group", "random"])
def test_other_policies_run_too(policy: str) -> None:
    report = simulate(scenario(HARSH, run=RUN, plan={"policy": policy, "overbuy": 1.2}))
    assert report["updates"] > 50 and report["policy"] == policy


def test_standby_workers_stand_in_when_half_of_the_active_ones_are_lost() -> None:
    simulation = FleetSimulation(
        scenario(
            [STEADY | {"count": 40}],
            run=RUN,
            plan={"spare_share": 1.0, "noticed_after_s": 5.0, "exact_up_to": 0},
            duration_s=2400,
        )
    )
    lost: list[int] = []

    def kill() -> None:
        active = [worker for worker in simulation.workers if worker.state is State.ACTIVE]
        for worker in active[::2]:
            lost.append(worker.machine.number)
            simulation._depart(worker, worker.life)

    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = sum(worker.state is State.ACTIVE for worker in simulation.workers)

    simulation.clock.at(1999.0, count, "before")
    simulation.clock.at(2000.0, kill)
    simulation.clock.at(2001.0, count, "just after")
    simulation.clock.at(2015.0, count, "15 s after")
    report = simulation.run()
    assert counts["just after"] <= counts["before"] / 2 + 1
    assert counts["15 s after"] >= counts["before"] - 1
    assert lost and report["utilization"] > 0.9


def test_cheats_are_found_and_excluded_and_honest_workers_are_not() -> None:
    nodes = [STEADY | {"count": 40, "cheat_share": 0.3}]
    report = simulate(scenario(nodes, run=RUN, trust={"audit_share": 0.5}, duration_s=7200))
    activation = report["activation"]
    assert activation["excluded_cheats"] > 0 and activation["excluded_honest"] == 0
    assert report["groups"]["refused"]["bad_tokens"] >= 4 * activation["excluded_cheats"]


def test_a_broken_rule_ends_the_simulation_and_says_when() -> None:
    simulation = FleetSimulation(scenario([STEADY | {"count": 20}], run=RUN))

    def corrupt() -> None:
        simulation.learner.most_stale = 5

    simulation.clock.at(1234.5, corrupt)
    with pytest.raises(InvariantBroken, match=r"at 1234\.500 s: a group 5 versions behind"):
        simulation.run()


PRINT_REPORT = """
import json
from tests.unit.simulator.test_fleet import HARSH, RUN, scenario
from swarmnode.simulator.run import simulate
plan = {"exact_up_to": 0}
print(json.dumps(simulate(scenario(HARSH, run=RUN, plan=plan, duration_s=1000))))
"""


def test_a_seed_gives_the_same_report_in_every_process() -> None:
    texts = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT_REPORT],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        texts.add(done.stdout.splitlines()[-1])
    assert len(texts) == 1
    other = simulate(scenario(HARSH, run=RUN, plan={"exact_up_to": 0}, duration_s=1000, seed=1))
    assert json.dumps(other) not in texts
