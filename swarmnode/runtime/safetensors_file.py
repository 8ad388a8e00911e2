"""Reads the header of a safetensors file without torch: enough to hash its tensors."""

import json
import mmap
import struct
from pathlib import Path

from protocol.chunks import state_hash

MAX_HEADER_BYTES = 64 * 1024 * 1024


class BadSafetensors(Exception):
    """The file is not a well-formed safetensors file."""


def file_state_hash(path: Path) -> bytes:
    """`protocol.chunks.state_hash` of the tensors in a file. Raises `BadSafetensors`."""
    with open(path, "rb") as file:
        size = path.stat().st_size
        if size < 8:
            raise BadSafetensors(f"{path}: {size} bytes is too short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (header_size,) = struct.unpack("<Q", data[:8])
            start = 8 + header_size
            if header_size > MAX_HEADER_BYTES or start > size:
                raise BadSafetensors(f"{path}: a header of {header_size} bytes in a file of {size}")
            view = memoryview(data)
            try:
                header = json.loads(data[8:start])
                tensors = []
                for name, entry in header.items():
                    if name == "__metadata__":
                        continue
                    begin, end = entry["data_offsets"]
                    if not 0 <= begin <= end <= size - start:
                        raise BadSafetensors(f"{path}: tensor {name} lies outside the file")
                    shape = tuple(int(length) for length in entry["shape"])
                    tensors.append((name, str(entry["dtype"]), shape, view[start + begin : start + end]))
                return state_hash(tensors)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise BadSafetensors(f"{path}: bad header ({error})") from error
            finally:
                tensors = []
                view.release()
