"""Simulated swarms of nodes with policies of their own."""

import json
from typing import Any

from swarmnode.simulator.run import simulate
from swarmnode.simulator.scenario import parse_scenario
from swarmnode.simulator.swarm import SwarmSimulation


def scenario(**sections: Any) -> Any:
    node = {
        "name": "node",
        "count": 40,
        "groups_per_min": 4,
        "groups_in_hand": 4,
        "rate_spread": 0.3,
        "departures_per_hour": 1.0,
        "returns_after_s": 600,
    }
    plain: dict[str, Any] = {
        "name": "test",
        "kind": "swarm",
        "duration_s": 3600,
        "warmup_s": 600,
        "run": {"batch_groups": 4, "external_groups": 4, "train_s": 20, "max_staleness": 3},
        "swarm": {"neighbours": 8},
        "nodes": [node],
    }
    return parse_scenario(plain | sections, "test")


def test_nodes_train_on_own_and_others_groups_within_the_bound() -> None:
    report = simulate(scenario())
    assert report["updates"] > 1_000
    assert 3.5 < report["external_per_update"] < 4.2
    assert max(map(int, report["staleness"])) <= 3
    assert report["invariants_checked"] == report["events"]
    assert report["churn"]["departures"] > 10


def test_authors_are_drawn_evenly_however_much_some_announce() -> None:
    fast = {"name": "fast", "count": 4, "groups_per_min": 90, "groups_in_hand": 8}
    slow = {"name": "slow", "count": 36, "groups_per_min": 9, "groups_in_hand": 4}
    run = {"batch_groups": 4, "external_groups": 1, "train_s": 2, "max_staleness": 3}
    report = simulate(
        scenario(nodes=[fast, slow], run=run, swarm={"neighbours": 8, "informative_share": 1.0})
    )
    # One of the fast four makes one in eight of all groups.
    assert report["authors"]["most_used_share"] < 0.06


def test_groups_that_teach_nothing_are_pulled_in_vain_and_need_not_be_announced() -> None:
    all_of_them = simulate(scenario(swarm={"neighbours": 8, "informative_share": 0.3}))
    informative = simulate(
        scenario(swarm={"neighbours": 8, "informative_share": 0.3, "announce": "informative"})
    )
    assert all_of_them["groups"]["pulled_no_advantage"] > 0.5 * all_of_them["groups"]["pulled"]
    assert informative["groups"]["pulled_no_advantage"] == 0


def test_a_seed_gives_the_same_report() -> None:
    first = json.dumps(simulate(scenario(duration_s=1200)))
    assert first == json.dumps(simulate(scenario(duration_s=1200)))
    assert first != json.dumps(simulate(scenario(duration_s=1200, seed=1)))


def test_connections_go_both_ways_and_are_bounded() -> None:
    simulation = SwarmSimulation(scenario())
    simulation._connect()
    for node in simulation.nodes:
        assert 2 <= len(node.neighbours) <= 8
        assert all(node in other.neighbours for other in node.neighbours)
