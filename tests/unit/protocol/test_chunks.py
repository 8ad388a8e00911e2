"""Chunks cover a file exactly once, and a state's hash depends on its tensors and nothing else."""

import hashlib
import mmap
import random
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chunks import chunk_hash, chunk_hashes, chunk_ranges, state_hash

Tensor = tuple[str, str, tuple[int, ...], bytes]
TENSORS: list[Tensor] = [
    ("b", "BF16", (2, 1), b"\x01\x02\x03\x04"),
    ("a", "F32", (), b"\x00\x00\x80\x3f"),
    ("c", "BF16", (0,), b""),
]


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


def test_a_mapped_file_is_cut_like_its_bytes(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(10_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert chunk_hashes(mapped, 4096) == chunk_hashes(data, 4096)


def test_the_state_hash_by_an_independent_derivation() -> None:
    listed = [
        [name, dtype, list(shape), hashlib.sha256(data).digest()] for name, dtype, shape, data in TENSORS
    ]
    expected = hashlib.sha256(b"swarmnode/1 state\0" + msgpack.packb([listed[1], listed[0], listed[2]]))
    assert state_hash(TENSORS) == expected.digest()


@given(st.permutations(TENSORS), st.integers(0, 3))
def test_the_state_hash_ignores_order_and_which_file_a_tensor_is_in(order: list[Tensor], cut: int) -> None:
    files = (iter(order[:cut]), iter([(n, d, s, memoryview(data)) for n, d, s, data in order[cut:]]))
    assert state_hash(tensor for file in files for tensor in file) == state_hash(TENSORS)


@pytest.mark.parametrize(
    "changed",
    [
        ("x", "BF16", (2, 1), b"\x01\x02\x03\x04"),
        ("b", "F16", (2, 1), b"\x01\x02\x03\x04"),
        ("b", "BF16", (1, 2), b"\x01\x02\x03\x04"),
        ("b", "BF16", (2,), b"\x01\x02\x03\x04"),
        ("b", "BF16", (2, 1), b"\x01\x02\x03\x05"),
    ],
    ids=["name", "dtype", "shape", "rank", "data"],
)
def test_the_state_hash_depends_on_everything_a_tensor_is(changed: Tensor) -> None:
    assert state_hash([changed, *TENSORS[1:]]) != state_hash(TENSORS)
    assert state_hash(TENSORS[1:]) != state_hash(TENSORS)


def test_names_are_ordered_by_code_point() -> None:
    tensors: list[Tensor] = [
        ("é", "F32", (), b""),
        ("z", "F32", (), b""),
        ("Z", "F32", (), b""),
        ("a.10", "F32", (), b""),
    ]
    listed = [[name, "F32", [], hashlib.sha256(b"").digest()] for name in ("Z", "a.10", "z", "é")]
    assert state_hash(tensors) == hashlib.sha256(b"swarmnode/1 state\0" + msgpack.packb(listed)).digest()


def test_a_model_of_many_tensors_has_a_hash() -> None:
    many: list[Tensor] = [(f"layer.{index}", "BF16", (1,), b"\0\0") for index in range(30_000)]
    assert len(state_hash(many)) == 32
