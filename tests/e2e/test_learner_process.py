"""The learner over a real socket: it trains, evaluates, survives kill -9, and ends with its node."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from protocol.messages import Completion, RolloutGroup, SamplingContract, group_id, prompt_hash
from protocol.run_spec import AlgorithmSpec, BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, assigned_task
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import encode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.processes import learner as learner_module
from swarmnode.processes.channel import CHANNEL_VARIABLE, Channel
from swarmnode.processes.inbox import Inbox
from swarmnode.processes.learner import KNOWN_FAILURES, Failure, LearnerProcess

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
        self.newest_published: int | None = None
        self.socket, theirs = socket.socketpair()
        self.channel = Channel(self.socket)
        self.start(theirs)
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
                "newest_published": self.newest_published,
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

    def await_checkpoint(self, version: int) -> None:
        """Return when the learner has made a version durable."""
        folder = self.data_dir / "checkpoints" / POLICY.hex()[:16]
        limit = time.monotonic() + WAIT_S
        while not (folder / f"v{version}").exists():
            assert time.monotonic() < limit, f"no checkpoint of version {version} in {folder}"
            time.sleep(0.01)

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

    def start(self, theirs: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ProcessNode(Node):
    """The learner runs as a node starts it."""

    def start(self, theirs: socket.socket) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarmnode.processes.learner"],
            pass_fds=[theirs.fileno()],
            env={**os.environ, CHANNEL_VARIABLE: str(theirs.fileno()), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def close(self) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


class ThreadNode(Node):
    """The learner runs in a thread: the same loop without the seconds that a new process takes to import
    torch."""

    def start(self, theirs: socket.socket) -> None:
        self._theirs = theirs
        self._error: BaseException | None = None
        channel = Channel(theirs)
        inbox = Inbox(channel, end_process=lambda code: None)
        inbox.start()

        def run() -> None:
            try:
                LearnerProcess(channel, inbox).run()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def failure(self) -> str:
        """What the loop ended with: a one-line message."""
        self._thread.join(WAIT_S)
        assert isinstance(self._error, (Failure, *KNOWN_FAILURES)), self._error
        assert "\n" not in str(self._error)
        return str(self._error)

    def close(self) -> None:
        self.channel.send({"type": "stop"})
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.socket.close()
        self._theirs.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    nodes: list[Node] = []

    def start_node(*, process: bool = False, **settings: Any) -> Node:
        spec = make_spec(**settings.pop("spec", {}))
        node = (ProcessNode if process else ThreadNode)(spec, tmp_path, **settings)
        nodes.append(node)
        return node

    yield start_node
    for node in nodes:
        node.close()


def test_a_killed_learner_resumes_with_what_it_consumed_and_then_runs_to_its_end(start: Any) -> None:
    node = start(process=True)
    node.configure()
    ready = node.expect("ready", version=0)
    assert ready["consumed"] == {}
    first = ready["publication"]
    assert (first["version"], first["delta"]) == (0, None)
    assert os.path.getsize(first["path"]) == first["size"]
    node.expect("state", text="waiting for groups")

    ids = node.send_groups(range(2), version=0)
    update = node.expect("update", version=1)
    assert (update["consumed"], update["stale"]) == (ids, [])
    assert update["staleness"] == {0: 2}
    assert update["metrics"]["reward_mean"] == 0.25
    assert update["publication"]["state_hash"] != first["state_hash"]
    # Not acknowledged: the next update must not come, although enough groups are sent for it.
    node.send_groups(range(2, 4), version=0)
    node.await_checkpoint(1)
    assert node.channel.receive(0.2) is None
    node.process.kill()
    node.process.wait(WAIT_S)

    again = start(process=True, eval_prompts=4, max_updates=2)
    again.configure()
    ready = again.expect("ready", version=1)
    assert ready["consumed"] == {1: ids}
    assert ready["publication"] == update["publication"]
    # Groups consumed before the kill, sent again all the same, are not trained on again.
    again.send_groups(range(4), version=0)
    update = again.expect("update", version=2)
    assert set(update["consumed"]).isdisjoint(ids) and len(update["consumed"]) == 2
    assert update["staleness"] == {1: 2}
    again.ack(2)
    final = again.expect("eval", version=2, final=True)
    assert final["count"] == 16
    again.expect("state", text="finished")
    again.process.send_signal(signal.SIGINT)  # the node's to decide about
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(WAIT_S) == 0


def test_what_a_killed_learner_did_after_its_last_checkpoint_is_done_again_under_new_numbers(
    start: Any,
) -> None:
    node = start(process=True, checkpoint_every=3)
    node.configure()
    published = [node.expect("ready", version=0)["publication"]]
    for version in (1, 2):
        ids = node.send_groups(range(2 * version - 2, 2 * version), version=version - 1)
        published.append(node.expect("update", version=version, consumed=ids)["publication"])
        node.ack(version)
    node.process.kill()
    node.process.wait(WAIT_S)

    again = start(process=True, checkpoint_every=3)
    again.newest_published = 2
    again.configure()
    ready = again.expect("ready", version=3)
    assert ready["consumed"] == {}
    assert ready["publication"]["state_hash"] == published[0]["state_hash"], "the weights of version 0"
    for version in (1, 2):
        assert os.path.getsize(published[version]["path"]) == published[version]["size"]
    # Their groups are not in these weights: they can be trained on.
    ids = again.send_groups(range(2, 4), version=1)
    assert again.expect("update", version=4)["consumed"] == ids
    again.ack(4)
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(WAIT_S) == 0
    again.await_checkpoint(4)


def test_groups_beyond_the_staleness_bound_are_reported_and_never_trained_on(start: Any) -> None:
    node = start(spec={"max_staleness": 0})
    node.configure()
    node.expect("ready")
    fresh, late = node.send_groups(range(2), version=0), []
    update = node.expect("update", version=1)
    assert (update["consumed"], update["stale"]) == (fresh, [])
    node.ack(1)
    late = node.send_groups(range(2, 4), version=0)
    fresh = node.send_groups(range(4, 6), version=1)
    update = node.expect("update", version=2)
    assert (update["consumed"], update["stale"]) == (fresh, late)
    assert update["metrics"]["staleness_max"] == 0.0


def test_evaluations_come_before_the_first_update_every_few_and_at_the_end(start: Any) -> None:
    node = start(eval_prompts=4, eval_every=2, max_updates=5)
    node.configure()
    node.expect("ready")
    evaluations = [node.expect("eval")]
    for version in range(1, 6):
        node.send_groups(range(2 * version, 2 * version + 2), version=version - 1)
        node.expect("update", version=version)
        node.ack(version)
        if version in (2, 4, 5):
            evaluations.append(node.expect("eval"))
    node.expect("state", text="finished")
    assert [(e["version"], e["count"], e["final"]) for e in evaluations] == [
        (0, 4, False),
        (2, 4, False),
        (4, 4, False),
        (5, 16, True),
    ]
    for evaluation in evaluations:
        assert 0 <= evaluation["accuracy"] <= 1 and set(evaluation["by_task"]) == {"chain_sum"}


def test_only_every_kth_version_is_published_and_the_last(start: Any) -> None:
    node = start(spec={"publish_every": 2}, max_updates=3)
    node.configure()
    node.expect("ready")
    published = []
    for version in range(1, 4):
        node.send_groups(range(2 * version, 2 * version + 2), version=0)
        published.append(node.expect("update", version=version)["publication"])
        node.ack(version)
    assert [publication and publication["version"] for publication in published] == [None, 2, 3]


def test_a_time_limit_ends_training_and_counts_from_the_first_update(start: Any) -> None:
    node = start(max_seconds=0.01)
    node.configure()
    node.expect("ready")
    node.send_groups(range(2), version=0)
    node.expect("update", version=1)
    node.ack(1)
    node.expect("state", text="finished")


def test_told_to_finish_it_evaluates_a_last_time_and_trains_no_more(start: Any) -> None:
    node = start(eval_prompts=2)
    node.configure()
    node.expect("ready", eval_before=None)
    node.expect("eval", version=0)
    node.channel.send({"type": "finish"})
    assert node.expect("eval", final=True)["count"] == 8
    node.expect("state", text="finished")
    node.send_groups(range(2), version=0)
    assert node.channel.receive(0.2) is None


def test_a_group_that_makes_no_sense_is_dropped_and_training_goes_on(start: Any) -> None:
    node = start()
    node.configure()
    node.expect("ready")
    bad = node.group(7, version=0)
    node.channel.send({**bad, "rewards": [1.0]})
    node.channel.send({**node.group(8, version=0), "body": b"not a group", "id": bytes(32)})
    node.send_groups(range(2), version=0)
    assert node.expect("update", version=1)["stale"] == [bad["id"], bytes(32)]


def test_groups_of_other_policies_are_trained_on_as_the_policys_own(start: Any) -> None:
    node = start(spec={"external_groups": 2})
    node.configure()
    node.expect("ready")
    external = []
    for number in (10, 11):
        message = node.group(number, version=3) | {"source": "external"}
        external.append(message["id"])
        node.channel.send({**message, "completions": [[30, 2], [31], [], [32, 2]]})
    local = node.send_groups(range(2), version=0)
    update = node.expect("update", version=1)
    assert update["consumed"][:2] == local and set(update["consumed"][2:]) == set(external)
    assert update["staleness"] == {0: 2}


def test_a_collapse_halts_training_and_the_last_good_version_is_published_again(start: Any) -> None:
    node = start(min_entropy=100.0, halt_after=3)
    node.configure()
    first = node.expect("ready", version=0)["publication"]
    for version in (1, 2):
        node.send_groups(range(2 * version, 2 * version + 2), version=version - 1)
        assert node.expect("update", version=version)["publication"]["state_hash"] != first["state_hash"]
        node.ack(version)
    node.send_groups(range(8, 10), version=2)
    halted = node.expect("halted")
    assert halted["reason"].startswith("training halted: the policy has collapsed, entropy was below 100")
    assert halted["version"] == halted["publication"]["version"] == 3
    assert halted["publication"]["state_hash"] == first["state_hash"]
    # It stays, and trains no more.
    node.send_groups(range(10, 14), version=3)
    assert node.channel.receive(0.2) is None


def test_a_run_with_a_divergence_from_the_base_model_measures_it(start: Any) -> None:
    node = start(spec={"algorithm": AlgorithmSpec(learning_rate=1e-3, beta=0.1)})
    node.configure()
    node.expect("ready", version=0)
    found = []
    for version in (1, 2):
        node.send_groups(range(2 * version, 2 * version + 2), version=version - 1)
        found.append(node.expect("update", version=version)["metrics"]["base_kl"])
        node.ack(version)
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[1] > 1e-6


def test_a_node_that_does_not_acknowledge_is_named(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "ACK_TIMEOUT_S", 0.05)
    node = start()
    node.configure()
    node.expect("ready")
    node.send_groups(range(2), version=0)
    node.expect("update", version=1)
    assert "did not record version 1" in node.failure()


def test_a_wrong_model_folder_is_named_in_one_line(start: Any, tmp_path: Path) -> None:
    node = start()
    node.configure(model_dir=tmp_path / "nothing")
    assert str(tmp_path / "nothing") in node.failure()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_train_one_policy_and_end_together(start: Any) -> None:
    node = start(process=True, processes=2)
    node.configure()
    node.expect("ready", version=0)
    (follower,) = psutil.Process(node.process.pid).children()
    node.send_groups(range(2), version=0)
    update = node.expect("update", version=1)
    assert update["metrics"]["grad_norm"] > 0 and update["publication"]["version"] == 1
    node.ack(1)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(WAIT_S) == 0
    assert psutil.wait_procs([follower], timeout=WAIT_S)[1] == []

    again = start(process=True, processes=2)
    again.configure()
    assert again.expect("ready", version=1)["publication"] == update["publication"]
    (follower,) = psutil.Process(again.process.pid).children()
    follower.kill()
    assert again.process.wait(WAIT_S) == 1


def test_several_processes_on_one_device_are_refused(start: Any) -> None:
    node = start(processes=2, device="cuda:1")
    node.configure()
    assert 'learner.device = "cuda:1" names one device for 2 processes' in node.failure()
