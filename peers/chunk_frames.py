"""The messages of a chunk session: one byte that says what it is, then numbers of 4 bytes, big-endian.

    opening   an envelope of kind `chunk_session`      downloader, first
    holdings  flags, load, bit map of what is held     both
    have      load, indices of what came since         both
    want      indices; ANY: one of the other's choice  downloader
    spare     indices wanted if there is nothing else  downloader
    cancel    indices no longer wanted                 downloader
    piece     load, index, offset, bytes of the chunk  server
    lack      indices (or ANY) that will not come      server
    refusal   an envelope of kind `refusal`            server, last

The load, 2 bytes, is how many chunks others and this downloader have asked for that have not begun to go out.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
"""One truth value per chunk of a file."""

OPENING, HOLDINGS, HAVE, WANT, SPARE, CANCEL, PIECE, LACK, REFUSAL = range(1, 10)

ANY = 0xFFFFFFFF
"""In place of an index: whichever chunk the server would give first."""

GIVING = 1
"""Flag of `holdings`: the sender has chunks that nobody else has; ask it for ANY, so that no two ask for the
same."""

MAX_INDICES = 1024
"""In one message; more news than that are told as a new bit map."""

MAX_MESSAGE_BYTES = 72 * 1024
"""A piece of 64 KiB, or a bit map of `MAX_CHUNKS`, with room to spare."""

MAX_LOAD = 0xFFFF

_PIECE_HEAD = struct.Struct("!BHII")
_HAVE_HEAD = struct.Struct("!BH")
_HOLDINGS_HEAD = struct.Struct("!BBH")
PIECE_HEAD_BYTES = _PIECE_HEAD.size


class BadFrame(Exception):
    """Bytes that are no message of a chunk session."""


@dataclass(frozen=True)
class Indices:
    """`want`, `spare`, `cancel` or `lack`."""

    kind: int
    indices: Sequence[int]


@dataclass(frozen=True)
class Have:
    indices: Sequence[int]
    load: int


@dataclass(frozen=True)
class Holdings:
    held: Mask
    giving: bool
    load: int


@dataclass(frozen=True)
class Piece:
    index: int
    offset: int
    data: memoryview
    load: int


@dataclass(frozen=True)
class Sealed:
    """`opening` or `refusal`: a signed envelope, not checked yet."""

    kind: int
    envelope: bytes


Frame = Indices | Have | Holdings | Piece | Sealed


def encode_indices(kind: int, indices: Iterable[int]) -> bytes:
    """`want`, `spare`, `cancel` or `lack` of at most `MAX_INDICES`."""
    return bytes([kind]) + np.fromiter(indices, dtype=">u4").tobytes()


def encode_have(indices: Iterable[int], load: int) -> bytes:
    """At most `MAX_INDICES`."""
    return _HAVE_HEAD.pack(HAVE, min(load, MAX_LOAD)) + np.fromiter(indices, dtype=">u4").tobytes()


def encode_holdings(held: Mask, giving: bool, load: int) -> bytes:
    """Chunk i is bit i % 8, least first, of byte i // 8."""
    head = _HOLDINGS_HEAD.pack(HOLDINGS, GIVING if giving else 0, min(load, MAX_LOAD))
    return head + np.packbits(held, bitorder="little").tobytes()


def piece_head(index: int, offset: int, load: int) -> bytes:
    """What stands before the bytes of a piece."""
    return _PIECE_HEAD.pack(PIECE, min(load, MAX_LOAD), index, offset)


def encode_sealed(kind: int, envelope: bytes) -> bytes:
    return bytes([kind]) + envelope


def decode(message: bytes | memoryview, count: int) -> Frame:
    """Read a message about a file of `count` chunks. Raises `BadFrame`."""
    kind = message[0] if len(message) else 0
    if kind == PIECE:
        if len(message) <= PIECE_HEAD_BYTES:
            raise BadFrame("a piece without bytes")
        _, load, index, offset = _PIECE_HEAD.unpack_from(message)
        if index >= count:
            raise BadFrame(f"a piece of chunk {index} of {count}")
        return Piece(index, offset, memoryview(message)[PIECE_HEAD_BYTES:], load)
    if kind in (WANT, SPARE, CANCEL, LACK):
        return Indices(kind, _indices(message, 1, count, kind != SPARE))
    if kind == HAVE:
        indices = _indices(message, _HAVE_HEAD.size, count, False)
        return Have(indices, _HAVE_HEAD.unpack_from(message)[1])
    if kind == HOLDINGS:
        return _holdings(message, count)
    if kind in (OPENING, REFUSAL):
        return Sealed(kind, bytes(message[1:]))
    raise BadFrame(f"no message begins with byte {kind}")


def _indices(message: bytes | memoryview, head_bytes: int, count: int, any_allowed: bool) -> list[int]:
    size = len(message) - head_bytes
    if size <= 0 or size % 4 or size > 4 * MAX_INDICES:
        raise BadFrame(f"a list of indices in {size} bytes")
    indices = np.frombuffer(message, dtype=">u4", offset=head_bytes)
    beyond = indices >= count
    if any_allowed:
        beyond &= indices != ANY
    if beyond.any():
        raise BadFrame(f"an index beyond the file's {count} chunks")
    found: list[int] = indices.tolist()
    return found


def _holdings(message: bytes | memoryview, count: int) -> Holdings:
    size = _HOLDINGS_HEAD.size + -(-count // 8)
    if len(message) != size:
        raise BadFrame(f"holdings of {len(message)} bytes, for {count} chunks they have {size}")
    _, flags, load = _HOLDINGS_HEAD.unpack_from(message)
    packed = np.frombuffer(message, dtype=np.uint8, offset=_HOLDINGS_HEAD.size)
    held = np.unpackbits(packed, bitorder="little")[:count].astype(np.bool_)
    return Holdings(held, bool(flags & GIVING), load)
