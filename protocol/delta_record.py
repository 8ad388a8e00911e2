"""One record of a delta: which elements of a chunk changed, and their new values, in about two bytes each.

A record is the sizes of three zstd frames, and the frames:

* gaps: a byte b < 255 skips b elements and changes the next; 255 skips 255 elements.
* symbols: one byte per change. 2^k - 4 + r, for k = 2 to 6: the new value is the one nearest to the old whose
  lowest k bits are r. 124, 125, 126, 127: the lowest 1, 2, 4, 8 bytes of it are among the
* rests: those bytes, all of one length together, as byte planes. The frame is absent when there are none.

Most values move to a neighbour, which takes two bits beyond the position. The value nearest to the new value
with the new value's low bits is itself: applying a record twice changes nothing.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

LEVEL = 1
"""Of zstd. Hardly anything repeats here, so higher ones cost time and gain 4 % at most."""

Array = npt.NDArray[Any]

_SIZES = struct.Struct("<III")
_SKIP = 255
_SMALL_BITS = (2, 3, 4, 5, 6)
_REST_BYTES = (1, 2, 4, 8)
_FIRST_REST = 124
_BITS_OF_SYMBOL = np.array(
    [bits for bits in _SMALL_BITS for _ in range(1 << bits)] + [8 * size for size in _REST_BYTES], np.uint8
)
_LOW_OF_SYMBOL = np.array(
    [low for bits in _SMALL_BITS for low in range(1 << bits)] + [0] * len(_REST_BYTES), np.uint8
)
# By class of change: one for each of _SMALL_BITS, then one for each of _REST_BYTES.
_FIRST_SYMBOL = np.array(
    [(1 << bits) - 4 for bits in _SMALL_BITS] + [_FIRST_REST + index for index in range(len(_REST_BYTES))],
    np.uint8,
)
_MASK_IN_SYMBOL = np.array([(1 << bits) - 1 for bits in _SMALL_BITS] + [0] * len(_REST_BYTES), np.uint8)


class DeltaError(ValueError):
    """A delta that cannot be made or is not well formed; the message names what is wrong."""


@dataclass(frozen=True)
class Record:
    """N changed elements of a chunk."""

    positions: npt.NDArray[np.int32]
    """Ascending indices of elements."""
    low: Array
    """The lowest `bits` bits of the new values, as unsigned integers of the chunk's widest elements."""
    bits: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one width that differ: ascending indices in the chunk, unsigned values before and after."""

    positions: Array
    old: Array
    new: Array


def encode_record(parts: list[ChangedElements]) -> bytes:
    """The record of a chunk's changes: at least one, positions ascending through all parts."""
    widest = max(part.new.itemsize for part in parts)
    values = np.concatenate([part.new.astype(f"<u{widest}") for part in parts])
    classes = np.concatenate([_classes(part.old, part.new) for part in parts])
    gaps = _gaps(np.concatenate([part.positions for part in parts]).astype(np.int32))
    symbols, rests = _symbols(values, classes)
    # A compressor serves one thread at a time, and a new one costs little beside a chunk.
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    gap_frame, symbol_frame = compress(gaps), compress(symbols)
    sizes = _SIZES.pack(len(gaps), len(gap_frame), len(symbol_frame))
    return b"".join((sizes, gap_frame, symbol_frame, compress(rests) if rests else b""))


def decode_record(payload: bytes | memoryview, elements: int, width: int) -> Record:
    """The changes of a chunk of `elements` elements, the widest of `width` bytes. Raises `DeltaError`.

    Takes memory in proportion to `elements`, whatever the record says.
    """
    if len(payload) < _SIZES.size:
        raise DeltaError("a record ends too early")
    gap_count, gap_size, symbol_size = _SIZES.unpack(payload[: _SIZES.size])
    symbols_at = _SIZES.size + gap_size
    rests_at = symbols_at + symbol_size
    if rests_at > len(payload):
        raise DeltaError("a record ends too early")
    if not 1 <= gap_count <= elements:
        raise DeltaError(f"{gap_count} gaps in a chunk of {elements} elements")
    decompressor = zstandard.ZstdDecompressor()
    gaps = _decompress(decompressor, payload[_SIZES.size : symbols_at], gap_count)
    positions = _positions(gaps, elements)
    symbols = _decompress(decompressor, payload[symbols_at:rests_at], len(positions))
    if int(symbols.max()) >= len(_BITS_OF_SYMBOL):
        raise DeltaError(f"symbol {symbols.max()} has no meaning")
    low = _LOW_OF_SYMBOL[symbols].astype(f"<u{width}")
    large = np.flatnonzero(symbols >= _FIRST_REST)
    if len(large):
        size = _rest_size(symbols[large], width)
        rests = _decompress(decompressor, payload[rests_at:], size)
        _put_rests(low, symbols, large, rests)
    elif rests_at != len(payload):
        raise DeltaError(f"{len(payload) - rests_at} bytes after the end of a record")
    return Record(positions, low, _BITS_OF_SYMBOL[symbols])


