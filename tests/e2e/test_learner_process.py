"""The learner process over a real socket: it trains, survives kill -9, stops when asked, ends with its node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from protocol.messages import Completion, RolloutGroup, SamplingContract, group_id, prompt_hash
from protocol.run_spec import AlgorithmSpec, BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import encode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.processes.channel import CHANNEL_VARIABLE, Channel, ChannelClosed

pytestmark = pytest.mark.e2e

POLICY = bytes(range(32))
WAIT_S = 60.0


def make_spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "name": "test",
        "nonce": bytes(16),
        "preset": "swarm",
        "model": BaseModelRef(name="tiny", assets=[]),
        "tasks": [
            TaskSpec(
                environment="reasoning_gym",
                name="chain_sum",
                config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            )
        ],
        "sampling": SamplingContract(group_size=4, max_new_tokens=4),
        "max_staleness": 2,
        "local_groups": 2,
        "algorithm": AlgorithmSpec(learning_rate=1e-3),
    }
    return RunSpec(**{**fields, **changes})


class Node:
    """The node's side of one learner process."""

    def __init__(self, spec: RunSpec, data_dir: Path, **settings: Any) -> None:
        self.spec = spec
        self.data_dir = data_dir
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.channel = Channel(ours)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarmnode.processes.learner"],
            pass_fds=[theirs.fileno()],
            env={**os.environ, CHANNEL_VARIABLE: str(theirs.fileno()), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.settings = {
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "seed": 0,
            "checkpoint_keep": 3,
            "eval_every": 0,
            "eval_prompts": 0,
            "max_updates": None,
            "max_seconds": None,
            "token_budget": 8192,
            **settings,
        }
        self.tokenizer = load_tokenizer(TINY_MODEL_DIR)
        self.environment = build_environment(spec.tasks)

    def configure(self, model_dir: Path = TINY_MODEL_DIR) -> None:
        self.channel.send(
            {
                "type": "configure",
                "spec": self.spec.encode(),
                "policy": POLICY,
                "model_dir": str(model_dir),
                "data_dir": str(self.data_dir),
                "settings": self.settings,
            }
        )

    def group(self, number: int, version: int) -> dict[str, Any]:
        """A synthetic group of one right answer and three wrong ones; its rewards are the environment's."""
        spec, sampling = self.spec, self.spec.sampling
        task = assigned_task(spec.tasks, spec.run_id, POLICY, POLICY, version, number)
        prompt_ids = render_prompt(self.tokenizer, self.environment.question(task))
        rng = np.random.default_rng(number)
        texts = [str(value) for value in rng.integers(0, 19, size=sampling.group_size)]
        completions = []
        for text in texts:
            ids = [*encode_completion(self.tokenizer, text), self.tokenizer.eos_ids[0]]
            completions.append(Completion.build(ids, [-2.0] * len(ids), [(version, len(ids))], finish="stop"))
        rewards = [1.0 if index == 0 else 0.0 for index in range(len(texts))]
        body = RolloutGroup(
            task=task,
            policy=POLICY,
            version=version,
            counter=number,
            prompt_hash=prompt_hash(prompt_ids),
            sampling=sampling,
            engine="test",
            completions=completions,
            rewards=rewards,
        ).encode()
        return {
            "type": "group",
            "id": group_id(POLICY, body),
            "body": body,
            "source": "local",
            "prompt_ids": prompt_ids,
            "completions": None,
            "rewards": rewards,
        }

    def send_groups(self, numbers: range, version: int) -> list[bytes]:
        ids = []
        for number in numbers:
            message = self.group(number, version)
            self.channel.send(message)
            ids.append(message["id"])
        return ids

    def expect(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next message of this kind; states in between are passed over."""
        limit = time.monotonic() + WAIT_S
        while (remaining := limit - time.monotonic()) > 0:
            message = self.channel.receive(remaining)
            if message is None:
                break
            if message["type"] == kind and all(message[name] == value for name, value in fields.items()):
                return message
            assert message["type"] == "state", message
        raise AssertionError(f"no {kind} {fields} within {WAIT_S} s")

    def ack(self, version: int) -> None:
        self.channel.send({"type": "ack", "version": version})

    def close(self) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    nodes: list[Node] = []

    def start_node(spec: RunSpec | None = None, **settings: Any) -> Node:
        node = Node(spec or make_spec(), tmp_path, **settings)
        nodes.append(node)
        return node

    yield start_node
    for node in nodes:
        node.close()


def test_a_killed_learner_resumes_with_what_it_consumed_and_an_unfinished_one_ends_with_an_evaluation(
    start: Any,
) -> None:
    node = start(eval_prompts=8)
    node.configure()
    ready = node.expect("ready", version=0)
    assert ready["consumed"] == {}
    first = ready["publication"]
    assert (first["version"], first["parent"]) == (0, None)
    assert os.path.getsize(first["path"]) == first["size"]
    before = node.expect("eval", version=0, final=False)
    assert before["count"] == 8 and list(before["by_task"]) == ["chain_sum"]
    node.expect("state", text="waiting for groups")

    ids = node.send_groups(range(3), version=0)
    update = node.expect("update", version=1)
    assert update["consumed"] == ids[:2] and update["stale"] == []
    assert update["staleness"] == {0: 2}
    assert update["metrics"]["reward_mean"] == 0.25
    assert update["publication"]["state_hash"] != first["state_hash"]
    # Not acknowledged: the next update must not come, although a group is sent that would complete it.
    node.send_groups(range(3, 4), version=0)
    assert node.channel.receive(0.5) is None
    node.process.kill()
    node.process.wait(WAIT_S)

    again = start(eval_prompts=8, max_updates=2)
    again.configure()
    ready = again.expect("ready", version=1)
    assert ready["consumed"] == {1: ids[:2]}
    assert ready["publication"] == update["publication"]
    # A group that was consumed before the kill and is sent again all the same is not trained on again.
    again.send_groups(range(4), version=0)
    update = again.expect("update", version=2)
    assert set(update["consumed"]).isdisjoint(ids[:2]) and len(update["consumed"]) == 2
    assert update["staleness"] == {1: 2}
    again.ack(2)
    final = again.expect("eval", version=2, final=True)
    assert final["count"] == 32
    again.expect("state", text="finished")
    again.channel.send({"type": "stop"})
    assert again.process.wait(WAIT_S) == 0
    with safe_open(update["publication"]["path"], framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118


def test_groups_beyond_the_staleness_bound_are_reported_and_never_trained_on(start: Any) -> None:
    node = start(make_spec(max_staleness=0))
    node.configure()
    node.expect("ready")
    ids = node.send_groups(range(3), version=0)
    update = node.expect("update", version=1)
    assert update["consumed"] == ids[:2]
    assert update["stale"] == ids[2:]
    node.ack(1)
    late = node.send_groups(range(3, 4), version=0)
    fresh = node.send_groups(range(4, 6), version=1)
    update = node.expect("update", version=2)
    assert (update["consumed"], update["stale"]) == (fresh, late)
    assert update["metrics"]["staleness_max"] == 0.0


def test_a_terminated_learner_exits_cleanly_and_an_interrupt_is_left_to_the_node(start: Any) -> None:
    node = start()
    node.configure()
    node.expect("state", text="waiting for groups") if node.expect("ready") else None
    node.process.send_signal(signal.SIGINT)
    node.send_groups(range(2), version=0)
    node.expect("update", version=1)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(WAIT_S) == 0


def test_a_learner_whose_node_is_gone_exits(start: Any) -> None:
    node = start()
    node.configure()
    node.expect("ready")
    node.socket.close()
    assert node.process.wait(WAIT_S) != 0


def test_a_wrong_model_folder_is_named_in_one_line(start: Any, tmp_path: Path) -> None:
    node = start()
    node.configure(model_dir=tmp_path / "nothing")
    failed = node.expect("failed")
    assert "nothing" in failed["reason"] and "\n" not in failed["reason"]
    assert node.process.wait(WAIT_S) == 1
    with pytest.raises(ChannelClosed):
        node.channel.receive(1.0)
