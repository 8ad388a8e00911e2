"""A file that is not exactly this model's weights is refused, and then the engine has its old ones."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.engines.base import LoadError
from swarmnode.engines.transformers_engine import TransformersEngine
from tests.unit.engines.conftest import EOS

Tensors = dict[str, torch.Tensor]
PROBE = [1, 17, 99, 3]
ONE = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def engine(llama_dir: Path) -> TransformersEngine:
    engine = TransformersEngine(llama_dir, eos_ids=EOS)
    engine.load(llama_dir / "model.safetensors", 3)
    return engine


def without_one(weights: Tensors) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if name != ONE}


def with_a_stranger(weights: Tensors) -> Tensors:
    return weights | {"model.layers.9.mlp.up_proj.weight": weights[ONE].clone()}


def of_another_shape(weights: Tensors) -> Tensors:
    return weights | {ONE: weights[ONE].t().contiguous()}


def of_whole_numbers(weights: Tensors) -> Tensors:
    return weights | {ONE: weights[ONE].to(torch.int32)}


def with_a_nan(weights: Tensors) -> Tensors:
    changed = weights[ONE].clone()
    changed[3, 4] = torch.nan
    return weights | {ONE: changed}


def untied(weights: Tensors) -> Tensors:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, f"lacks 1 weights, such as {ONE}"),
        (with_a_stranger, r"has 1 that the model does not, such as model\.layers\.9"),
        (of_another_shape, r"has shape \[32, 48\], the model needs \[48, 32\]"),
        (of_whole_numbers, "is of type I32"),
        (with_a_nan, "holds values that are not finite"),
        (untied, "are one weight in this model but differ here"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    engine: TransformersEngine,
    llama_dir: Path,
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    message: str,
) -> None:
    before = engine.probe(PROBE)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(llama_dir / "model.safetensors")), path)
    with pytest.raises(LoadError, match=message):
        engine.load(path, 4)
    assert engine.version == 3
    assert engine.probe(PROBE) == before


def test_a_missing_cut_or_pickled_file_is_refused(
    engine: TransformersEngine, llama_dir: Path, tmp_path: Path
) -> None:
    whole = (llama_dir / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "pickle.safetensors").write_bytes(pickle.dumps({"weight": 1}))
    before = engine.probe(PROBE)
    for name in ("missing", "cut", "empty", "pickle"):
        with pytest.raises(LoadError, match="cannot be read as safetensors"):
            engine.load(tmp_path / f"{name}.safetensors", 4)
    assert engine.version == 3
    assert engine.probe(PROBE) == before


def test_a_check_that_fails_brings_the_old_weights_back(
    engine: TransformersEngine, llama_dir: Path, tmp_path: Path
) -> None:
    before = engine.probe(PROBE)
    weights = load_file(llama_dir / "model.safetensors")
    save_file(
        {name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, tmp_path / "new.safetensors"
    )
    seen: list[list[float]] = []

    def check() -> None:
        seen.append(engine.probe(PROBE))
        raise LoadError("not what was promised")

    with pytest.raises(LoadError, match="not what was promised"):
        engine.load(tmp_path / "new.safetensors", 4, check)
    assert seen[0] != before
    assert engine.version == 3
    assert engine.probe(PROBE) == before


def test_tied_weights_may_be_named_once_or_twice(
    engine: TransformersEngine, llama_dir: Path, tmp_path: Path
) -> None:
    before = engine.probe(PROBE)
    weights = load_file(llama_dir / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, tmp_path / "both.safetensors")
    only_head = {name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"}
    save_file(only_head | {"lm_head.weight": embedding}, tmp_path / "head.safetensors")
    for version, name in enumerate(("both", "head"), start=4):
        engine.load(tmp_path / f"{name}.safetensors", version)
        assert engine.version == version
        assert engine.probe(PROBE) == before


def test_a_loaded_file_may_be_overwritten_afterwards(llama_dir: Path, tmp_path: Path) -> None:
    """A float of the model's own type is not left mapped to the file."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((llama_dir / "model.safetensors").read_bytes())
    engine = TransformersEngine(llama_dir, dtype="bfloat16", eos_ids=EOS)
    engine.load(path, 0)
    before = engine.probe(PROBE)
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert engine.probe(PROBE) == before
