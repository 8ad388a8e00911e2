"""A fleet of real processes that trains an adapter: only the adapter travels, and the learner resumes it."""

from pathlib import Path

import pytest
from live_swarm import live_swarm, wait_for
from safetensors import safe_open

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_fleet_trains_an_adapter(tmp_path: Path) -> None:
    adapter = {"r": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
    with live_swarm(tmp_path, "fleet", adapter=adapter) as swarm:
        wait_for("three versions", lambda: swarm.learner_version() >= 3, 150)
        wait_for("groups of a worker", lambda: swarm.row("learner", "worker-1").get("accepted", 0) >= 4, 60)
        assert swarm.state("learner")["refused"] == {}
        published = swarm.nodes["learner"].node.directory.root.glob("policies/*/v*/model.safetensors")
        names: set[str] = set()
        for path in published:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
        # Every process died? Then the learner begins again with the adapter that it had.
        version = swarm.learner_version()
        swarm.kill("learner")
        swarm.restart("learner")
        wait_for("training to go on", lambda: swarm.learner_version() > version, 90)
