"""Cutting files into content-addressed chunks, and naming a file by them."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def chunk_hashes(data: Buffer, chunk_size: int, threads: int = 1) -> list[bytes]:
    """SHA-256 of each chunk of `data`."""
    ranges = chunk_ranges(len(data), chunk_size)
    if threads == 1:
        return [hashlib.sha256(data[start:end]).digest() for start, end in ranges]
    with ThreadPoolExecutor(threads, "hash") as pool:
        return list(pool.map(lambda span: hashlib.sha256(data[span[0] : span[1]]).digest(), ranges))


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """The name of a chunk: its SHA-256."""
    return hashlib.sha256(chunk).digest()


def state_hash(size_bytes: int, chunk_size: int, chunks: Sequence[bytes]) -> bytes:
    """The name of a file: a hash over its size, its chunk size and the hashes of its chunks.

    Whoever has verified every chunk has verified the name, in one pass and in any order.
    """
    return hashlib.sha256(b"swarmnode/1 state\0" + encode([size_bytes, chunk_size, list(chunks)])).digest()
