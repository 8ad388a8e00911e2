"""Which bytes of a safetensors file belong to elements of which width, for codecs that work on raw bytes."""

import json
import struct
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from protocol import limits
from protocol.chunks import Buffer

WIDTHS = (1, 2, 4, 8)
_WIDTH_OF_DTYPE = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""By safetensors' name of the type; all others are taken as single bytes."""


class LayoutError(ValueError):
    """Bytes that are no safetensors file, or regions that do not consist of whole elements."""


class Region(NamedTuple):
    """Consecutive bytes of elements of one width."""

    length: int
    width: int


class Segment(NamedTuple):
    """Whole elements of one width, as byte offsets in the file."""

    start: int
    end: int
    width: int

    @property
    def elements(self) -> int:
        return (self.end - self.start) // self.width


class ElementLayout:
    """A file's regions, one after the other from its first byte. Raises `LayoutError`."""

    def __init__(self, regions: list[Region]) -> None:
        if len(regions) > limits.MAX_REGIONS:
            raise LayoutError(f"the element width changes {len(regions)} times, limit {limits.MAX_REGIONS}")
        for length, width in regions:
            if width not in WIDTHS or length <= 0 or length % width:
                raise LayoutError(f"a region of {length} bytes in elements of {width}")
        self.regions = regions
        self._ends = list(accumulate(length for length, _ in regions))
        self.size_bytes = self._ends[-1] if self._ends else 0

    def segments(self, start: int, end: int) -> list[Segment]:
        """The bytes [start, end) as runs of whole elements; an element that a border cuts counts as single
        bytes."""
        found = []
        index = bisect_right(self._ends, start)
        while start < end:
            width, region_end = self.regions[index].width, self._ends[index]
            border = min(region_end, end)
            # A region holds whole elements, so the distance to its end tells where they begin.
            head = min(start + (region_end - start) % width, border)
            tail = max(border - (border - region_end) % width, head)
            for segment in (Segment(start, head, 1), Segment(head, tail, width), Segment(tail, border, 1)):
                if segment.end > segment.start:
                    found.append(segment)
            start, index = border, index + 1
        return found


def safetensors_header(data: Buffer) -> bytes:
    """The header of a safetensors file: its size in eight bytes, then JSON. Raises `LayoutError`."""
    if len(data) < 8:
        raise LayoutError(f"{len(data)} bytes is too short for a safetensors file")
    (size,) = struct.unpack("<Q", data[:8])
    if size > limits.MAX_SAFETENSORS_HEADER_BYTES or 8 + size > len(data):
        raise LayoutError(f"a safetensors header of {size} bytes in a file of {len(data)}")
    return bytes(data[: 8 + size])


def safetensors_layout(header: bytes, size_bytes: int) -> ElementLayout:
    """The layout of a safetensors file of `size_bytes` with this header. Raises `LayoutError`."""
    try:
        spans = sorted(
            (*entry["data_offsets"], _WIDTH_OF_DTYPE.get(entry["dtype"], 1))
            for name, entry in json.loads(header[8:]).items()
            if name != "__metadata__"
        )
        regions = [Region(len(header), 1)]
        at = 0
        for begin, end, width in spans:
            if not at <= begin <= end:
                raise LayoutError("tensors overlap")
            if (end - begin) % width:
                raise LayoutError(f"a tensor of {end - begin} bytes in elements of {width}")
            regions += [Region(begin - at, 1), Region(end - begin, width)]
            at = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"bad safetensors header: {error}") from error
    rest = size_bytes - len(header) - at
    if rest < 0:
        raise LayoutError(f"a tensor ends {-rest} bytes after the file")
    return ElementLayout(_merged([*regions, Region(rest, 1)]))


def _merged(regions: list[Region]) -> list[Region]:
    merged: list[Region] = []
    for length, width in regions:
        if length and merged and merged[-1].width == width:
            merged[-1] = Region(merged[-1].length + length, width)
        elif length:
            merged.append(Region(length, width))
    return merged
