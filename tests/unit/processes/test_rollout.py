"""The rollout loop's own rules, without the seconds that a process takes to start."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from protocol.delta import encode_delta
from protocol.messages import RolloutGroup
from protocol.run_spec import RunSpec
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.processes import rollout
from swarmnode.processes.channel import Channel
from swarmnode.processes.inbox import Inbox, Stopped
from swarmnode.processes.rollout import Counters, Failure, configure, serve

WAIT_S = 30.0
WEIGHTS = TINY_MODEL_DIR / "model.safetensors"


def configuration(run: RunSpec, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "configure",
        "spec": run.encode(),
        "run_id": run.run_id,
        "policy": b"p" * 32,
        "node_key": b"k" * 32,
        "model_dir": str(TINY_MODEL_DIR),
        "engine": {"type": "transformers", "max_batch_sequences": 4},
        "share_text": False,
    }
    return {**fields, **changes}


class Loop:
    """`serve` in a thread, and the node's end of its channel."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.node = Channel(self.ours)
        channel = Channel(theirs)
        inbox = Inbox(channel, end_process=lambda code: None)
        inbox.start()
        self.error: BaseException | None = None

        def run() -> None:
            try:
                serve(channel, inbox)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def receive(self) -> dict[str, Any]:
        message = self.node.receive(WAIT_S)
        assert message is not None
        return message

    def end(self) -> BaseException | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def loop(spec: RunSpec) -> Iterator[Loop]:
    loop = Loop()
    loop.node.send(configuration(spec))
    assert loop.receive() == {"type": "ready"}
    loop.node.send({"type": "load", "version": 1, "path": str(WEIGHTS), "probe": None})
    assert loop.receive()["type"] == "loaded"
    yield loop
    if loop.thread.is_alive():
        loop.node.send({"type": "stop"})
        assert isinstance(loop.end(), Stopped)
    loop.ours.close()


def test_text_is_shared_only_when_the_run_wants_it(loop: Loop) -> None:
    loop.node.send({"type": "generate", "counter": 0})
    group = RolloutGroup.decode(loop.receive()["body"])
    assert [completion.text for completion in group.completions] == [None, None]


def test_a_counter_asked_for_twice_ends_the_process(loop: Loop) -> None:
    for _ in range(2):
        loop.node.send({"type": "generate", "counter": 5})
    error = loop.end()
    assert isinstance(error, Failure) and "asked for group 5 twice" in str(error)


def test_more_requests_than_the_bound_end_the_process(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "MAX_PENDING", 2)
    loop = Loop()
    loop.node.send(configuration(spec))
    for counter in range(3):  # without weights they wait
        loop.node.send({"type": "generate", "counter": counter})
    error = loop.end()
    assert isinstance(error, Failure) and "more than 2 groups at once" in str(error)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ({"tokens": [1, 20, 30], "logprobs": [-1.0]}, "the probe has 3 tokens and 1 log-probs"),
        ({"tokens": [1], "logprobs": []}, "the probe has 1 tokens and 0 log-probs"),
        ({"tokens": [1, 20, 30], "logprobs": [float("nan"), -1.0]}, "its probe differs from the learner's"),
        ({"tokens": [1, 20, 100], "logprobs": [-1.0, -1.0]}, "the probe has a token that the model lacks"),
        ({"tokens": [1, -20, 30], "logprobs": [-1.0, -1.0]}, "the probe has a token that the model lacks"),
    ],
)
def test_a_probe_that_cannot_be_met_keeps_the_old_version(
    loop: Loop, probe: dict[str, Any], reason: str
) -> None:
    loop.node.send({"type": "load", "version": 2, "path": str(WEIGHTS), "probe": probe})
    failed = loop.receive()
    assert failed["type"] == "load_failed" and failed["version"] == 2
    assert reason in failed["reason"]
    loop.node.send({"type": "generate", "counter": 0})
    assert loop.receive()["version"] == 1


def moved_weights(folder: Path) -> Path:
    """The tiny model's weights, a few of them changed, as a file."""
    weights = load_file(WEIGHTS)
    for tensor in weights.values():
        tensor.view(-1)[::50] *= 0.5
    save_file(weights, folder / "moved.safetensors", metadata=safe_open(WEIGHTS, "pt").metadata())
    return folder / "moved.safetensors"


def test_a_version_can_come_by_deltas_and_is_probed(loop: Loop, tmp_path: Path) -> None:
    moved = moved_weights(tmp_path)
    delta = tmp_path / "delta.bin"
    delta.write_bytes(b"".join(encode_delta(WEIGHTS.read_bytes(), moved.read_bytes(), 1 << 20, threads=1)))
    tokens = [1, 20, 30, 40, 50]
    engine = TransformersEngine(TINY_MODEL_DIR)
    engine.load(moved, 2)
    probe = {"tokens": tokens, "logprobs": engine.probe(tokens)}
    engine.load(WEIGHTS, 1)
    of_the_parent = {"tokens": tokens, "logprobs": engine.probe(tokens)}

    def load(version: int, deltas: list[tuple[int, int]], probe: dict[str, Any]) -> dict[str, Any]:
        chain = [{"version": v, "parent": parent, "path": str(delta)} for v, parent in deltas]
        loop.node.send({"type": "load", "version": version, "path": None, "deltas": chain, "probe": probe})
        return loop.receive()

    wrong = load(2, [(2, 1)], of_the_parent)
    assert (wrong["type"], wrong["way"]) == ("load_failed", "deltas")
    assert "its probe differs" in wrong["reason"]
    assert "version 1 is there" in load(3, [(3, 2)], probe)["reason"]
    assert "lead to version 2" in load(3, [(2, 1)], probe)["reason"]
    done = load(2, [(2, 1)], probe)
    assert (done["type"], done["version"], done["way"]) == ("loaded", 2, "deltas")
    assert done["probe_error"] < 1e-4 and done["patch_obstacle"] is None
    loop.node.send({"type": "generate", "counter": 0})
    group = RolloutGroup.decode(loop.receive()["body"])
    assert group.version == 2
    loop.node.send({"type": "load", "version": 2, "path": str(moved), "probe": probe})
    assert loop.receive()["way"] == "file"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "generate"}, "the first message was a generate"),
        ({"run_id": b"?" * 32}, "the run's spec does not have the run's id"),
        ({"spec": b"junk"}, "the configuration cannot be used: "),
        ({"engine": {"type": "transformers", "speed": "high"}}, "the configuration cannot be used: "),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(
    spec: RunSpec, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Failure) as caught:
        configure(configuration(spec, **changes))
    assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)


def test_counters_are_used_once_even_after_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "COUNTER_WINDOW", 10)
    counters = Counters()
    assert all(counters.use(counter) for counter in (7, 3, 5))
    assert not any(counters.use(counter) for counter in (7, 3, 5))
    assert all(counters.use(counter) for counter in range(100, 130))
    assert not any(counters.use(counter) for counter in range(0, 130))
    assert counters.use(130)
