"""Published versions: bfloat16, hashed as declared, complete or absent, damage found."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.chunks import state_hash
from tests.unit.trainer.factory import tiny_model
from trainer.policy import Policy
from trainer.publication import (
    ProbeResult,
    Publication,
    PublicationError,
    hash_of,
    publish,
    read_publication,
    snapshot,
)

PROBE = ProbeResult([1, 2, 3], [-0.5, -1.25])


def published(folder: Path, version: int = 0, keep: int = 9) -> tuple[Policy, Publication]:
    policy = Policy(tiny_model(version))
    tensors = snapshot(policy.tensors())
    return policy, publish(folder, version, tensors, lambda: PROBE, chunk_size=1000, keep=keep)


def test_a_publication_is_the_rounded_weights_and_their_hashes(tmp_path: Path) -> None:
    policy, publication = published(tmp_path)
    data = publication.path.read_bytes()
    assert publication.path == tmp_path / "v0" / "model.safetensors"
    assert publication.size_bytes == len(data)
    pieces = [data[start : start + 1000] for start in range(0, len(data), 1000)]
    assert publication.chunks == [hashlib.sha256(piece).digest() for piece in pieces]
    loaded = load_file(publication.path)
    assert loaded.keys() == policy.tensors().keys() and "lm_head.weight" not in loaded
    for name, tensor in policy.tensors().items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16))
    # Whoever reassembles the file gets the same state hash from its bytes alone.
    assert publication.state_hash == state_hash(len(data), 1000, publication.chunks)
    assert publication.state_hash == hash_of(loaded, 1000)


def test_the_same_weights_give_the_same_file(tmp_path: Path) -> None:
    _, one = published(tmp_path / "a")
    _, two = published(tmp_path / "b")
    assert one.path.read_bytes() == two.path.read_bytes()
    assert (one.chunks, one.state_hash) == (two.chunks, two.state_hash)


def test_integers_and_scalars_are_published_as_they_are() -> None:
    tensors = snapshot({"scale": torch.tensor(1.5), "steps": torch.tensor([3, 4])})
    assert tensors["scale"].dtype == torch.bfloat16 and tensors["steps"].dtype == torch.int64


def test_a_publication_is_recovered_from_disk(tmp_path: Path) -> None:
    _, publication = published(tmp_path)
    assert read_publication(tmp_path / "v0") == publication


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    for version in (8, 9, 10, 11):
        published(tmp_path, version, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v10", "v11", "v9"]


def test_publishing_a_version_again_replaces_it(tmp_path: Path) -> None:
    _, first = published(tmp_path)
    first.path.write_bytes(b"damaged")
    with pytest.raises(PublicationError, match="bytes that were published"):
        read_publication(tmp_path / "v0")
    _, second = published(tmp_path)
    assert second == first == read_publication(tmp_path / "v0")


@pytest.mark.parametrize(
    "damage", ["no record", "no weights", "broken record", "flipped bit", "empty weights"]
)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    published(tmp_path)
    record, weights = tmp_path / "v0" / "publication.json", tmp_path / "v0" / "model.safetensors"
    if damage == "no record":
        record.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "broken record":
        value = json.loads(record.read_text())
        value.pop("chunks")
        record.write_text(json.dumps(value))
    elif damage == "flipped bit":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    else:
        weights.write_bytes(b"")
    with pytest.raises(PublicationError):
        read_publication(tmp_path / "v0")


def test_a_failing_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    def probe() -> ProbeResult:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        publish(tmp_path, 0, snapshot(Policy(tiny_model()).tensors()), probe, chunk_size=1000, keep=1)
    assert list(tmp_path.iterdir()) == []
