"""A delta: what turns one version's snapshot into the next one's, bit for bit, chunk by chunk.

A file of little-endian fields: magic, size of the snapshot, its chunk size, the regions of equal element
width; then one record per chunk: size, and, unless nothing changed there, three zstd frames:

* gaps: a byte b < 255 skips b elements and changes the next; 255 skips 255 elements.
* symbols: one byte per change. 2^k - 4 + r for k = 2 to 6: the new value is the one nearest to the old with
  the lowest k bits r. 124, 125, 126, 127: the lowest 1, 2, 4, 8 bytes are among the
* rests: those bytes, all of one length together, as byte planes.

A value one rounding step away, which is what most are, so costs two bits and its position. The value nearest
to a new value with that value's low bits is itself: applying a delta twice changes nothing.
"""

import json
import struct
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from protocol import limits
from protocol.chunks import Buffer, chunk_ranges

MAGIC = b"SWDELTA1"
LEVEL = 3
_HEADER = struct.Struct("<8sQII")
_REGION = struct.Struct("<QB")
_SIZE = struct.Struct("<I")
_RECORD = struct.Struct("<III")
_SKIP = 255
_SMALL_BITS = (2, 3, 4, 5, 6)
_REST_BYTES = (1, 2, 4, 8)
_FIRST_REST = 124
_BITS_OF_SYMBOL = np.array(
    [bits for bits in _SMALL_BITS for _ in range(1 << bits)] + [8 * size for size in _REST_BYTES], np.uint8
)
_CLASS_LIMITS = np.array([1 << bits for bits in _SMALL_BITS] + [1 << 8, 1 << 16, 1 << 32], np.uint64)
_WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""Bytes per element by safetensors' name of the type; 1 for all others."""

Array = npt.NDArray[Any]
Region = tuple[int, int]
"""(length in bytes, bytes per element)."""


class DeltaError(ValueError):
    """A delta that cannot be made or is not well formed; the message names what is wrong."""


@dataclass(frozen=True)
class Change:
    """Changed elements of one width within one chunk."""

    width: int
    """Bytes per element."""
    offsets: npt.NDArray[np.int64]
    """Where they begin, in bytes from the start of the snapshot, ascending."""
    low: Array
    """The lowest `bits` bits of each new value, as unsigned integers of `width` bytes."""
    bits: Array
    """How many bits of each are given; as many as the element has: the whole value."""

    def values(self, current: Array) -> Array:
        """The new values, given the elements as they are: the parent's, or already the new ones."""
        kind = np.dtype(f"<u{self.width}")
        one = kind.type(1)
        half = np.left_shift(one, (self.bits - 1).astype(kind))
        mask = half - one + half
        step = (self.low - current) & mask
        result: Array = current + step - ((step & half) << one)
        return result


def encode_delta(parent: Buffer, new: Buffer, chunk_size: int, threads: int = 2) -> Iterator[bytes]:
    """The pieces of the delta file that turns `parent` into `new`, in order.

    Both are safetensors files with the same header. Raises `DeltaError` when they are not.
    """
    regions = _regions(parent, new)
    yield _HEADER.pack(MAGIC, len(new), chunk_size, len(regions)) + b"".join(
        _REGION.pack(*region) for region in regions
    )
    layout = _Layout(regions)

    def record(start: int, end: int) -> bytes:
        return _encode_record(layout, parent[start:end], new[start:end], start, end)

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


