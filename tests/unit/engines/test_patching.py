"""Live weights patched by deltas are those of the whole file, bit for bit; whatever fails changes nothing."""

import struct
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.adapter import AdapterSpec
from protocol.delta import encode_delta
from swarmnode.engines.base import LoadError
from swarmnode.engines.transformers_engine import TransformersEngine
from tests.unit.engines.conftest import EOS
from trainer.policy import load_policy

Tensors = dict[str, torch.Tensor]
Dtype = Literal["float32", "bfloat16"]
PROBE = [1, 17, 99, 3]
CHUNK = 1024
ONE = "model.layers.1.mlp.up_proj.weight"


def step(weights: Tensors, seed: int) -> Tensors:
    """About a tenth of all values moved, a few of them far."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        changed = torch.rand(tensor.shape, generator=generator) < 0.1
        far = torch.rand(tensor.shape, generator=generator) < 0.01
        scale = torch.where(far, -3.0, 1.0 + 0.01 * torch.randn(tensor.shape, generator=generator))
        moved[name] = torch.where(changed | far, tensor * scale.to(tensor.dtype), tensor)
    return moved


class Versions:
    """Versions 0, 1, 2 of a model as files, and the deltas between them."""

    def __init__(self, folder: Path, first: Tensors) -> None:
        self.folder = folder
        weights = first
        for version in range(3):
            if version:
                weights = step(weights, version)
            save_file(weights, self.file(version), metadata={"format": "pt"})
        for version in (1, 2):
            pieces = encode_delta(
                self.file(version - 1).read_bytes(), self.file(version).read_bytes(), CHUNK, threads=1
            )
            self.delta(version).write_bytes(b"".join(pieces))

    def file(self, version: int) -> Path:
        return self.folder / f"v{version}.safetensors"

    def delta(self, version: int) -> Path:
        return self.folder / f"v{version}.delta"


@pytest.fixture
def versions(llama_dir: Path, tmp_path: Path) -> Versions:
    return Versions(tmp_path, load_file(llama_dir / "model.safetensors"))


def loaded(llama_dir: Path, path: Path, dtype: Dtype = "float32", version: int = 0) -> TransformersEngine:
    engine = TransformersEngine(llama_dir, dtype=dtype, eos_ids=EOS)
    engine.load(path, version)
    return engine


def same_bits(one: TransformersEngine, other: TransformersEngine) -> bool:
    states = [engine._model.state_dict() for engine in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8))
        for name, tensor in states[0].items()
    )


@pytest.mark.parametrize(
    ("file_type", "dtype"),
    [
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float32"),
        (torch.float32, "float32"),
    ],
)
def test_patched_is_the_same_as_loaded(
    llama_dir: Path, tmp_path: Path, file_type: torch.dtype, dtype: Dtype
) -> None:
    first = load_file(llama_dir / "model.safetensors")
    versions = Versions(tmp_path, {name: tensor.to(file_type) for name, tensor in first.items()})
    engine = loaded(llama_dir, versions.file(0), dtype)
    assert engine.patch_obstacle is None
    engine.patch([versions.delta(1)], 1)
    assert engine.version == 1
    assert same_bits(engine, loaded(llama_dir, versions.file(1), dtype))
    engine.patch([versions.delta(2)], 2)
    whole = loaded(llama_dir, versions.file(2), dtype)
    assert same_bits(engine, whole)
    assert engine.probe(PROBE) == whole.probe(PROBE)
    assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight


def test_a_chain_of_deltas_is_applied_at_once(llama_dir: Path, versions: Versions) -> None:
    engine = loaded(llama_dir, versions.file(0))
    engine.patch([versions.delta(1), versions.delta(2)], 2)
    assert engine.version == 2
    assert same_bits(engine, loaded(llama_dir, versions.file(2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_patched_like_a_whole_model(llama_dir: Path, tmp_path: Path, dtype: Dtype) -> None:
    adapter = AdapterSpec(r=4, alpha=8.0, target_modules=["q_proj", "up_proj"])
    policy = load_policy(llama_dir, adapter=adapter)
    generator = torch.Generator().manual_seed(1)
    first = {
        name: torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
        for name, tensor in policy.tensors().items()
    }
    versions = Versions(tmp_path, first)
    engines = [TransformersEngine(llama_dir, dtype=dtype, eos_ids=EOS, adapter=adapter) for _ in range(2)]
    engines[0].load(versions.file(0), 0)
    engines[0].patch([versions.delta(1), versions.delta(2)], 2)
    engines[1].load(versions.file(2), 2)
    assert same_bits(*engines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_applying_a_delta_twice_changes_nothing(llama_dir: Path, versions: Versions, dtype: Dtype) -> None:
    engine = loaded(llama_dir, versions.file(0), dtype)
    engine.patch([versions.delta(1), versions.delta(1)], 1)
    engine.patch([versions.delta(1)], 1)
    assert same_bits(engine, loaded(llama_dir, versions.file(1), dtype))


def test_a_check_that_fails_brings_the_old_weights_back(llama_dir: Path, versions: Versions) -> None:
    engine = loaded(llama_dir, versions.file(0))
    seen: list[list[float]] = []

    def check() -> None:
        seen.append(engine.probe(PROBE))
        raise LoadError("not what was promised")

    with pytest.raises(LoadError, match="not what was promised"):
        engine.patch([versions.delta(1), versions.delta(2)], 2, check)
    assert seen == [loaded(llama_dir, versions.file(2)).probe(PROBE)]
    assert engine.version == 0
    assert same_bits(engine, loaded(llama_dir, versions.file(0)))


def with_a_nan(versions: Versions) -> bytes:
    weights = load_file(versions.file(1))
    weights[ONE][3, 4] = torch.nan
    save_file(weights, versions.folder / "nan.safetensors", metadata={"format": "pt"})
    new = (versions.folder / "nan.safetensors").read_bytes()
    return b"".join(encode_delta(versions.file(0).read_bytes(), new, CHUNK, threads=1))


def cut(versions: Versions) -> bytes:
    return versions.delta(1).read_bytes()[:-1]


def for_another_model(versions: Versions) -> bytes:
    weights = load_file(versions.file(0))
    del weights[ONE]
    for number in (1, 2):
        path = versions.folder / f"other{number}.safetensors"
        save_file(step(weights, number), path, metadata={"format": "pt"})
    one, two = ((versions.folder / f"other{number}.safetensors").read_bytes() for number in (1, 2))
    return b"".join(encode_delta(one, two, CHUNK, threads=1))


def of_other_elements(versions: Versions) -> bytes:
    """All regions called single bytes: positions then mean bytes, and lie in the header too."""
    delta = versions.delta(1).read_bytes()
    magic, size, chunk_size, count = struct.unpack("<8sQII", delta[:24])
    return struct.pack("<8sQIIQB", magic, size, chunk_size, 1, size, 1) + delta[24 + 9 * count :]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_a_nan, "values that are not finite"),
        (cut, "cannot be applied"),
        (for_another_model, r"is for a file of \d+ bytes"),
        (of_other_elements, "cannot be applied: it changes"),
        (lambda versions: b"", "cannot be applied"),
    ],
)
def test_a_delta_that_does_not_fit_changes_nothing(
    llama_dir: Path, versions: Versions, make, message: str
) -> None:
    engine = loaded(llama_dir, versions.file(0))
    path = versions.folder / "bad.delta"
    path.write_bytes(make(versions))
    with pytest.raises(LoadError, match=message):
        engine.patch([path], 1)
    assert engine.version == 0
    assert same_bits(engine, loaded(llama_dir, versions.file(0)))
    with pytest.raises(LoadError, match="cannot be applied"):
        engine.patch([versions.folder / "missing.delta"], 1)


def test_weights_that_are_not_held_as_in_the_file_need_the_file(llama_dir: Path, versions: Versions) -> None:
    whole = {name: tensor.float() for name, tensor in load_file(versions.file(0)).items()}
    save_file(whole, versions.file(0))
    rounded = loaded(llama_dir, versions.file(0), "bfloat16")
    assert rounded.patch_obstacle is not None and "is F32 in the file" in rounded.patch_obstacle
    with pytest.raises(LoadError, match="is F32 in the file"):
        rounded.patch([versions.delta(1)], 1)
    twice = whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    save_file(twice, versions.file(0))
    tied = loaded(llama_dir, versions.file(0))
    assert tied.patch_obstacle is not None and "are one weight in this model" in tied.patch_obstacle


def test_nothing_can_be_patched_before_something_is_loaded(llama_dir: Path, versions: Versions) -> None:
    engine = TransformersEngine(llama_dir, eos_ids=EOS)
    with pytest.raises(LoadError, match="no version is loaded"):
        engine.patch([versions.delta(1)], 1)
