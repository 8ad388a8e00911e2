"""An engine with an adapter computes what the learner that trained it computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.adapter import AdapterSpec
from swarmnode.engines.base import EngineError, GroupRequest, LoadError
from swarmnode.engines.transformers_engine import TransformersEngine
from tests.unit.engines.conftest import EOS
from trainer.batching import PromptRows, TrainingRow, collate
from trainer.policy import Policy, load_policy
from trainer.snapshot_file import write_snapshot

SPEC = AdapterSpec(r=4, alpha=8.0, target_modules=["q_proj", "up_proj"])
PROMPT = [1, 17, 99, 3, 8]


@pytest.fixture
def policy(llama_dir: Path) -> Policy:
    """A learner's, after some training."""
    policy = load_policy(llama_dir, adapter=SPEC)
    generator = torch.Generator().manual_seed(1)
    for tensor in policy.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return policy


@pytest.fixture
def version(policy: Policy, tmp_path: Path) -> Path:
    path = tmp_path / "version.safetensors"
    write_snapshot(path, policy.tensors())
    return path


def engine_of(llama_dir: Path, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(llama_dir, dtype=dtype, eos_ids=EOS, adapter=SPEC)  # type: ignore[arg-type]


def test_a_version_is_the_adapter_alone(version: Path, llama_dir: Path) -> None:
    assert len(load_file(version)) == 2 * 2 * 3  # A and B, two layers of each of three
    assert version.stat().st_size < (llama_dir / "model.safetensors").stat().st_size / 4


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.3)])
def test_the_engine_and_the_learner_find_the_same_logprobs(
    policy: Policy, version: Path, llama_dir: Path, dtype: str, tolerance: float
) -> None:
    engine = engine_of(llama_dir, dtype)
    engine.load(version, 4)
    with policy.rounded_to_bfloat16():
        expected = policy.sequence_logprobs(PROMPT)
    assert engine.probe(PROMPT) == pytest.approx(expected, abs=tolerance)
    # What it samples too: behavior log-probs are those that the learner will compute for the same tokens.
    (completions,) = engine.generate([GroupRequest(PROMPT, 11, 4)], temperature=0.8, max_new_tokens=6)
    rows = tuple(TrainingRow(np.array(each.token_ids), None, 0.0) for each in completions)
    batch = collate([PromptRows(np.array(PROMPT), rows)])
    with policy.rounded_to_bfloat16(), torch.no_grad():
        logprobs_BT = policy.token_logprobs(batch, 0.8).logprobs_BT
    for row, each in enumerate(completions):
        found = logprobs_BT[row, : len(each.token_ids)].tolist()
        assert found == pytest.approx(each.logprobs, abs=tolerance)


def test_another_version_replaces_the_adapter_and_leaves_the_base(
    policy: Policy, version: Path, llama_dir: Path, tmp_path: Path
) -> None:
    engine = engine_of(llama_dir)
    plain = TransformersEngine(llama_dir, eos_ids=EOS)
    plain.load(llama_dir / "model.safetensors", 0)
    nothing = tmp_path / "nothing.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(version).items()}, nothing)
    engine.load(version, 1)
    first = engine.probe(PROMPT)
    engine.load(nothing, 2)
    assert engine.probe(PROMPT) == pytest.approx(plain.probe(PROMPT), abs=1e-6)
    engine.load(version, 3)
    assert engine.probe(PROMPT) == first and first != plain.probe(PROMPT)
    assert engine.patch_obstacle is None


def test_whole_models_and_other_adapters_are_refused(version: Path, llama_dir: Path, tmp_path: Path) -> None:
    engine = engine_of(llama_dir)
    engine.load(version, 1)
    before = engine.probe(PROMPT)
    with pytest.raises(LoadError, match="of another model"):
        engine.load(llama_dir / "model.safetensors", 2)
    larger = tmp_path / "larger.safetensors"
    save_file({name: torch.cat([t, t]) for name, t in load_file(version).items()}, larger)
    with pytest.raises(LoadError, match="has shape"):
        engine.load(larger, 2)
    assert engine.version == 1 and engine.probe(PROMPT) == before


def test_a_folder_without_weights_is_no_base_model(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama_dir / "config.json").read_bytes())
    with pytest.raises(EngineError, match="needs its base model"):
        engine_of(tmp_path)
