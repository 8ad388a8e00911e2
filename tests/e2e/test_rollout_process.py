"""The rollout process as a node runs it: real weights, real tasks, groups that a learner would accept."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from protocol.admission import check_group
from protocol.messages import RolloutGroup, SamplingContract
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec, group_seed
from swarmnode.engines.base import GroupRequest
from swarmnode.engines.transformers_engine import TransformersEngine
from swarmnode.environments import build_environment
from swarmnode.environments.prompt import decode_completion, load_tokenizer, render_prompt
from swarmnode.models import TINY_MODEL_DIR
from swarmnode.models.tiny_tasks import DEMO_TASKS
from swarmnode.processes.verifier import Verifier
from tests.e2e.child import Child

pytestmark = pytest.mark.e2e

POLICY = bytes(range(32))
NODE_KEY = b"\x05" * 32
WEIGHTS = TINY_MODEL_DIR / "model.safetensors"
PROBE_TOKENS = [1, 20, 30, 40, 50, 60]


def make_spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "name": "test",
        "nonce": bytes(16),
        "preset": "swarm",
        "model": BaseModelRef(name="tiny", assets=[]),
        "tasks": [TaskSpec(**task) for task in DEMO_TASKS],
        "sampling": SamplingContract(group_size=4, max_new_tokens=4),
    }
    return RunSpec(**{**fields, **changes})


def configuration(spec: RunSpec, **changes: Any) -> dict[str, Any]:
    engine = {
        "type": "transformers",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_batch_sequences": 16,
    }
    fields: dict[str, Any] = {
        "spec": spec.encode(),
        "run_id": spec.run_id,
        "policy": POLICY,
        "node_key": NODE_KEY,
        "model_dir": str(TINY_MODEL_DIR),
        "engine": engine,
        "share_text": True,
    }
    return {**fields, **changes}


def start(spec: RunSpec, **changes: Any) -> Child:
    child = Child("swarmnode.processes.rollout")
    child.send("configure", **configuration(spec, **changes))
    return child


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    engine = TransformersEngine(TINY_MODEL_DIR)
    engine.load(WEIGHTS, 3)
    return engine


def test_groups_follow_from_counters_and_weights_change_only_for_the_better(
    tmp_path: Path, engine: TransformersEngine
) -> None:
    spec = make_spec()
    environment, tokenizer = build_environment(spec.tasks), load_tokenizer(TINY_MODEL_DIR)
    verifier = Verifier(spec, environment, tokenizer)
    probe = {"tokens": PROBE_TOKENS, "logprobs": engine.probe(PROBE_TOKENS)}

    def check(message: dict[str, Any], version: int) -> RolloutGroup:
        """The group is what an honest worker makes of its counter, and a learner takes it."""
        group = RolloutGroup.decode(message["body"])
        assert (message["version"], group.version) == (version, version)
        check_group(
            group,
            spec,
            spec.run_id,
            NODE_KEY,
            policy=POLICY,
            learner_version=version,
            vocabulary_size=tokenizer.vocab_size,
        )
        for source in ("local", "external"):
            assert verifier.check(message["body"], source).rewards == group.rewards
        tokens = [completion.token_array().tolist() for completion in group.completions]
        assert [completion.text for completion in group.completions] == [
            decode_completion(tokenizer, ids) for ids in tokens
        ]
        assert message["counter"] == group.counter
        assert message["tokens"] == sum(map(len, tokens))
        assert message["seconds"] > 0
        assert message["mean_reward"] == pytest.approx(sum(group.rewards) / len(group.rewards))
        seed = group_seed(spec.run_id, NODE_KEY, POLICY, version, group.counter)
        prompt = render_prompt(tokenizer, environment.question(group.task))
        (again,) = engine.generate([GroupRequest(prompt, seed, 4)], temperature=1.0, max_new_tokens=4)
        assert [each.token_ids for each in again] == tokens
        return group

    with start(spec) as child:
        child.expect("ready")
        child.send("generate", counter=40)  # waits for weights
        child.interrupt()  # the node's to act on, so nothing happens

        (tmp_path / "garbage.safetensors").write_bytes(b"not safetensors")
        child.send("load", version=2, path=str(tmp_path / "garbage.safetensors"), probe=None)
        failed = child.expect("load_failed")
        assert failed["version"] == 2 and "cannot be read as safetensors" in failed["reason"]

        child.send("load", version=3, path=str(WEIGHTS), probe=probe)
        loaded = child.expect("loaded")
        assert loaded["version"] == 3 and loaded["seconds"] > 0 and loaded["probe_error"] < 1e-4
        check(child.expect("group"), 3)

        for counter in range(41, 53):
            child.send("generate", counter=counter)
        child.send("load", version=4, path=str(WEIGHTS), probe=None)
        version, counters = 3, []
        while len(counters) < 12:
            message = child.receive()
            if message["type"] == "loaded":
                assert message["version"] == 4 and message["probe_error"] is None
                version = 4
            else:
                counters.append(check(message, version).counter)
        assert sorted(counters) == list(range(41, 53))

        shuffled = {name: tensor.flip(0).contiguous() for name, tensor in load_file(WEIGHTS).items()}
        save_file(shuffled, tmp_path / "shuffled.safetensors")
        child.send("load", version=5, path=str(tmp_path / "shuffled.safetensors"), probe=probe)
        failed = child.expect("load_failed")
        assert failed["version"] == 5 and "its probe differs from the learner's by" in failed["reason"]
        child.send("generate", counter=53)
        check(child.expect("group"), 4)

        child.send("stop")
        assert child.exit_code() == 0


def endless_model(folder: Path) -> Path:
    """The tiny model made to say anything but its end token: whose embedding is opposite to all others'."""
    for file in TINY_MODEL_DIR.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(WEIGHTS)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "embed_tokens.weight")):
            tensor.fill_(1.0)
    for token in load_tokenizer(TINY_MODEL_DIR).eos_ids:
        weights["model.embed_tokens.weight"][token] = -1.0
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_batch_without_end_is_dropped_after_the_grace_and_with_the_node(tmp_path: Path) -> None:
    spec = make_spec(sampling=SamplingContract(group_size=64, max_new_tokens=7_000))
    folder = str(endless_model(tmp_path))
    with start(spec, model_dir=folder) as stopped, start(spec, model_dir=folder) as orphaned:
        for child in (stopped, orphaned):
            child.expect("ready")
            child.send("load", version=0, path=f"{folder}/model.safetensors", probe=None)
            child.expect("loaded")
            child.send("generate", counter=0)
        stopped.terminate()
        orphaned.hang_up()
        assert orphaned.exit_code() == 1
        assert stopped.exit_code() == 0


def test_what_keeps_it_from_starting_is_named_in_one_line() -> None:
    with start(make_spec(), model_dir="/nowhere") as child:
        assert child.expect("failed")["reason"] == "/nowhere is not a model folder: it has no config.json"
        assert child.exit_code() == 1
