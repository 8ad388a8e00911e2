"""A rebuilt snapshot is the learner's bit for bit, or there is none and the reason is said."""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.chunks import chunk_hashes
from protocol.delta import encode_delta
from protocol.messages import Manifest
from swarmnode.runtime.rebuild import RebuildFailed, RebuildStopped, flush_file, rebuild_snapshot
from tests.unit.protocol.delta_parts import safetensors

CHUNK = 1 << 12


class Versions:
    """Two snapshots and the delta between them."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(5)
        old = bytearray(rng.randbytes(40 * CHUNK))
        new = bytearray(old)
        for _ in range(500):
            new[2 * rng.randrange(len(new) // 2)] ^= 1
        self.new = safetensors([("BF16", bytes(new))])
        self.parent, self.delta, self.target = folder / "old", folder / "delta", folder / "new" / "snapshot"
        self.target.parent.mkdir()
        self.parent.write_bytes(safetensors([("BF16", bytes(old))]))
        self.delta.write_bytes(b"".join(encode_delta(self.parent.read_bytes(), self.new, CHUNK)))
        self.manifest = Manifest(
            policy=bytes(32),
            version=8,
            size_bytes=len(self.new),
            chunk_size=CHUNK,
            chunks=chunk_hashes(self.new, CHUNK),
        )

    def rebuild(self, **options: Any) -> None:
        rebuild_snapshot(self.parent, self.delta, self.target, self.manifest, **options)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_parent_and_a_delta_give_the_snapshot(versions: Versions, threads: int) -> None:
    versions.rebuild(threads=threads)
    assert versions.target.read_bytes() == versions.new
    assert versions.files() == ["snapshot"]


def test_the_new_snapshot_itself_may_stand_for_the_parent(versions: Versions) -> None:
    versions.parent.write_bytes(versions.new)
    versions.rebuild(flush=False)
    flush_file(versions.target)
    assert versions.target.read_bytes() == versions.new


def test_it_can_be_stopped_and_leaves_nothing(versions: Versions) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(RebuildStopped):
        versions.rebuild(stop=stop)
    assert versions.files() == []


def wrong_parent(versions: Versions) -> None:
    data = bytearray(versions.parent.read_bytes())
    data[30 * CHUNK] ^= 4
    versions.parent.write_bytes(data)


def short_parent(versions: Versions) -> None:
    versions.parent.write_bytes(versions.parent.read_bytes()[:-2])


def cut_delta(versions: Versions) -> None:
    versions.delta.write_bytes(versions.delta.read_bytes()[:-2])


def no_delta(versions: Versions) -> None:
    versions.delta.write_bytes(b"")


def damaged_delta(versions: Versions) -> None:
    data = bytearray(versions.delta.read_bytes())
    data[data.index(bytes.fromhex("28b52ffd"))] ^= 1
    versions.delta.write_bytes(data)


def delta_of_another_size(versions: Versions) -> None:
    file = safetensors([("BF16", bytes(80))])
    versions.delta.write_bytes(b"".join(encode_delta(file, file, CHUNK)))


def delta_of_another_version(versions: Versions) -> None:
    parent = versions.parent.read_bytes()
    versions.delta.write_bytes(b"".join(encode_delta(parent, parent, CHUNK)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_parent, "chunk 30 of version 8 has another hash"),
        (short_parent, "the parent has 163952 bytes, version 8 163954"),
        (cut_delta, "whose records end at"),
        (no_delta, "ends too early"),
        (damaged_delta, "the delta of version 8 is damaged: a damaged frame"),
        (delta_of_another_size, "is for 187 bytes in chunks of 4096, version 8 has 163954"),
        (delta_of_another_version, "has another hash"),
    ],
)
def test_what_does_not_give_the_snapshot_gives_nothing(
    versions: Versions, spoil: Callable[[Versions], None], message: str
) -> None:
    spoil(versions)
    versions.target.write_bytes(b"as before")
    with pytest.raises(RebuildFailed, match=message):
        versions.rebuild()
    assert versions.target.read_bytes() == b"as before"
    assert versions.files() == ["snapshot"]


def test_a_full_disk_is_an_error_of_the_disk(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        versions.rebuild()
    assert versions.files() == []


def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    versions.rebuild()
    assert versions.target.read_bytes() == versions.new


def test_a_missing_parent_is_an_error_of_the_disk(versions: Versions) -> None:
    versions.parent.unlink()
    with pytest.raises(FileNotFoundError):
        versions.rebuild()
    assert versions.files() == []
