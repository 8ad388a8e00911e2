"""Weights as a safetensors file: floating point rounded to bfloat16, written piece by piece from where they
are.

The same weights always give the same bytes: tensors lie in order of their names, the widest elements first.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

PIECE_ELEMENTS = 2**21
"""Elements that are converted at a time: what writing takes in memory."""

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""


def write_snapshot(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write the file; returns its size in bytes. Takes a few MB of memory, whatever the size."""
    with path.open("wb") as file:
        for piece in snapshot_pieces(tensors):
            file.write(piece)
        return file.tell()


def snapshot_chunks(tensors: Mapping[str, Tensor], chunk_size: int) -> tuple[int, list[bytes]]:
    """Size of the file that `write_snapshot` would write, and the SHA-256 of each of its chunks."""
    chunks: list[bytes] = []
    current, room, size = hashlib.sha256(), chunk_size, 0
    for piece in snapshot_pieces(tensors):
        rest = memoryview(piece)
        size += len(rest)
        while rest:
            taken = rest[:room]
            current.update(taken)
            room -= len(taken)
            rest = rest[len(taken) :]
            if room == 0:
                chunks.append(current.digest())
                current, room = hashlib.sha256(), chunk_size
    if room < chunk_size:
        chunks.append(current.digest())
    return size, chunks


def snapshot_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file, in order."""
    ordered = sorted(tensors.items(), key=lambda item: (-_dtype(item[1]).itemsize, item[0]))
    yield _header(ordered)
    for _, tensor in ordered:
        dtype = _dtype(tensor)
        for piece in tensor.detach().reshape(-1).split(PIECE_ELEMENTS):
            raw: memoryview = piece.to(device="cpu", dtype=dtype).contiguous().view(torch.uint8).numpy().data
            yield raw


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        dtype = _dtype(tensor)
        end = at + tensor.numel() * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def _dtype(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
