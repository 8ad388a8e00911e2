"""A delta: a file that turns one version's snapshot into the next one's, bit for bit, chunk by chunk.

Little-endian: magic (8 bytes), size of the snapshot (8), its chunk size (4), number of regions (4); per
region its length in bytes (8) and its element width (1); per chunk the size of its record (4) and the record
(`protocol.delta_record`), empty when nothing differs there. Chunks are those of the snapshot's manifest, so
applying, verifying and writing are one pass, in any order.
"""

import struct
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol import limits
from protocol.chunks import Buffer, chunk_ranges
from protocol.delta_record import (
    Array,
    ChangedElements,
    DeltaError,
    decode_record,
    encode_record,
    nearest_values,
)
from protocol.element_layout import ElementLayout, LayoutError, Region, safetensors_header, safetensors_layout

__all__ = ["Change", "DeltaError", "DeltaFile", "encode_delta"]

MAGIC = b"SWDELTA1"
_HEADER = struct.Struct("<8sQII")
_REGION = struct.Struct("<QB")
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Change:
    """N changed elements of one width, within one chunk."""

    width: int
    """Bytes per element."""
    offsets: npt.NDArray[np.int64]
    """Where they begin in the snapshot, in bytes, ascending."""
    low: Array
    """The lowest `bits` bits of the new values, as unsigned integers of `width` bytes."""
    bits: npt.NDArray[np.uint8]

    def values(self, current: Array) -> Array:
        """The new values, given the elements as they are now: the parent's, or already the new ones.

        `current` [N]: unsigned integers of `width` bytes.
        """
        return nearest_values(current, self.low, self.bits)


def encode_delta(
    parent: Buffer, new: Buffer, chunk_size: int, threads: int = 2
) -> Generator[bytes, None, None]:
    """The delta file that turns `parent` into `new`, in pieces of one chunk's record, a few ahead at most.

    Both are safetensors files with the same header. Raises `DeltaError` when they are not.
    """
    try:
        header = safetensors_header(new)
        if len(parent) != len(new) or safetensors_header(parent) != header:
            raise DeltaError("the parent has other tensors than the new version")
        layout = safetensors_layout(header, len(new))
    except LayoutError as error:
        raise DeltaError(str(error)) from error
    regions = b"".join(_REGION.pack(*region) for region in layout.regions)
    yield _HEADER.pack(MAGIC, len(new), chunk_size, len(layout.regions)) + regions

    def record(start: int, end: int) -> bytes:
        parts = _changed_elements(layout, parent[start:end], new[start:end], start, end)
        encoded = encode_record(parts) if parts else b""
        return _SIZE.pack(len(encoded)) + encoded

    with ThreadPoolExecutor(threads, "delta") as pool:
        waiting: deque[Future[bytes]] = deque()
        try:
            for start, end in chunk_ranges(len(new), chunk_size):
                waiting.append(pool.submit(record, start, end))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _changed_elements(
    layout: ElementLayout, old: bytes | memoryview, new: bytes | memoryview, start: int, end: int
) -> list[ChangedElements]:
    parts = []
    before = 0
    for segment in layout.segments(start, end):
        span, kind = slice(segment.start - start, segment.end - start), f"<u{segment.width}"
        old_values, new_values = np.frombuffer(old[span], kind), np.frombuffer(new[span], kind)
        at = np.flatnonzero(old_values != new_values)
        if len(at):
            parts.append(ChangedElements(at + before, old_values[at], new_values[at]))
        before += segment.elements
    return parts