class DeltaFile:
    """A delta file, open for reading. Any thread may call; a record costs memory in proportion to its chunk.

    Raises `DeltaError` at once when sizes contradict each other, or from a method when a record is bad.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = data
        if len(data) < _HEADER.size:
            raise DeltaError(f"{len(data)} bytes is too short for a delta")
        magic, self.snapshot_size, self.chunk_size, count = _HEADER.unpack(data[: _HEADER.size])
        if magic != MAGIC:
            raise DeltaError("this is no delta, or one of another format")
        if not 1 <= self.chunk_size <= limits.MAX_CHUNK_BYTES:
            raise DeltaError(f"chunks of {self.chunk_size} bytes, the limit is {limits.MAX_CHUNK_BYTES}")
        self.chunk_count = -(-self.snapshot_size // self.chunk_size)
        if self.chunk_count > limits.MAX_CHUNKS:
            raise DeltaError(f"{self.chunk_count} chunks, the limit is {limits.MAX_CHUNKS}")
        at = _HEADER.size + count * _REGION.size
        if count > limits.MAX_DELTA_REGIONS or at + _SIZE.size * self.chunk_count > len(data):
            raise DeltaError("the delta ends too early")
        self._layout = _Layout(list(_REGION.iter_unpack(data[_HEADER.size : at])))
        if self._layout.size != self.snapshot_size:
            raise DeltaError(f"regions of {self._layout.size} bytes in a snapshot of {self.snapshot_size}")
        self._records: list[tuple[int, int]] = []
        for _ in range(self.chunk_count):
            if at + _SIZE.size > len(data):
                raise DeltaError("the delta ends too early")
            (size,) = _SIZE.unpack(data[at : at + _SIZE.size])
            self._records.append((at + _SIZE.size, at + _SIZE.size + size))
            at += _SIZE.size + size
        if at != len(data):
            raise DeltaError(f"{len(data)} bytes, the records end at {at}")

    def is_changed(self, index: int) -> bool:
        """Whether anything differs within chunk `index`."""
        start, end = self._records[index]
        return end > start

    def changes(self, index: int) -> Iterator[Change]:
        """What differs within chunk `index`, by region."""
        start, end = self._span(index)
        first, last = self._records[index]
        if first == last:
            return
        segments = self._layout.segments(start, end)
        record = _decode_record(self._data[first:last], sum((e - s) // w for s, e, w in segments))
        before = 0
        for segment_start, segment_end, width in segments:
            count = (segment_end - segment_start) // width
            low, high = np.searchsorted(record.positions, (before, before + count))
            if high > low:
                bits = record.bits[low:high]
                if int(bits.max()) > 8 * width:
                    raise DeltaError(f"chunk {index}: a value of {bits.max()} bits for {width} bytes")
                yield Change(
                    width=width,
                    offsets=segment_start + (record.positions[low:high] - before) * width,
                    low=record.low[low:high].astype(f"<u{width}"),
                    bits=bits,
                )
            before += count

    def apply(self, index: int, chunk: bytearray | memoryview) -> None:
        """Overwrite what differs in `chunk`, which is chunk `index` of the parent, or already of the new
        file."""
        start, end = self._span(index)
        if len(chunk) != end - start:
            raise DeltaError(f"chunk {index} has {end - start} bytes, not {len(chunk)}")
        octets = np.frombuffer(chunk, np.uint8)
        for change in self.changes(index):
            first = int(change.offsets[0] - start) % change.width
            whole = (len(octets) - first) // change.width * change.width
            elements = octets[first : first + whole].view(f"<u{change.width}")
            at = (change.offsets - start - first) // change.width
            elements[at] = change.values(elements[at])

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.chunk_count:
            raise DeltaError(f"chunk {index} of {self.chunk_count}")
        start = index * self.chunk_size
        return start, min(start + self.chunk_size, self.snapshot_size)


class _Layout:
    """Where in a file elements of which width lie."""

    def __init__(self, regions: list[Region]) -> None:
        for length, width in regions:
            if width not in _REST_BYTES or length <= 0 or length % width:
                raise DeltaError(f"a region of {length} bytes in elements of {width}")
        self._widths = [width for _, width in regions]
        self._ends = list(accumulate(length for length, _ in regions))
        self.size = self._ends[-1] if self._ends else 0

    def segments(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(start, end, width) of the runs of whole elements that make up [start, end); an element that is cut
        by its border counts as single bytes."""
        found = []
        index = bisect_right(self._ends, start)
        while start < end:
            width, border = self._widths[index], min(self._ends[index], end)
            # Regions consist of whole elements, so alignment can be told from either of its ends.
            head = min(start + (self._ends[index] - start) % width, border)
            tail = max(border - (width - (self._ends[index] - border)) % width, head)
            for first, last, size in ((start, head, 1), (head, tail, width), (tail, border, 1)):
                if last > first:
                    found.append((first, last, size))
            start, index = border, index + 1
        return found


