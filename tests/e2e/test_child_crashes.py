"""kill -9 of each child of a running fleet, one after the other: its node restarts it and goes on, nothing
that was accepted is lost or trained on twice."""

import os
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from live_swarm import LiveSwarm, live_swarm, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

LOCAL_GROUPS = 16


def child(swarm: LiveSwarm, node: str, module: str) -> psutil.Process:
    """The child of a node that runs `module`, once it is there."""

    def find() -> psutil.Process | None:
        for process in psutil.Process(swarm.nodes[node].process.pid).children():
            try:
                if f"swarmnode.processes.{module}" in process.cmdline():
                    return process
            except psutil.Error:
                continue
        return None

    found = wait_for(f"the {module} process of {node}", find, 30)
    assert isinstance(found, psutil.Process)
    return found


def trained(swarm: LiveSwarm, updates: int, timeout_s: float = 90) -> None:
    version = swarm.learner_version()
    wait_for(f"{updates} more updates", lambda: swarm.learner_version() >= version + updates, timeout_s)


def test_every_child_may_die_at_any_time(tmp_path: Path) -> None:
    with live_swarm(tmp_path, "fleet") as swarm:
        wait_for("two versions", lambda: swarm.learner_version() >= 2, 120)
        pids = {name: node.process.pid for name, node in swarm.nodes.items()}

        for node, module in (("worker-1", "rollout"), ("learner", "verifier"), ("learner", "learner")):
            killed = child(swarm, node, module)
            accepted = swarm.state(node)["my_contribution"]["accepted"]
            os.kill(killed.pid, signal.SIGKILL)
            wait_for(
                f"{node} to say that its {module} process was killed",
                lambda node=node, module=module: any(
                    f"the {module} process was killed" in event["text"]
                    for event in swarm.state(node)["events"]
                ),
                20,
            )
            trained(swarm, 2)
            if module == "rollout":
                wait_for(
                    "worker-1's groups to be accepted again",
                    lambda accepted=accepted: (
                        swarm.state("worker-1")["my_contribution"]["accepted"] > accepted
                    ),
                    60,
                )
            assert child(swarm, node, module).pid != killed.pid

        state = swarm.state("learner")
        groups = state["groups"]
        assert groups["accepted"] == groups["consumed"] + groups["waiting"] + groups["stale"]
        assert state["max_staleness_seen"] <= state["run"]["max_staleness"]
        assert not [event for event in state["events"] if "were not waiting" in event["text"]]
        assert state["refused"].keys() <= {"too_stale", "no_credit"}
        assert {name: node.process.pid for name, node in swarm.nodes.items()} == pids
        assert all(node.running for node in swarm.nodes.values())

        # In the middle of a child's start, stopping is as quick and orderly as ever.
        os.kill(child(swarm, "learner", "learner").pid, signal.SIGKILL)
        child(swarm, "learner", "learner")
        started = time.monotonic()
        assert swarm.processes.stop() == []
        assert time.monotonic() - started < 10.5
        ledger = sqlite3.connect(swarm.nodes["learner"].node.directory.store_path)
        rows = ledger.execute("SELECT consumed_version FROM groups WHERE state = 'consumed'").fetchall()
        per_version = Counter(version for (version,) in rows)
        # Each death of the learner may leave two numbers without a batch (see test_fleet.py); it died twice.
        assert len(set(range(1, max(per_version) + 1)) - set(per_version)) <= 4
        assert set(per_version.values()) == {LOCAL_GROUPS}
