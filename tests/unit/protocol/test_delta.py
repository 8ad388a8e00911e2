"""A delta gives the new file bit for bit, however often it is applied, and nothing else gives anything."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.chunks import chunk_ranges
from protocol.delta import DeltaError, DeltaFile, encode_delta
from protocol.delta_record import ChangedElements, encode_record
from tests.unit.protocol.delta_parts import UNCHANGED, delta, record, safetensors, zstd_frame

BF16 = [(16, 2)]
"""Regions of eight elements of two bytes."""


def encoded(parent: bytes, new: bytes, chunk_size: int, threads: int = 2) -> bytes:
    return b"".join(encode_delta(parent, new, chunk_size, threads))


def applied(data: bytes, parent: bytes, times: int = 1) -> bytes:
    file = DeltaFile(data)
    chunks = [bytearray(parent[start:end]) for start, end in chunk_ranges(len(parent), file.chunk_size)]
    for _ in range(times):
        for index, chunk in enumerate(chunks):
            file.apply(index, chunk)
    return b"".join(chunks)


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


# The format


@pytest.mark.parametrize(
    ("gaps", "symbols", "rests", "expected"),
    [
        # Element 0 ends in 01 now: from 0x0100 that is one up. Element 2, two further, ends in 11: one down.
        (b"\x00\x01", b"\x01\x03", b"", words(0x0101, 0x0200, 0x02FF, 0x0400, 0, 0xFFFF, 0x8000, 1)),
        # Of 0x0100, 0x0102 is as near as 0x00fe: the lower is meant. Three bits, 101: 5 away or 3, so 3 down.
        (b"\x00\x01", b"\x02\x09", b"", words(0x00FE, 0x0200, 0x02FD, 0x0400, 0, 0xFFFF, 0x8000, 1)),
        # Around the ends of the range: element 4 from 0 down by one, element 5 from 0xffff up by one.
        (b"\x04\x00", b"\x03\x00", b"", words(0x0100, 0x0200, 0x0300, 0x0400, 0xFFFF, 0, 0x8000, 1)),
        # Eight bits of element 1 (0x7f from 0x0200: up), then all of elements 6 and 7, as byte planes.
        (
            b"\x01\x04\x00",
            bytes([124, 125, 125]),
            bytes.fromhex("7f" "b1c1" "b2c2"),
            words(0x0100, 0x027F, 0x0300, 0x0400, 0, 0xFFFF, 0xB2B1, 0xC2C1),
        ),
    ],
)  # fmt: skip
def test_records_written_by_hand(gaps: bytes, symbols: bytes, rests: bytes, expected: bytes) -> None:
    parent = words(0x0100, 0x0200, 0x0300, 0x0400, 0, 0xFFFF, 0x8000, 1)
    data = delta(16, 16, BF16, [record(gaps, symbols, rests)])
    assert applied(data, parent) == expected
    assert applied(data, expected) == expected


def test_a_gap_of_255_and_more_takes_more_bytes() -> None:
    parent = bytes(700)
    # 254 skipped; then 255 + 0; then 0: elements 254, 510 and 511.
    data = delta(700, 1000, [(700, 1)], [record(bytes([254, 255, 0, 0]), bytes([1, 2, 3]))])
    expected = bytearray(parent)
    expected[254], expected[510], expected[511] = 1, 0xFE, 0xFF
    assert applied(data, parent) == expected


def test_the_encoder_writes_what_a_hand_would() -> None:
    positions, old = np.array([254, 510, 511, 512]), np.zeros(4, np.uint16)
    # Up one and down one; down two still fits two bits; 40,000 up is 25,536 down, which takes all 16.
    encoded_record = encode_record(
        [ChangedElements(positions, old, np.array([1, 65535, 65534, 40000], "<u2"))]
    )
    gap_count, gap_size, symbol_size = struct.unpack_from("<III", encoded_record)
    frames = [12, 12 + gap_size, 12 + gap_size + symbol_size, len(encoded_record)]
    contents = [
        zstandard.ZstdDecompressor().decompress(encoded_record[start:end]) for start, end in pairwise(frames)
    ]
    assert gap_count == 5
    assert contents == [bytes([254, 255, 0, 0, 0]), bytes([1, 3, 2, 125]), struct.pack("<H", 40000)]


def test_elements_of_several_widths_in_one_chunk() -> None:
    parent = b"\x07" + words(5, 6) + struct.pack("<I", 1 << 20) + struct.pack("<Q", 1 << 40)
    regions = [(1, 1), (4, 2), (4, 4), (8, 8)]
    # Byte 0 one up; element 2 one down; element 3: two bytes of it; element 4: all of it.
    streams = (b"\x00\x01\x00\x00", bytes([0, 1, 125, 127]), b"\x34\x12" + bytes.fromhex("0102030405060708"))
    data = delta(17, 100, regions, [record(*streams)])
    expected = (
        b"\x08" + words(5, 5) + struct.pack("<I", (1 << 20) + 0x1234) + bytes.fromhex("0102030405060708")
    )
    assert applied(data, parent) == applied(data, expected) == expected
    offsets = [(change.width, change.offsets.tolist()) for change in DeltaFile(data).changes(0)]
    assert offsets == [(1, [0]), (2, [3]), (4, [5]), (8, [9])]


def test_live_weights_are_patched_from_what_they_are() -> None:
    parent = safetensors([("BF16", words(10, 20, 30, 40)), ("BF16", words(50, 60))])
    new = safetensors([("BF16", words(10, 21, 30, 7040)), ("BF16", words(49, 60))])
    header = len(parent) - 12
    (change,) = DeltaFile(encoded(parent, new, 4096)).changes(0)
    assert change.width == 2
    assert (change.offsets - header).tolist() == [2, 6, 8]
    for current in ([20, 40, 50], [21, 7040, 49], [20, 7040, 50]):
        assert change.values(np.array(current, np.uint16)).tolist() == [21, 7040, 49]


# What it gives


@st.composite
def file_pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two files with the same tensors: values near each other, far from each other, or the same."""
    dtypes = draw(st.lists(st.sampled_from(["BF16", "F32", "U8", "I64", "F16"]), max_size=4))
    rng = random.Random(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    reach = draw(st.sampled_from([1, 3, 20, 100, 30_000, 2**63]))
    old: list[tuple[str, bytes]] = []
    new: list[tuple[str, bytes]] = []
    for dtype in dtypes:
        width = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I64": 8}[dtype]
        before = [rng.getrandbits(8 * width) for _ in range(rng.choice([0, 1, 7, 300]))]
        after = [
            (value + rng.randint(-reach, reach)) % (1 << 8 * width) if rng.random() < density else value
            for value in before
        ]
        for values, file in ((before, old), (after, new)):
            file.append((dtype, b"".join(value.to_bytes(width, "little") for value in values)))
    return safetensors(old), safetensors(new)


@given(file_pairs(), st.sampled_from([1, 7, 64, 1000, 1 << 20]), st.integers(1, 3))
def test_a_delta_gives_the_new_file_from_the_parent_and_from_itself(
    pair: tuple[bytes, bytes], chunk_size: int, threads: int
) -> None:
    parent, new = pair
    data = encoded(parent, new, chunk_size, threads)
    assert data == encoded(parent, new, chunk_size, 1)
    assert applied(data, parent) == new
    assert applied(data, parent, times=2) == applied(data, new) == new
    file = DeltaFile(data)
    assert (file.snapshot_size, file.chunk_size) == (len(new), chunk_size)
    offsets = [
        int(offset)
        for index in range(file.chunk_count)
        for change in file.changes(index)
        for offset in change.offsets
    ]
    assert offsets == sorted(set(offsets))
    assert bool(offsets) == (parent != new)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_step_of_training_takes_about_two_bytes_per_changed_value(dtype: str) -> None:
    rng = np.random.default_rng(1)
    kind = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[dtype]
    old = rng.normal(0, 0.02, 1_000_000).astype("<f4").view("<u4")
    old = old if dtype == "F32" else (old >> 16).astype("<u2")
    new = old.copy()
    changed = rng.choice(len(old), 10_000, replace=False)
    new[changed] += rng.choice([1, -1], len(changed)).astype(kind)
    parent = safetensors([(dtype, old.tobytes())])
    data = encoded(parent, safetensors([(dtype, new.tobytes())]), 1 << 20)
    assert 1.2 * len(changed) < len(data) < 1.5 * len(changed)
    assert applied(data, parent)[-len(new) * new.itemsize :] == new.tobytes()


def test_equal_files_make_a_delta_of_empty_records() -> None:
    file = safetensors([("BF16", bytes(5000))])
    assert len(encoded(file, file, 1000)) == 24 + 2 * 9 + 4 * -(-len(file) // 1000)


def test_the_encoder_does_not_run_ahead_of_its_reader() -> None:
    size = 24 << 20
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    parent, new = safetensors([("U8", bytes(size))]), safetensors([("U8", values.tobytes())])
    tracemalloc.start()
    try:
        pieces = [len(piece) for piece in encode_delta(parent, new, 1 << 16)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(pieces) > size and peak < size


# What is refused


def file_with(header: dict[str, object]) -> bytes:
    return safetensors([("BF16", bytes(100))], header)


GOOD: dict[str, object] = {"t0": {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}}


@pytest.mark.parametrize(
    ("parent", "new", "message"),
    [
        (b"", b"", "0 bytes is too short for a safetensors file"),
        (struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 9) + b"{}", "a safetensors header of 9 bytes in a"),
        (file_with(GOOD) + b"x", file_with(GOOD), "the parent has other tensors"),
        (safetensors([("F16", bytes(4))]), safetensors([("BF16", bytes(4))]), "the parent has other tensors"),
    ],
)
def test_files_that_no_delta_leads_between(parent: bytes, new: bytes, message: str) -> None:
    with pytest.raises(DeltaError, match=message):
        encoded(parent, new, 1000)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": {"dtype": "BF16", "data_offsets": [0, 102]}}, "ends 2 bytes after the file"),
        ({"a": {"dtype": "BF16", "data_offsets": [0, 3]}}, "3 bytes in elements of 2"),
        ({name: {"dtype": "U8", "data_offsets": [2, 4]} for name in "ab"}, "overlap"),
        ({"a": {"dtype": "U8", "data_offsets": [5, 4]}}, "overlap"),
        ({"a": {"dtype": "U8", "data_offsets": ["x", 4]}}, "bad safetensors header"),
        ({"a": {"dtype": "U8"}}, "bad safetensors header"),
        ({"a": {"dtype": [], "data_offsets": [0, 4]}}, "bad safetensors header"),
        ({"a": 5}, "bad safetensors header"),
    ],
)  # fmt: skip
def test_a_bad_safetensors_header_is_named(entries: dict[str, object], message: str) -> None:
    file = file_with(entries)
    with pytest.raises(DeltaError, match=message):
        encoded(file, file, 1000)


