"""Chunks cover a file exactly once, and a file's name depends on all that makes it."""

import hashlib
import mmap
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.chunks import chunk_hash, chunk_hashes, chunk_ranges, state_hash


@pytest.mark.parametrize(
    ("size", "chunk_size", "expected"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (4, 4, [(0, 4)]),
        (5, 4, [(0, 4), (4, 5)]),
        (8, 4, [(0, 4), (4, 8)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_exact_ranges(size: int, chunk_size: int, expected: list[tuple[int, int]]) -> None:
    assert list(chunk_ranges(size, chunk_size)) == expected


@given(st.integers(0, 5000), st.integers(1, 700))
def test_ranges_cover_the_file_once_in_order(size: int, chunk_size: int) -> None:
    ranges = list(chunk_ranges(size, chunk_size))
    assert [byte for start, end in ranges for byte in range(start, end)] == list(range(size))
    assert len(ranges) == -(-size // chunk_size)


@given(st.binary(max_size=2000), st.integers(1, 300))
def test_chunks_put_together_are_the_file(data: bytes, chunk_size: int) -> None:
    pieces = [data[at : at + chunk_size] for at in range(0, len(data), chunk_size)]
    assert chunk_hashes(data, chunk_size) == [hashlib.sha256(piece).digest() for piece in pieces]
    assert chunk_hashes(memoryview(data), chunk_size) == [chunk_hash(piece) for piece in pieces]
    assert chunk_hashes(data, chunk_size, threads=2) == chunk_hashes(data, chunk_size)


def test_a_mapped_file_is_cut_like_its_bytes(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(10_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert chunk_hashes(mapped, 4096) == chunk_hashes(data, 4096)


def test_the_state_hash_by_an_independent_derivation() -> None:
    # A list of three: 1500 as a 16-bit integer, 1024 likewise, two byte strings of 32.
    listed = "93" + "cd05dc" + "cd0400" + "92" + "c420" + "aa" * 32 + "c420" + "bb" * 32
    expected = hashlib.sha256(b"swarmnode/1 state\0" + bytes.fromhex(listed)).digest()
    assert state_hash(1500, 1024, [b"\xaa" * 32, b"\xbb" * 32]) == expected


@pytest.mark.parametrize(
    "changed",
    [
        (1501, 1024, [b"a" * 32, b"b" * 32]),
        (1500, 1025, [b"a" * 32, b"b" * 32]),
        (1500, 1024, [b"b" * 32, b"a" * 32]),
        (1500, 1024, [b"a" * 32, b"c" * 32]),
    ],
    ids=["size", "chunk size", "order", "hash"],
)
def test_the_state_hash_depends_on_everything_that_makes_a_file(
    changed: tuple[int, int, list[bytes]],
) -> None:
    assert state_hash(*changed) != state_hash(1500, 1024, [b"a" * 32, b"b" * 32])


def test_the_largest_snapshot_has_a_hash() -> None:
    assert len(state_hash(2**39, 2**22, [b"c" * 32] * limits.MAX_CHUNKS)) == 32