class DeltaFile:
    """A delta file, open for reading, by any threads. Reading a record takes memory in proportion to its
    chunk.

    Raises `DeltaError` at once when its sizes contradict each other, and from a method when a record is bad.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = data
        magic, self.snapshot_size, self.chunk_size, region_count = _HEADER.unpack(self._take(0, _HEADER.size))
        if magic != MAGIC:
            raise DeltaError("this is no delta, or one of another format")
        if not 1 <= self.chunk_size <= limits.MAX_CHUNK_BYTES:
            raise DeltaError(f"chunks of {self.chunk_size} bytes, limit {limits.MAX_CHUNK_BYTES}")
        self.chunk_count: int = -(-self.snapshot_size // self.chunk_size)
        if self.chunk_count > limits.MAX_CHUNKS:
            raise DeltaError(f"{self.chunk_count} chunks, limit {limits.MAX_CHUNKS}")
        if region_count > limits.MAX_REGIONS:
            raise DeltaError(f"{region_count} regions, limit {limits.MAX_REGIONS}")
        regions = self._take(_HEADER.size, region_count * _REGION.size)
        try:
            self._layout = ElementLayout([Region(*fields) for fields in _REGION.iter_unpack(regions)])
        except LayoutError as error:
            raise DeltaError(str(error)) from error
        if self._layout.size_bytes != self.snapshot_size:
            raise DeltaError(
                f"regions of {self._layout.size_bytes} bytes in a snapshot of {self.snapshot_size}"
            )
        self._records = self._find_records(_HEADER.size + len(regions))

    def _take(self, start: int, size: int) -> bytes | memoryview:
        if start + size > len(self._data):
            raise DeltaError("the delta ends too early")
        return self._data[start : start + size]

    def _find_records(self, start: int) -> npt.NDArray[np.int64]:
        """[chunks, 2]: where each chunk's record begins and ends."""
        if start + _SIZE.size * self.chunk_count > len(self._data):
            raise DeltaError("the delta ends too early")
        records = np.empty((self.chunk_count, 2), np.int64)
        end = start
        for index in range(self.chunk_count):
            (size,) = _SIZE.unpack(self._take(end, _SIZE.size))
            records[index] = end + _SIZE.size, end + _SIZE.size + size
            end += _SIZE.size + size
        if end != len(self._data):
            raise DeltaError(f"a delta of {len(self._data)} bytes whose records end at {end}")
        return records

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.chunk_count:
            raise DeltaError(f"chunk {index} of {self.chunk_count}")
        return index * self.chunk_size, min((index + 1) * self.chunk_size, self.snapshot_size)

    def changes(self, index: int) -> Iterator[Change]:
        """What differs within chunk `index`, by runs of elements of one width."""
        start, end = self._span(index)
        record_start, record_end = self._records[index].tolist()
        if record_start == record_end:
            return
        segments = self._layout.segments(start, end)
        record = decode_record(
            self._data[record_start:record_end],
            sum(segment.elements for segment in segments),
            max(segment.width for segment in segments),
        )
        before = 0
        for segment in segments:
            low, high = np.searchsorted(record.positions, (before, before + segment.elements))
            if high > low:
                bits = record.bits[low:high]
                if int(bits.max()) > 8 * segment.width:
                    raise DeltaError(f"chunk {index}: a value of {bits.max()} bits in {segment.width} bytes")
                offsets = (
                    segment.start + (record.positions[low:high].astype(np.int64) - before) * segment.width
                )
                yield Change(segment.width, offsets, record.low[low:high].astype(f"<u{segment.width}"), bits)
            before += segment.elements

    def apply(self, index: int, chunk: bytearray | memoryview) -> None:
        """Make chunk `index` of the parent the new snapshot's, in place; that of the new one stays itself."""
        start, end = self._span(index)
        if len(chunk) != end - start:
            raise DeltaError(f"chunk {index} has {end - start} bytes, not {len(chunk)}")
        octets = np.frombuffer(chunk, np.uint8)
        for change in self.changes(index):
            first = int(change.offsets[0] - start) % change.width
            count = (len(octets) - first) // change.width
            elements = octets[first : first + count * change.width].view(f"<u{change.width}")
            at = (change.offsets - start) // change.width
            elements[at] = change.values(elements[at])
