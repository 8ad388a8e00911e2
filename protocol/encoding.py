"""Deterministic msgpack: one value has exactly one encoding, so that hashes and signatures mean something.

Rules: maps have string keys in ascending order; integers take their shortest form; floats are 64-bit; no extension
types; nesting and sizes are bounded. `decode` refuses bytes that `encode` would not have produced.
"""

from typing import Any

import msgpack

from protocol import limits
from protocol.refusals import RefusalReason, Refused


def _canonical(value: Any, depth: int) -> Any:
    if depth > limits.MAX_DEPTH:
        raise Refused(RefusalReason.MALFORMED, f"nested deeper than {limits.MAX_DEPTH}")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise Refused(RefusalReason.MALFORMED, "a map key is not a string")
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise Refused(RefusalReason.MALFORMED, f"cannot encode {type(value).__name__}")


def encode(value: Any) -> bytes:
    """Encode plain values (None, bool, int, float, str, bytes, list, dict with string keys).

    Raises `Refused(malformed)` for anything else, and for integers outside 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(_canonical(value, 0), use_bin_type=True)
    except (OverflowError, ValueError) as error:
        raise Refused(RefusalReason.MALFORMED, str(error)) from error
    return packed


def decode(data: bytes, max_bytes: int = limits.MAX_ENVELOPE_BYTES) -> Any:
    """Decode `data`; refuses oversized, trailing, too deep or non-canonical input.

    Raises `Refused` with `oversized` or `malformed`.
    """
    if len(data) > max_bytes:
        raise Refused(RefusalReason.OVERSIZED, f"{len(data)} bytes, limit {max_bytes}")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_buffer_size=max_bytes,
            max_str_len=min(max_bytes, limits.MAX_TEXT_CHARS * 4),
            max_bin_len=max_bytes,
            max_array_len=limits.MAX_ITEMS,
            max_map_len=limits.MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Refused(RefusalReason.MALFORMED, f"not msgpack: {error}") from error
    try:
        again = encode(value)
    except RecursionError as error:
        raise Refused(RefusalReason.MALFORMED, "nested too deep") from error
    if again != data:
        raise Refused(RefusalReason.MALFORMED, "not in the canonical encoding")
    return value
