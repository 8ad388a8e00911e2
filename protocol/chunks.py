"""Cutting files into content-addressed chunks, and the hash of a set of tensors."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from protocol.encoding import encode


class Buffer(Protocol):
    """Anything sliceable into bytes: bytes, memoryview, mmap."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: slice, /) -> "bytes | memoryview": ...


def chunk_ranges(size_bytes: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each chunk of a file."""
    for start in range(0, size_bytes, chunk_size):
        yield start, min(start + chunk_size, size_bytes)


def chunk_hashes(data: Buffer, chunk_size: int) -> list[bytes]:
    """SHA-256 of each chunk of `data`."""
    return [hashlib.sha256(data[start:end]).digest() for start, end in chunk_ranges(len(data), chunk_size)]


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """The name of a chunk: its SHA-256."""
    return hashlib.sha256(chunk).digest()


def state_hash(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes | memoryview]]) -> bytes:
    """Hash of tensors given as (name, dtype, shape, raw little-endian bytes), in any order, from any files.

    SHA-256 over the sorted list of (name, dtype, shape, SHA-256 of the bytes); dtype in safetensors' names
    ("BF16").
    """
    entries = sorted(
        [name, dtype, list(shape), hashlib.sha256(data).digest()] for name, dtype, shape, data in tensors
    )
    return hashlib.sha256(b"swarmnode/1 state\0" + encode(entries)).digest()