def nearest_values(current: Array, low: Array, bits: Array) -> Array:
    """Of each unsigned `current` value, the nearest value whose lowest `bits` bits are `low`: all of one
    width."""
    kind = current.dtype.type
    half = np.left_shift(kind(1), (bits - np.uint8(1)).astype(kind))
    up = (low - current) & (half - kind(1) + half)
    # From half the period on, the nearest one lies below. All arithmetic is modulo 2 to the width.
    result: Array = current + up - ((up & half) << kind(1))
    return result


def _gaps(positions: npt.NDArray[np.int32]) -> bytes:
    skipped = np.diff(positions, prepend=np.int32(-1)) - np.int32(1)
    full, rest = np.divmod(skipped, np.int32(_SKIP))
    ends = np.cumsum(full + np.int32(1), dtype=np.int32)
    gaps = np.full(int(ends[-1]), _SKIP, np.uint8)
    gaps[ends - 1] = rest
    return gaps.tobytes()


def _positions(gaps: npt.NDArray[np.uint8], elements: int) -> npt.NDArray[np.int32]:
    changed = gaps != _SKIP
    # At most 255 times the largest chunk: that fits.
    ends = np.cumsum(gaps + changed, dtype=np.int32)
    if not changed[-1] or ends[-1] > elements:
        raise DeltaError("a change lies outside its chunk")
    positions: npt.NDArray[np.int32] = ends[changed] - np.int32(1)
    return positions


def _classes(old: Array, new: Array) -> npt.NDArray[np.uint8]:
    """Which of the bit counts (2 to 6, 8, 16, 32, 64) is the first that tells each new value apart, given the
    old."""
    bits = 8 * old.itemsize
    step = (new - old).view(f"<i{old.itemsize}")
    zigzag = ((step << 1) ^ (step >> (bits - 1))).view(old.dtype)
    classes = np.zeros(len(old), np.uint8)
    for count in (*_SMALL_BITS, 8, 16, 32):
        if count < bits:
            classes += zigzag >> count != 0
    return classes


def _symbols(values: Array, classes: npt.NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """The symbols of new values, and the bytes that do not fit in them."""
    symbols = _FIRST_SYMBOL[classes] + (values.astype(np.uint8) & _MASK_IN_SYMBOL[classes])
    planes = []
    for index, size in enumerate(_REST_BYTES):
        rest = values[classes == len(_SMALL_BITS) + index].astype(f"<u{size}")
        planes.append(rest.view(np.uint8).reshape(-1, size).T.tobytes())
    return symbols.tobytes(), b"".join(planes)


def _rest_size(symbols: npt.NDArray[np.uint8], width: int) -> int:
    """Bytes that the values of these symbols, all of them 124 to 127, take among the rests."""
    counts = np.bincount(symbols - np.uint8(_FIRST_REST), minlength=len(_REST_BYTES)).tolist()
    if any(count and size > width for count, size in zip(counts, _REST_BYTES, strict=True)):
        raise DeltaError(f"a value of more than {width} bytes")
    return sum(count * size for count, size in zip(counts, _REST_BYTES, strict=True))


def _put_rests(
    low: Array, symbols: npt.NDArray[np.uint8], large: Array, rests: npt.NDArray[np.uint8]
) -> None:
    """Fill in the values that are not in their symbols, which stand at `large`."""
    begin = 0
    for index, size in enumerate(_REST_BYTES):
        at = large[symbols[large] == _FIRST_REST + index]
        end = begin + len(at) * size
        low[at] = np.ascontiguousarray(rests[begin:end].reshape(size, -1).T).view(f"<u{size}").reshape(-1)
        begin = end


def _decompress(
    decompressor: zstandard.ZstdDecompressor, frame: bytes | memoryview, size: int
) -> npt.NDArray[np.uint8]:
    """The content of one frame, which must be `size` bytes."""
    try:
        # The library allocates the size that a frame declares, so this is looked at first.
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != size:
            raise DeltaError(f"a frame declares {declared} bytes where {size} are due")
        data = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a damaged frame: {error}") from error
    return np.frombuffer(data, np.uint8)
