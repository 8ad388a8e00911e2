"""What a node says it holds is what its disk holds, whatever is added, found, damaged or deleted."""

from pathlib import Path

import pytest

from protocol.chunks import chunk_hashes
from protocol.envelope import Envelope, open_envelope, seal
from protocol.messages import Delta, Manifest
from swarmnode.runtime.version_store import VersionStore, version_directory
from tests.unit.swarmnode.role_parts import LEARNER
from tests.unit.swarmnode.served_chunks import read_chunk, serves

RUN = bytes(32)
CHUNK = 10
OLD, NEW, DELTA = b"weights of version 1", b"weights of version 2", b"from 1 to 2"


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path, RUN)


def signed(version: int, content: bytes, delta: bytes | None = None) -> tuple[Manifest, Envelope]:
    described = None
    if delta is not None:
        described = Delta(
            parent=version - 1,
            parent_state=bytes(32),
            size_bytes=len(delta),
            chunk_size=CHUNK,
            chunks=chunk_hashes(delta, CHUNK),
        )
    manifest = Manifest(
        policy=LEARNER.key,
        version=version,
        size_bytes=len(content),
        chunk_size=CHUNK,
        chunks=chunk_hashes(content, CHUNK),
        delta=described,
    )
    return manifest, open_envelope(seal(LEARNER, RUN, "manifest", version, manifest.encode()), run_id=RUN)


def write(root: Path, version: int, name: str, content: bytes) -> Path:
    path = version_directory(root, LEARNER.key, version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


async def test_a_delta_is_held_before_its_snapshot(store: VersionStore, tmp_path: Path) -> None:
    manifest, envelope = signed(2, NEW, DELTA)
    store.add(manifest, envelope, None, write(tmp_path, 2, "delta.bin", DELTA))
    assert store.versions(LEARNER.key) == [2] and store.complete(LEARNER.key) == []
    assert serves(store.shelf, chunk_hashes(DELTA, CHUNK)[0]) and not serves(store.shelf, manifest.chunks[0])
    whole = store.add(manifest, envelope, write(tmp_path, 2, "model.safetensors", NEW))
    assert whole.delta_path is not None and store.complete(LEARNER.key) == [whole]
    assert await read_chunk(store.shelf, manifest.chunks[1]) == NEW[10:20]
    store.discard_weights(whole)
    assert store.versions(LEARNER.key) == [2] and not serves(store.shelf, manifest.chunks[0])
    left = store.get(LEARNER.key, 2)
    assert left is not None
    store.discard_delta(left)
    assert store.get(LEARNER.key, None) is None and not serves(store.shelf, chunk_hashes(DELTA, CHUNK)[0])


def test_a_version_added_under_another_manifest_is_served_by_that_one(
    store: VersionStore, tmp_path: Path
) -> None:
    weights = write(tmp_path, 2, "model.safetensors", NEW)
    delta = write(tmp_path, 2, "delta.bin", DELTA)
    store.add(*signed(2, NEW, DELTA), weights, delta)
    without = store.add(*signed(2, NEW), weights)
    assert without.delta_path is None and not serves(store.shelf, chunk_hashes(DELTA, CHUNK)[0])
    other = store.add(*signed(2, OLD), weights)
    assert other.weights_path == weights
    assert serves(store.shelf, chunk_hashes(OLD, CHUNK)[1])
    assert not serves(store.shelf, chunk_hashes(NEW, CHUNK)[1])


def test_a_start_finds_what_is_complete(store: VersionStore, tmp_path: Path) -> None:
    for version, content, delta in ((1, OLD, None), (2, NEW, DELTA), (3, OLD, DELTA), (4, NEW, DELTA)):
        _, envelope = signed(version, content, delta)
        write(tmp_path, version, "manifest.msgpack", envelope.encoded)
    write(tmp_path, 1, "model.safetensors", OLD)
    write(tmp_path, 2, "model.safetensors", NEW)
    write(tmp_path, 2, "delta.bin", DELTA)
    write(tmp_path, 3, "delta.bin", DELTA)
    write(tmp_path, 3, "model.safetensors", b"cut")
    write(tmp_path, 4, "delta.bin", b"cut")
    write(tmp_path, 5, "manifest.msgpack", b"no manifest")
    store.scan()
    found = {version: store.get(LEARNER.key, version) for version in store.versions(LEARNER.key)}
    assert {
        version: (
            one is not None and one.weights_path is not None,
            one is not None and one.delta_path is not None,
        )
        for version, one in found.items()
    } == {1: (True, False), 2: (True, True), 3: (False, True)}


async def test_what_a_delta_still_needs_is_not_deleted(store: VersionStore, tmp_path: Path) -> None:
    store.add(*signed(1, OLD), write(tmp_path, 1, "model.safetensors", OLD))
    for version in range(2, 7):
        store.add(*signed(version, NEW, DELTA), None, write(tmp_path, version, "delta.bin", DELTA))
    await store.retain(LEARNER.key, 2)
    assert store.versions(LEARNER.key) == [1, 2, 3, 4, 5, 6]
    store.add(*signed(5, NEW, DELTA), write(tmp_path, 5, "model.safetensors", NEW))
    with store.keep(LEARNER.key, 2), store.keep(LEARNER.key, 2):
        await store.retain(LEARNER.key, 2)
        assert store.versions(LEARNER.key) == [2, 5, 6]
    await store.retain(LEARNER.key, 2)
    assert store.versions(LEARNER.key) == [5, 6]
    assert {path.name for path in tmp_path.glob("*/v*")} == {"v5", "v6"}
