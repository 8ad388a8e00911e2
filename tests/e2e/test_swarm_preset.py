"""Preset `swarm` in real processes: every node trains its own policy on its own groups and on those of
both others."""

import signal
from pathlib import Path

import pytest
from live_swarm import live_swarm, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PEERS = ("peer-1", "peer-2", "peer-3")


def test_every_peer_learns_from_both_others_and_goes_on_without_one(tmp_path: Path) -> None:
    with live_swarm(tmp_path, "swarm") as swarm:
        for name in PEERS:
            others = {peer for peer in PEERS if peer != name}

            def trained_on_both(name: str = name, others: set[str] = others) -> bool:
                consumed = swarm.state(name).get("groups", {}).get("external_consumed", {})
                return others <= set(consumed)

            wait_for(f"{name} to train on groups of both others", trained_on_both, 180)

        def accuracy_rose(name: str) -> bool:
            learner = swarm.state(name)["learner"]
            return bool(learner["eval_after"] and learner["eval_after"] > learner["eval_before"] + 0.05)

        for name in PEERS:
            wait_for(f"{name}'s held-out accuracy to rise", lambda name=name: accuracy_rose(name), 90)
            assert swarm.state(name)["refused"] == {}
        # Each plots the others' curves too.
        policies = {point["policy"] for point in swarm.state("peer-2")["series"]["accuracy"]}
        assert policies == set(PEERS)

        process = swarm.nodes["peer-3"].process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        version = swarm.learner_version("peer-1")
        wait_for("peer-1 to go on without peer-3", lambda: swarm.learner_version("peer-1") >= version + 3, 60)
        wait_for("peer-3 to be shown gone", lambda: swarm.row("peer-1", "peer-3")["state"] == "gone", 15)
        groups = swarm.state("peer-1")["groups"]
        assert groups["accepted"] >= groups["consumed"] + groups["waiting"] + groups["stale"] > 0
