"""One value, one encoding: exact bytes, what is refused, and what hostile bytes cost."""

import contextlib
import math
import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.encoding import decode, encode
from protocol.refusals import RefusalReason, Refused

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=300)
    | st.binary(max_size=300)
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=40)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(KEYS, inner, max_size=20),
    max_leaves=40,
).filter(lambda value: depth_of(value) <= limits.MAX_DEPTH)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def refusal(data: bytes, **bounds: int) -> RefusalReason:
    with pytest.raises(Refused) as caught:
        decode(data, **bounds)
    return caught.value.reason


@given(VALUES)
def test_what_is_encoded_is_decoded_to_the_same_value(value: object) -> None:
    decoded = decode(encode(value))
    assert decoded == value
    assert encode(decoded) == encode(value)


@given(VALUES)
def test_any_msgpack_reader_can_read_the_encoding(value: object) -> None:
    assert msgpack.unpackb(encode(value), raw=False) == value


@given(st.binary(max_size=200) | VALUES.map(lambda value: msgpack.packb(value)))
def test_only_the_canonical_encoding_is_accepted(data: bytes) -> None:
    try:
        value = decode(data)
    except Refused as refused:
        assert refused.reason is RefusalReason.MALFORMED
    else:
        assert encode(value) == data


@given(VALUES, st.data())
def test_no_damaged_byte_raises_anything_but_a_refusal(value: object, data: st.DataObject) -> None:
    damaged = bytearray(encode(value))
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Refused):
        decode(bytes(damaged))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "c0"),
        (False, "c2"),
        (True, "c3"),
        (0, "00"),
        (127, "7f"),
        (128, "cc80"),
        (256, "cd0100"),
        (65536, "ce00010000"),
        (2**32, "cf0000000100000000"),
        (2**64 - 1, "cfffffffffffffffff"),
        (-1, "ff"),
        (-32, "e0"),
        (-33, "d0df"),
        (-129, "d1ff7f"),
        (-32769, "d2ffff7fff"),
        (-(2**31) - 1, "d3ffffffff7fffffff"),
        (0.5, "cb3fe0000000000000"),
        (-0.0, "cb8000000000000000"),
        ("é", "a2c3a9"),
        (b"", "c400"),
        (b"ab", "c4026162"),
        ([1, [2]], "92019102"),
        ((1,), "9101"),
        ({"b": 1, "a": None}, "82a161c0a16201"),
        ("x" * 32, "d920" + "78" * 32),
        (b"x" * 256, "c50100" + "78" * 256),
        ([None] * 16, "dc0010" + "c0" * 16),
    ],
)
def test_exact_encodings(value: object, expected: str) -> None:
    assert encode(value).hex() == expected
    assert encode(decode(bytes.fromhex(expected))).hex() == expected


@pytest.mark.parametrize(
    "hexed",
    [
        "cc7f",  # 127 in two bytes
        "cd00ff",
        "ce0000ffff",
        "cf00000000ffffffff",
        "d0e0",  # -32 in two bytes
        "d001",  # a positive number in a signed form
        "d1ff80",
        "d2ffff8000",
        "d3ffffffff80000000",
        "d90161",  # a short string with a long length
        "da000161",
        "db0000000161",
        "c5000161",
        "c60000000161",
        "dc000101",
        "dd0000000101",
        "de0001a16101",
        "df00000001a16101",
        "ca3f000000",  # a 32-bit float
        "82a16201a16101",  # keys out of order
        "82a16101a16101",  # a key twice
        "8101c0",  # an integer key
        "81c40161c0",  # a bytes key
        "81c0c0",
        "d40100",  # extension types
        "c7000a",
        "d6ff00000000",  # a timestamp
        "c1",  # never used
        "cb7ff8000000000000",  # NaN
        "cb7ff0000000000000",  # infinity
        "cbfff0000000000000",
        "a1ff",  # not UTF-8
        "a3eda080",  # a lone surrogate
        "",  # nothing
        "0000",  # something after the end
        "92",  # too short
        "9201",
        "81a161",
        "cd01",
        "a261",
        "c40261",
        "cb00",
    ],
)
def test_other_encodings_are_malformed(hexed: str) -> None:
    assert refusal(bytes.fromhex(hexed)) is RefusalReason.MALFORMED


@pytest.mark.parametrize(
    "value",
    [
        {1: 2},
        {b"a": 1},
        {None: 1},
        {1, 2},
        object(),
        bytearray(b"a"),
        2**64,
        -(2**63) - 1,
        "\ud800",
        1j,
        math.nan,
        math.inf,
        -math.inf,
    ],
)
def test_what_has_no_encoding_is_refused(value: object) -> None:
    with pytest.raises(Refused) as caught:
        encode(value)
    assert caught.value.reason is RefusalReason.MALFORMED


def test_depth_is_bounded_on_both_sides() -> None:
    deepest: object = 1
    for _ in range(limits.MAX_DEPTH):
        deepest = [deepest]
    assert decode(encode(deepest)) == deepest
    with pytest.raises(Refused):
        encode([deepest])
    with pytest.raises(Refused):
        encode({"a": deepest})
    assert refusal(b"\x91" + encode(deepest)) is RefusalReason.MALFORMED
    assert refusal(b"\x91" * 100_000 + b"\x00") is RefusalReason.MALFORMED
    assert refusal(b"\x81\xa1a" * 100_000 + b"\x00") is RefusalReason.MALFORMED


def test_a_value_inside_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Refused):
        encode(loop)


def test_size_is_checked_first() -> None:
    assert refusal(b"\xc1" * 11, max_bytes=10) is RefusalReason.OVERSIZED
    assert decode(encode(b"12345678"), max_bytes=10) == b"12345678"
    assert refusal(bytes(limits.MAX_ENVELOPE_BYTES + 1)) is RefusalReason.OVERSIZED


def test_the_number_of_values_is_bounded_over_the_whole_message() -> None:
    nested = [[1, 2], {"a": 3}]  # the list, a list of two, a map, its key and its value: seven
    assert decode(encode(nested), max_values=7) == nested
    assert refusal(encode(nested), max_values=6) is RefusalReason.MALFORMED
    many = b"\xdd" + struct.pack(">I", limits.MAX_VALUES) + b"\x80" * limits.MAX_VALUES
    assert refusal(many) is RefusalReason.MALFORMED


@pytest.mark.parametrize("first", [0xC6, 0xDB, 0xDD, 0xDF])
@pytest.mark.parametrize("claim", [2**16, 150_000, 2**31, 2**32 - 1])
def test_a_length_prefix_allocates_nothing(first: int, claim: int) -> None:
    data = bytes([first]) + struct.pack(">I", claim) + b"\x00" * 100
    # The same claim again and again, each inside the one before, as far as nesting goes.
    for hostile in (data, b"\x91" * 11 + data, (bytes([first]) + struct.pack(">I", claim)) * 11 + data):
        tracemalloc.start()
        try:
            assert refusal(hostile) is RefusalReason.MALFORMED
            assert tracemalloc.get_traced_memory()[1] < 50_000
        finally:
            tracemalloc.stop()


def test_the_largest_hostile_message_costs_little_memory() -> None:
    hostile = b"\xdd" + struct.pack(">I", limits.MAX_VALUES - 1) + b"\x80" * (limits.MAX_VALUES - 1)
    tracemalloc.start()
    try:
        decode(hostile)
        assert tracemalloc.get_traced_memory()[1] < 40 * 1024 * 1024
    finally:
        tracemalloc.stop()
