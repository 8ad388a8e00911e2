"""Deterministic msgpack: one value has exactly one encoding, so that hashes and signatures mean something.

Rules: maps have distinct string keys in ascending order of their UTF-8 bytes; integers, strings, byte
strings, lists and maps take their shortest form; floats are 64-bit and finite; no extension types; nesting is
bounded. `decode` accepts exactly what `encode` produces. It reads strictly from left to right and checks
every length against the bytes that are left and the values that are allowed before it makes anything, so a
hostile message costs what its size costs.
"""

import math
import struct
from typing import Any

import msgpack

from protocol import limits
from protocol.refusals import RefusalReason, Refused


def _malformed(detail: str) -> Refused:
    return Refused(RefusalReason.MALFORMED, detail)


_PLAIN = frozenset({bytes, str, int, bool, type(None)})


def _canonical(value: Any, depth: int) -> Any:
    if depth > limits.MAX_DEPTH:
        raise _malformed(f"nested deeper than {limits.MAX_DEPTH}")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _malformed("a map key is not a string")
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise _malformed("a number is not finite")
    if isinstance(value, int | float | str | bytes):
        return value
    raise _malformed(f"cannot encode {type(value).__name__}")


def encode(value: Any) -> bytes:
    """Encode plain values (None, bool, int, float, str, bytes, list, dict with string keys).

    Raises `Refused(malformed)` for anything else, for integers outside 64 bits and for floats that are not
    finite.
    """
    try:
        packed: bytes = msgpack.packb(_canonical(value, 0), use_bin_type=True)
    except (OverflowError, ValueError) as error:
        raise _malformed(str(error)) from error
    return packed


def decode(
    data: bytes, max_bytes: int = limits.MAX_ENVELOPE_BYTES, max_values: int = limits.MAX_VALUES
) -> Any:
    """Decode `data`; refuses oversized, trailing, too deep, too numerous or non-canonical input.

    `max_values` bounds the values of the whole message: scalars, keys, lists and maps together.
    Raises `Refused` with `oversized` or `malformed`.
    """
    if len(data) > max_bytes:
        raise Refused(RefusalReason.OVERSIZED, f"{len(data)} bytes, limit {max_bytes}")
    reader = _Reader(data, max_values)
    try:
        value = reader.read(0)
    except (IndexError, struct.error) as error:
        raise _malformed("the message ends too early") from error
    except UnicodeDecodeError as error:
        raise _malformed("a string is not UTF-8") from error
    if reader.position != len(data):
        raise _malformed(f"{len(data) - reader.position} bytes after the end of the message")
    return value


# First byte -> (struct format of the number that follows, its size, smallest and largest value of this form).
_INTEGERS = {
    0xCC: (">B", 1, 2**7, 2**8 - 1),
    0xCD: (">H", 2, 2**8, 2**16 - 1),
    0xCE: (">I", 4, 2**16, 2**32 - 1),
    0xCF: (">Q", 8, 2**32, 2**64 - 1),
    0xD0: (">b", 1, -(2**7), -(2**5) - 1),
    0xD1: (">h", 2, -(2**15), -(2**7) - 1),
    0xD2: (">i", 4, -(2**31), -(2**15) - 1),
    0xD3: (">q", 8, -(2**63), -(2**31) - 1),
}
_STRING, _BYTES, _LIST, _MAP = "string", "byte string", "list", "map"
# First byte -> (what, struct format of the length, its size, smallest length that needs this form).
_LENGTHS = {
    0xD9: (_STRING, ">B", 1, 32),
    0xDA: (_STRING, ">H", 2, 2**8),
    0xDB: (_STRING, ">I", 4, 2**16),
    0xC4: (_BYTES, ">B", 1, 0),
    0xC5: (_BYTES, ">H", 2, 2**8),
    0xC6: (_BYTES, ">I", 4, 2**16),
    0xDC: (_LIST, ">H", 2, 16),
    0xDD: (_LIST, ">I", 4, 2**16),
    0xDE: (_MAP, ">H", 2, 16),
    0xDF: (_MAP, ">I", 4, 2**16),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Reader:
    """One pass over a message. `values_left` falls by the length of a list or map before its items are
    read."""

    def __init__(self, data: bytes, max_values: int) -> None:
        self._data = data
        self.position = 0
        self._values_left = max_values - 1

    def read(self, depth: int) -> Any:
        """The value at `position`, which lies inside `depth` lists and maps."""
        if depth > limits.MAX_DEPTH:
            raise _malformed(f"nested deeper than {limits.MAX_DEPTH}")
        first = self._data[self.position]
        self.position += 1
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self._map(first & 0x0F, depth)
        if first < 0xA0:
            return self._list(first & 0x0F, depth)
        if first < 0xC0:
            return self._take(first & 0x1F).decode()
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first == 0xCB:
            return self._float()
        if first in _INTEGERS:
            return self._integer(first)
        if first in _LENGTHS:
            return self._sized(first, depth)
        raise _malformed(f"type 0x{first:02x} is not used (32-bit floats and extensions are not)")

    def _number(self, layout: str, size: int) -> Any:
        (number,) = struct.unpack_from(layout, self._data, self.position)
        self.position += size
        return number

    def _integer(self, first: int) -> int:
        layout, size, smallest, largest = _INTEGERS[first]
        number: int = self._number(layout, size)
        if not smallest <= number <= largest:
            raise _malformed("an integer is not in its shortest form")
        return number

    def _float(self) -> float:
        number: float = self._number(">d", 8)
        if not math.isfinite(number):
            raise _malformed("a number is not finite")
        return number

    def _sized(self, first: int, depth: int) -> Any:
        what, layout, size, smallest = _LENGTHS[first]
        length: int = self._number(layout, size)
        if length < smallest:
            raise _malformed(f"the length of a {what} is not in its shortest form")
        if what is _LIST:
            return self._list(length, depth)
        if what is _MAP:
            return self._map(length, depth)
        taken = self._take(length)
        return taken if what is _BYTES else taken.decode()

    def _take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._data):
            raise _malformed("the message ends too early")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _reserve(self, count: int) -> None:
        self._values_left -= count
        if self._values_left < 0:
            raise _malformed("more values than a message may have")
        if count > len(self._data) - self.position:
            raise _malformed("the message ends too early")

    def _list(self, length: int, depth: int) -> list[Any]:
        self._reserve(length)
        return [self.read(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, Any]:
        self._reserve(2 * length)
        result: dict[str, Any] = {}
        previous: str | None = None
        for _ in range(length):
            key = self.read(depth + 1)
            if not isinstance(key, str):
                raise _malformed("a map key is not a string")
            if previous is not None and key <= previous:
                raise _malformed("map keys are not distinct and ascending")
            previous = key
            result[key] = self.read(depth + 1)
        return result