ONE = record(b"\x00", b"\x01")


def bomb(content_size: int) -> bytes:
    """A small frame that declares and holds `content_size` zeros: blocks of one byte repeated (RFC 8878)."""
    frame = bytes.fromhex("28b52ffda0") + struct.pack("<I", content_size)
    while content_size > 0:
        size = min(content_size, 128 * 1024)
        content_size -= size
        frame += struct.pack("<I", size << 3 | 2 | (content_size == 0))[:3] + b"\0"
    return frame


def raw_record(gap_count: int, gaps: bytes, symbols: bytes, rests: bytes = b"") -> bytes:
    """A record of frames as they are."""
    body = struct.pack("<III", gap_count, len(gaps), len(symbols)) + gaps + symbols + rests
    return struct.pack("<I", len(body)) + body


GAP, SYMBOL = zstd_frame(b"\x00"), zstd_frame(b"\x01")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends too early"),
        (b"SWDELTA2" + delta(16, 16, BF16, [ONE])[8:], "another format"),
        (delta(16, 16, BF16, [ONE])[:-1], "whose records end at"),
        (delta(16, 16, BF16, [ONE]) + b"\0", "whose records end at"),
        (delta(16, 16, BF16, []), "ends too early"),
        (delta(16, 8, BF16, [ONE]), "ends too early"),
        (delta(16, 0, BF16, [ONE]), "chunks of 0 bytes"),
        (delta(16, limits.MAX_CHUNK_BYTES + 1, BF16, [ONE]), "chunks of 4194305 bytes"),
        (delta(2**63, 1 << 20, [(2**62, 2), (2**62, 2)], []), "chunks, limit 120000"),
        (delta(16, 16, [(15, 1)], [ONE]), "regions of 15 bytes in a snapshot of 16"),
        (delta(16, 16, [(8, 2), (8, 3)], [ONE]), "a region of 8 bytes in elements of 3"),
        (delta(16, 16, [(15, 2), (1, 1)], [ONE]), "a region of 15 bytes in elements of 2"),
        (delta(16, 16, [(0, 2), (16, 1)], [ONE]), "a region of 0 bytes"),
        (struct.pack("<8sQII", b"SWDELTA1", 16, 16, 2**32 - 1) + bytes(100), "4294967295 regions"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_at_once(data: bytes, message: str) -> None:
    with pytest.raises(DeltaError, match=message):
        DeltaFile(data)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (struct.pack("<I", 3) + b"abc", "a record ends too early"),
        (raw_record(0, zstd_frame(b""), SYMBOL), "0 gaps in a chunk of 8 elements"),
        (raw_record(9, zstd_frame(bytes(9)), zstd_frame(bytes(9))), "9 gaps in a chunk of 8 elements"),
        (record(b"\x08", b"\x01"), "outside its chunk"),
        (record(b"\x07\x00", b"\x01\x01"), "outside its chunk"),
        (record(b"\x00\xff", b"\x01"), "outside its chunk"),
        (record(b"\xff", b"\x01"), "outside its chunk"),
        (record(b"\x00", b"\x01\x01"), "a frame declares 2 bytes where 1 are due"),
        (record(b"\x00\x00", b"\x01"), "a frame declares 1 bytes where 2 are due"),
        (record(b"\x00", b"\x80"), "symbol 128 has no meaning"),
        (record(b"\x00", b"\x7e", bytes(4)), "a value of more than 2 bytes"),
        (record(b"\x00", b"\x7d", bytes(3)), "a frame declares 3 bytes where 2 are due"),
        (record(b"\x00", b"\x7d"), "damaged frame"),
        (record(b"\x00", b"\x01", bytes(1)), "10 bytes after the end of a record"),
        (raw_record(1, GAP + b"x", SYMBOL), "damaged frame"),
        (raw_record(1, GAP, SYMBOL + b"x"), "damaged frame"),
        (raw_record(1, GAP, zstd_frame(b"\x7c"), zstd_frame(b"\x01") + b"x"), "damaged frame"),
        (raw_record(1, GAP, SYMBOL[:-1]), "damaged frame"),
        (raw_record(1, b"no frame", SYMBOL), "damaged frame"),
        (raw_record(1, GAP[:-1], SYMBOL), "damaged frame"),
        (raw_record(1, bomb(2**31), SYMBOL), "a frame declares 2147483648 bytes where 1 are due"),
        (raw_record(2**31, bomb(2**31), SYMBOL), "2147483648 gaps in a chunk of 8 elements"),
        (raw_record(1, GAP, bomb(2**31)), "a frame declares 2147483648 bytes where 1 are due"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_record_is_refused_before_memory_is_spent(bad: bytes, message: str) -> None:
    file = DeltaFile(delta(32, 16, [(32, 2)], [UNCHANGED, bad]))
    chunk = bytearray(16)
    tracemalloc.start()
    try:
        file.apply(0, chunk)
        with pytest.raises(DeltaError, match=message):
            file.apply(1, chunk)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert chunk == bytes(16), "nothing is written of a record that is refused"


def test_a_value_wider_than_its_own_element_is_refused() -> None:
    # Two bytes fit the second region's elements and not the first's.
    file = DeltaFile(delta(16, 16, [(8, 1), (8, 2)], [record(b"\x00", b"\x7d", b"ab")]))
    with pytest.raises(DeltaError, match="chunk 0: a value of 16 bits in 1 bytes"):
        file.apply(0, bytearray(16))


def test_a_chunk_of_another_place_or_size_is_refused() -> None:
    file = DeltaFile(delta(20, 16, [(20, 2)], [UNCHANGED, UNCHANGED]))
    file.apply(1, bytearray(4))
    for index, size in ((0, 15), (0, 17), (1, 16), (2, 16), (-1, 4)):
        with pytest.raises(DeltaError, match="chunk"):
            file.apply(index, bytearray(size))


def damage_cut(data: bytearray, at: int, value: int) -> None:
    del data[at:]


def damage_bit(data: bytearray, at: int, value: int) -> None:
    data[at] ^= value or 1


def damage_insert(data: bytearray, at: int, value: int) -> None:
    data.insert(at, value)


@given(
    file_pairs(),
    st.sampled_from([damage_cut, damage_bit, damage_insert]),
    st.integers(0, 2**32),
    st.integers(0, 255),
)
def test_damage_raises_a_delta_error_or_gives_some_file(
    pair: tuple[bytes, bytes], damage: Callable[[bytearray, int, int], None], at: int, value: int
) -> None:
    """The hashes tell afterwards; the codec must only never fail in another way."""
    parent, new = pair
    data = bytearray(encoded(parent, new, 256))
    damage(data, at % len(data), value)
    try:
        if DeltaFile(bytes(data)).snapshot_size == len(parent):
            assert len(applied(bytes(data), parent)) == len(parent)
    except DeltaError:
        pass


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_a_delta_error(data: bytes) -> None:
    for file in (data, b"SWDELTA1" + data, delta(16, 16, BF16, [struct.pack("<I", len(data)) + data])):
        with suppress(DeltaError):
            DeltaFile(file).apply(0, bytearray(16))