@dataclass(frozen=True)
class _Record:
    positions: npt.NDArray[np.int64]
    low: npt.NDArray[np.uint64]
    bits: npt.NDArray[np.uint8]


def _regions(parent: Buffer, new: Buffer) -> list[Region]:
    """Regions of two safetensors files that differ in values only."""
    if len(parent) != len(new):
        raise DeltaError(f"the parent has {len(parent)} bytes, the new version {len(new)}")
    if len(new) < 8:
        raise DeltaError(f"{len(new)} bytes is too short for a safetensors file")
    (header_size,) = struct.unpack("<Q", new[:8])
    data_start = 8 + header_size
    if header_size > limits.MAX_SAFETENSORS_HEADER_BYTES or data_start > len(new):
        raise DeltaError(f"a safetensors header of {header_size} bytes in a file of {len(new)}")
    if parent[:data_start] != new[:data_start]:
        raise DeltaError("the parent has other tensors than the new version")
    try:
        header = json.loads(bytes(new[8:data_start]))
        spans = sorted(
            (*entry["data_offsets"], _WIDTHS.get(entry["dtype"], 1))
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeltaError(f"bad safetensors header: {error}") from error
    regions = [(data_start, 1)]
    at = 0
    for begin, end, width in spans:
        if not (isinstance(begin, int) and isinstance(end, int) and at <= begin <= end):
            raise DeltaError("tensors overlap")
        if (end - begin) % width:
            raise DeltaError(f"a tensor of {end - begin} bytes in elements of {width}")
        regions += [(begin - at, 1), (end - begin, width)]
        at = end
    regions.append((len(new) - data_start - at, 1))
    if regions[-1][0] < 0:
        raise DeltaError("a tensor lies outside the file")
    merged: list[Region] = []
    for length, width in regions:
        if length and merged and merged[-1][1] == width:
            merged[-1] = (merged[-1][0] + length, width)
        elif length:
            merged.append((length, width))
    if len(merged) > limits.MAX_DELTA_REGIONS:
        raise DeltaError(f"{len(merged)} changes of element width, the limit is {limits.MAX_DELTA_REGIONS}")
    return merged


def _encode_record(
    layout: _Layout, parent: bytes | memoryview, new: bytes | memoryview, start: int, end: int
) -> bytes:
    """The record of the chunk [start, end), its size before it."""
    positions: list[Array] = []
    values: list[npt.NDArray[np.uint64]] = []
    classes: list[npt.NDArray[np.int64]] = []
    before = 0
    for first, last, width in layout.segments(start, end):
        kind = np.dtype(f"<u{width}")
        old_values = np.frombuffer(parent[first - start : last - start], kind)
        new_values = np.frombuffer(new[first - start : last - start], kind)
        at = np.flatnonzero(old_values != new_values)
        if len(at):
            positions.append(at + before)
            values.append(new_values[at].astype(np.uint64))
            classes.append(_classes(old_values[at], new_values[at]))
        before += len(new_values)
    if not positions:
        return _SIZE.pack(0)
    gaps = _gap_bytes(np.concatenate(positions))
    symbols, rests = _symbols(np.concatenate(values), np.concatenate(classes))
    gap_frame, symbol_frame = _compress(gaps), _compress(symbols)
    payload = b"".join(
        (
            _RECORD.pack(len(gaps), len(gap_frame), len(symbol_frame)),
            gap_frame,
            symbol_frame,
            _compress(rests) if rests else b"",
        )
    )
    return _SIZE.pack(len(payload)) + payload


def _decode_record(payload: bytes | memoryview, elements: int) -> _Record:
    if len(payload) < _RECORD.size:
        raise DeltaError("a record ends too early")
    gap_count, gap_size, symbol_size = _RECORD.unpack(payload[: _RECORD.size])
    symbols_at = _RECORD.size + gap_size
    rests_at = symbols_at + symbol_size
    if rests_at > len(payload):
        raise DeltaError("a record ends too early")
    if not 1 <= gap_count <= elements:
        raise DeltaError(f"{gap_count} gaps in a chunk of {elements} elements")
    gaps = _decompress(payload[_RECORD.size : symbols_at], gap_count)
    changed = gaps != _SKIP
    ends = np.cumsum(gaps + changed, dtype=np.int64)
    if not changed[-1] or ends[-1] > elements:
        raise DeltaError("a change lies outside its chunk")
    positions = ends[changed] - 1
    symbols = _decompress(payload[symbols_at:rests_at], len(positions))
    if int(symbols.max()) >= len(_BITS_OF_SYMBOL):
        raise DeltaError(f"symbol {symbols.max()} has no meaning")
    bits = _BITS_OF_SYMBOL[symbols]
    low = symbols.astype(np.uint64) + np.uint64(4) - (np.uint64(1) << bits.astype(np.uint64))
    where = [np.flatnonzero(symbols == _FIRST_REST + index) for index in range(len(_REST_BYTES))]
    total = sum(len(at) * size for at, size in zip(where, _REST_BYTES, strict=True))
    if total == 0 and rests_at != len(payload):
        raise DeltaError(f"{len(payload) - rests_at} bytes after the end of a record")
    if total:
        rests = _decompress(payload[rests_at:], total)
        begin = 0
        for at, size in zip(where, _REST_BYTES, strict=True):
            planes = rests[begin : begin + len(at) * size].reshape(size, len(at))
            low[at] = np.ascontiguousarray(planes.T).view(f"<u{size}").reshape(-1)
            begin += len(at) * size
    return _Record(positions, low, bits)


def _gap_bytes(positions: npt.NDArray[np.int64]) -> bytes:
    """Ascending positions as bytes that say how far each lies from the one before."""
    skipped = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(skipped // _SKIP + 1)
    gaps = np.full(int(ends[-1]), _SKIP, np.uint8)
    gaps[ends - 1] = skipped % _SKIP
    return gaps.tobytes()


def _classes(old: Array, new: Array) -> npt.NDArray[np.int64]:
    """For each value the smallest of the bit counts that tell it from its neighbours, as an index."""
    signed = (new - old).view(f"<i{old.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * old.itemsize - 1))
    return np.searchsorted(_CLASS_LIMITS, zigzag.view(old.dtype).astype(np.uint64), side="right")


def _symbols(values: npt.NDArray[np.uint64], classes: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """The symbols of new values, and the bytes that do not fit in them."""
    small = len(_SMALL_BITS)
    power = np.uint64(1) << np.minimum(classes + _SMALL_BITS[0], _SMALL_BITS[-1]).astype(np.uint64)
    symbols = power - np.uint64(4) + (values & (power - np.uint64(1)))
    symbols = np.where(classes < small, symbols, (_FIRST_REST - small + classes).astype(np.uint64))
    planes = []
    for index, size in enumerate(_REST_BYTES):
        rest = values[classes == small + index].astype(f"<u{size}")
        planes.append(rest.view(np.uint8).reshape(-1, size).T.tobytes())
    return symbols.astype(np.uint8).tobytes(), b"".join(planes)


class _Zstd(threading.local):
    """Compression contexts serve one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _compress(data: bytes) -> bytes:
    return _zstd.compressor.compress(data)


def _decompress(frame: bytes | memoryview, size: int) -> npt.NDArray[np.uint8]:
    """The content of a frame that must hold `size` bytes."""
    try:
        # The declared size is what the library allocates.
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise DeltaError(f"a frame does not hold the {size} bytes that it must")
        data = _zstd.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a damaged frame: {error}") from error
    return np.frombuffer(data, np.uint8)
