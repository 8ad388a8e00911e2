"""Deltas for nodes in other languages: from the words of the document, in plain Python, to check codecs by.

Frames are of stored blocks, which every zstd decoder reads, so that the bytes do not depend on a compressor.
"""

import json
import struct
from collections.abc import Iterable
from typing import Any

Change = tuple[int, int, int, int]
"""Index of an element within its chunk, its new value, its old value, its width in bits."""


def delta_vectors() -> Any:
    """Pairs of files and the delta between them, and the changes of each chunk."""
    words = [0x3F80, 0x0000, 0xFFFF, 0x8000, *range(0x3C00, 0x3C00 + 300)]
    small = list(words)
    small[0] += 1  # one up
    small[1] = 0xFFFF  # one down, around the end of the range
    small[2] = 1  # two up
    small[76] ^= 0x0101  # which a border of chunks of 233 bytes cuts
    small[299] -= 5
    small[300] ^= 0x0040
    large = list(words)
    large[3], large[4], large[303] = 0x0000, 0x3D01, 0x1234
    mixed = [
        ("F32", struct.pack("<3I", 0x3F800000, 5, 6)),
        ("BF16", struct.pack("<2H", 7, 8)),
        ("U8", b"\1\2\3"),
    ]
    changed = [
        ("F32", struct.pack("<3I", 0x3F800001, 5, 0x12345678)),
        ("BF16", struct.pack("<2H", 7, 0x5555)),
        ("U8", b"\1\xff\3"),
    ]
    return [
        vector("neighbours", [("BF16", pack(words))], [("BF16", pack(small))], 1024),
        vector("far values", [("BF16", pack(words))], [("BF16", pack(large))], 1024),
        vector(
            "elements cut by the borders of chunks", [("BF16", pack(words))], [("BF16", pack(small))], 233
        ),
        vector("several widths", mixed, changed, 1024),
        vector("no change", mixed, mixed, 100),
    ]


def pack(words: list[int]) -> bytes:
    return struct.pack(f"<{len(words)}H", *words)


def vector(name: str, old: list[tuple[str, bytes]], new: list[tuple[str, bytes]], chunk_size: int) -> Any:
    (parent, regions), (snapshot, _) = safetensors(old), safetensors(new)
    chunks = [
        chunk_changes(parent, snapshot, regions, start, min(start + chunk_size, len(parent)))
        for start in range(0, len(parent), chunk_size)
    ]
    head = struct.pack("<8sQII", b"SWDELTA1", len(parent), chunk_size, len(regions))
    head += b"".join(struct.pack("<QB", length, width) for length, width in regions)
    return {
        "name": name,
        "chunk_size": chunk_size,
        "parent": parent.hex(),
        "snapshot": snapshot.hex(),
        "delta": (head + b"".join(record(changes) for changes in chunks)).hex(),
        "changes": [
            [{"element": at, "value": value, "bits": width} for at, value, _, width in changes]
            for changes in chunks
        ],
    }


def safetensors(tensors: list[tuple[str, bytes]]) -> tuple[bytes, list[tuple[int, int]]]:
    """A file of tensors by (type, raw bytes), and its regions as (length, width)."""
    widths = {"F32": 4, "BF16": 2, "U8": 1}
    header: dict[str, Any] = {}
    at = 0
    for number, (dtype, raw) in enumerate(tensors):
        header[f"t{number}"] = {
            "dtype": dtype,
            "shape": [len(raw) // widths[dtype]],
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = struct.pack("<Q", len(text)) + text + b"".join(raw for _, raw in tensors)
    return file, [(8 + len(text), 1), *((len(raw), widths[dtype]) for dtype, raw in tensors)]


def chunk_changes(
    old: bytes, new: bytes, regions: list[tuple[int, int]], start: int, end: int
) -> list[Change]:
    """What differs in [start, end)."""
    changes: list[Change] = []
    element, at = 0, start
    while at < end:
        width, begin = region_at(regions, at)
        whole = at == begin and at + width <= end
        size = width if whole else 1
        before, after = old[at : at + size], new[at : at + size]
        if before != after:
            changes.append(
                (element, int.from_bytes(after, "little"), int.from_bytes(before, "little"), 8 * size)
            )
        element, at = element + 1, at + size
    return changes


def region_at(regions: list[tuple[int, int]], at: int) -> tuple[int, int]:
    """Width of the element that holds byte `at`, and where it begins."""
    begin = 0
    for length, width in regions:
        if at < begin + length:
            return width, at - (at - begin) % width
        begin += length
    raise ValueError(f"byte {at} lies behind the file")


def record(changes: list[Change]) -> bytes:
    if not changes:
        return struct.pack("<I", 0)
    gaps, symbols, position = b"", b"", 0
    rests: dict[int, list[bytes]] = {1: [], 2: [], 4: [], 8: []}
    for element, value, old, width in changes:
        skipped = element - position
        gaps += b"\xff" * (skipped // 255) + bytes([skipped % 255])
        position = element + 1
        for bits in (2, 3, 4, 5, 6, 8, 16, 32, 64):
            low = value % 2**bits
            if nearest(old, low, bits, width) == value:
                break
        if bits <= 6:
            symbols += bytes([2**bits - 4 + low])
        else:
            symbols += bytes([124 + (1, 2, 4, 8).index(bits // 8)])
            rests[bits // 8].append(low.to_bytes(bits // 8, "little"))
    planes = b"".join(
        bytes(part[plane] for part in parts) for size, parts in rests.items() for plane in range(size)
    )
    frames = [frame(gaps), frame(symbols), frame(planes) if planes else b""]
    body = struct.pack("<III", len(gaps), len(frames[0]), len(frames[1])) + b"".join(frames)
    return struct.pack("<I", len(body)) + body


def nearest(old: int, low: int, bits: int, width: int) -> int:
    """Of the values whose lowest `bits` bits are `low`, the one nearest to `old`, modulo 2 to the `width`."""
    steps: Iterable[int] = range(-(2 ** (bits - 1)), 2 ** (bits - 1)) if bits < width else [low - old]
    return next((old + step) % 2**width for step in steps if (old + step) % 2**bits == low)


def frame(content: bytes) -> bytes:
    """A zstd frame of one stored block (RFC 8878): magic, single segment with its size in one byte, block."""
    if len(content) > 255:
        raise ValueError("too long for a vector")
    block = struct.pack("<I", len(content) << 3 | 1)[:3]
    return bytes.fromhex("28b52ffd20") + bytes([len(content)]) + block + content
