"""Small safetensors files and hand-made records for tests of deltas."""

import json
import struct

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I64": 8}


def safetensors(tensors: list[tuple[str, bytes]], header: dict[str, object] | None = None) -> bytes:
    """A file of one-dimensional tensors given as (dtype, raw bytes), named by their place."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number, (dtype, raw) in enumerate(tensors):
        shape = [len(raw) // WIDTH[dtype]]
        entries[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    encoded = json.dumps(entries if header is None else header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + b"".join(raw for _, raw in tensors)


def zstd_frame(content: bytes) -> bytes:
    """A frame of one stored block, by RFC 8878: magic, single segment with a size of one byte, last block."""
    assert len(content) < 256
    block = struct.pack("<I", len(content) << 3 | 1)[:3]
    return bytes.fromhex("28b52ffd20") + bytes([len(content)]) + block + content


def record(gaps: bytes, symbols: bytes, rests: bytes = b"") -> bytes:
    """A record of three streams, with its size before it."""
    frames = [zstd_frame(gaps), zstd_frame(symbols), zstd_frame(rests) if rests else b""]
    body = struct.pack("<III", len(gaps), len(frames[0]), len(frames[1])) + b"".join(frames)
    return struct.pack("<I", len(body)) + body


def delta(size: int, chunk_size: int, regions: list[tuple[int, int]], records: list[bytes]) -> bytes:
    """A delta file of records as `record` makes them."""
    return (
        struct.pack("<8sQII", b"SWDELTA1", size, chunk_size, len(regions))
        + b"".join(struct.pack("<QB", *region) for region in regions)
        + b"".join(records)
    )


UNCHANGED = struct.pack("<I", 0)
