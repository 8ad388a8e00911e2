"""Which files of a model folder travel, and when a folder counts as the run's model."""

import json
from pathlib import Path

import pytest

from protocol import limits
from swarmnode.runtime.model_files import base_model, model_matches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "tokenizer.json").write_bytes(b"t" * (limits.DEFAULT_CHUNK_BYTES + 1))
    (tmp_path / "README.txt").write_bytes(b"not needed")
    (tmp_path / "modeling.py").write_bytes(b"never")
    (tmp_path / "model.safetensors").write_bytes(b"w" * (3 * limits.DEFAULT_CHUNK_BYTES))
    return tmp_path


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (folder / name).write_bytes(name.encode())
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_without_weights_the_files_beside_them_are_named(folder: Path) -> None:
    model = base_model("m", folder, with_weights=False)
    assert [(file.path, file.size_bytes, len(file.chunks)) for file in model.files] == [
        ("config.json", 2, 1),
        ("tokenizer.json", limits.DEFAULT_CHUNK_BYTES + 1, 2),
    ]
    shard(folder)
    assert base_model("m", folder, with_weights=False) == model


def test_weights_are_one_file_or_those_of_the_index(folder: Path) -> None:
    model = base_model("m", folder, with_weights=True)
    assert [(file.path, len(file.chunks)) for file in model.weights] == [("model.safetensors", 3)]
    shard(folder)
    sharded = base_model("m", folder, with_weights=True)
    assert [file.path for file in sharded.files] == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_weights_that_cannot_be_told_are_an_error(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors"):
        base_model("m", folder, with_weights=True)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"2 \.safetensors files and no"):
        base_model("m", folder, with_weights=True)


def test_a_folder_matches_only_with_every_byte(folder: Path) -> None:
    model = base_model("m", folder, with_weights=True)
    assert model_matches(folder, model)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert not model_matches(folder, model)
    assert model_matches(folder, model, weights=False)
    (folder / "config.json").unlink()
    assert not model_matches(folder, model, weights=False)
