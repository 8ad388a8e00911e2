"""Published versions: bfloat16, hashed as declared, complete or absent, damage found."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.chunks import state_hash
from protocol.delta import DeltaFile
from tests.unit.trainer.factory import tiny_model
from trainer.policy import Policy
from trainer.publication import (
    ProbeResult,
    Publication,
    PublicationError,
    delta_chunk_size,
    flush_publication,
    publish,
    read_publication,
)

PROBE = ProbeResult([1, 2, 3], [-0.5, -1.25])


def published(folder: Path, version: int = 0, keep: int = 9) -> tuple[Policy, Publication]:
    policy = Policy(tiny_model(version))
    return policy, publish(folder, version, policy.tensors(), lambda: PROBE, chunk_size=1000, keep=keep)


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
    assert publication.delta is None and not (tmp_path / "v0" / "delta.bin").exists()


def test_the_same_weights_give_the_same_file(tmp_path: Path) -> None:
    _, one = published(tmp_path / "a")
    _, two = published(tmp_path / "b")
    assert one.path.read_bytes() == two.path.read_bytes()
    assert (one.chunks, one.state_hash) == (two.chunks, two.state_hash)


def successor(folder: Path, publication: Publication, change: int) -> Publication:
    """The version after, with that many weights of one tensor a little larger."""
    policy = Policy(tiny_model(publication.version))
    with torch.no_grad():
        policy.tensors()["model.embed_tokens.weight"].view(-1)[:change] += 0.25
    return publish(
        folder,
        publication.version + 1,
        policy.tensors(),
        lambda: PROBE,
        chunk_size=1000,
        keep=9,
        parent=publication,
    )


@pytest.mark.parametrize("changed", [0, 1, 40])
def test_a_delta_turns_the_parents_file_into_the_new_one(tmp_path: Path, changed: int) -> None:
    _, parent = published(tmp_path)
    publication = successor(tmp_path, parent, changed)
    delta = publication.delta
    assert delta is not None and delta.path == tmp_path / "v1" / "delta.bin"
    assert (delta.parent, delta.parent_state) == (0, parent.state_hash)
    data = delta.path.read_bytes()
    assert (delta.size_bytes, delta.chunk_size) == (len(data), 1000)
    assert delta.chunks == [
        hashlib.sha256(data[start : start + 1000]).digest() for start in range(0, len(data), 1000)
    ]
    file, patched = DeltaFile(data), bytearray(parent.path.read_bytes())
    for index in range(file.chunk_count):
        file.apply(index, memoryview(patched)[index * 1000 : (index + 1) * 1000])
    assert patched == publication.path.read_bytes()
    assert (patched == parent.path.read_bytes()) == (changed == 0)
    flush_publication(publication)
    assert read_publication(tmp_path / "v1") == publication


def test_a_delta_larger_than_a_third_of_the_snapshot_is_not_published(tmp_path: Path) -> None:
    _, parent = published(tmp_path)
    tensors = Policy(tiny_model(1)).tensors()  # other weights altogether
    publication = publish(tmp_path, 1, tensors, lambda: PROBE, chunk_size=1000, keep=9, parent=parent)
    assert publication.delta is None
    assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == [
        "model.safetensors",
        "publication.json",
    ]


@pytest.mark.parametrize("spoil", ["missing", "empty", "other tensors"])
def test_without_its_parents_file_a_version_has_no_delta_and_says_so(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, parent = published(tmp_path)
    if spoil == "missing":
        parent.path.unlink()
    else:
        parent.path.write_bytes(b"" if spoil == "empty" else parent.path.read_bytes() + b"x")
    publication = successor(tmp_path, parent, 1)
    assert publication.delta is None
    assert "no delta from version 0, the whole snapshot is sent" in caplog.text
    assert read_publication(tmp_path / "v1") == publication


def test_adapter_weights_are_published_like_any_others(tmp_path: Path) -> None:
    one = {f"layer.{n}.lora_{m}": torch.randn(4, 300) * 0.02 for n in range(3) for m in "AB"}
    parent = publish(tmp_path, 0, one, lambda: PROBE, chunk_size=4096, keep=9)
    two = {name: tensor + (tensor > 0.05) * 0.001 for name, tensor in one.items()}
    publication = publish(tmp_path, 1, two, lambda: PROBE, chunk_size=4096, keep=9, parent=parent)
    assert load_file(publication.path).keys() == one.keys()
    assert publication.delta is not None and publication.delta.size_bytes < publication.size_bytes / 10


@pytest.mark.parametrize(
    ("size", "largest", "expected"),
    [
        (1, 2**20, 2**16),
        (2**21, 2**20, 2**16),
        (2**21 + 1, 2**20, 2**17),
        (2**26, 2**20, 2**20),
        (2**21, 1000, 1000),
    ],
)
def test_a_delta_is_cut_into_a_few_dozen_chunks(size: int, largest: int, expected: int) -> None:
    assert delta_chunk_size(size, largest) == expected


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damage_of_a_delta_is_found(tmp_path: Path, damage: str) -> None:
    publication = successor(tmp_path, published(tmp_path)[1], 5)
    assert publication.delta is not None
    data = bytearray(publication.delta.path.read_bytes())
    data[-1] ^= 1
    publication.delta.path.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "missing":
        publication.delta.path.unlink()
    with pytest.raises(PublicationError):
        read_publication(tmp_path / "v1")


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
        publish(tmp_path, 0, Policy(tiny_model()).tensors(), probe, chunk_size=1000, keep=1)
    assert list(tmp_path.iterdir()) == []
