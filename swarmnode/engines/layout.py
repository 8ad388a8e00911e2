"""Where each tensor lies in a safetensors file."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from protocol.limits import MAX_SAFETENSORS_HEADER_BYTES
from swarmnode.engines.base import LoadError


@dataclass(frozen=True)
class Placed:
    """One tensor: bytes [begin, end) of the file."""

    name: str
    dtype: str
    """As safetensors calls it: "BF16"."""
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a file in the order in which they lie there; they do not overlap."""

    size_bytes: int
    tensors: list[Placed]


def read_layout(path: Path) -> Layout:
    """Raises `LoadError`."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (header_size,) = struct.unpack("<Q", file.read(8))
            if header_size > min(MAX_SAFETENSORS_HEADER_BYTES, size - 8):
                raise LoadError(f"{path}: a header of {header_size} bytes in a file of {size}")
            header = json.loads(file.read(header_size))
        start = 8 + header_size
        tensors = [
            Placed(name, entry["dtype"], start + entry["data_offsets"][0], start + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        at = start
        for tensor in tensors:
            if not at <= tensor.begin <= tensor.end <= size:
                raise LoadError(f"{path}: tensor {tensor.name} lies outside its place")
            at = tensor.end
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} cannot be read as safetensors: {error}") from error
    return Layout(size, tensors)
