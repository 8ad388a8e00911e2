"""The messages of a chunk session: exact bytes, round trips, and what is none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.chunk_frames import (
    ANY,
    CANCEL,
    LACK,
    MAX_INDICES,
    MAX_LOAD,
    OPENING,
    SPARE,
    WANT,
    BadFrame,
    Have,
    Holdings,
    Indices,
    Piece,
    Sealed,
    decode,
    encode_have,
    encode_holdings,
    encode_indices,
    encode_sealed,
    piece_head,
)


def test_the_bytes_are_those_of_the_protocol():
    held = np.zeros(10, dtype=np.bool_)
    held[[0, 3, 8]] = True
    assert encode_holdings(held, True, 5) == bytes([2, 1, 0, 5, 0b1001, 0b1])
    assert encode_have([1, 258], 3) == bytes([3, 0, 3, 0, 0, 0, 1, 0, 0, 1, 2])
    assert encode_indices(WANT, [ANY]) == bytes([4, 255, 255, 255, 255])
    assert encode_indices(SPARE, [7])[0] == 5 and encode_indices(CANCEL, [7])[0] == 6
    assert piece_head(1, 65_536, 2) == bytes([7, 0, 2, 0, 0, 0, 1, 0, 1, 0, 0])
    assert encode_indices(LACK, [7])[0] == 8
    assert encode_sealed(OPENING, b"x") == b"\x01x"


@given(st.lists(st.booleans(), min_size=1, max_size=50), st.booleans(), st.integers(0, 10**6))
def test_holdings_come_back(bits, giving, load):
    held = np.array(bits, dtype=np.bool_)
    frame = decode(encode_holdings(held, giving, load), len(bits))
    assert isinstance(frame, Holdings)
    assert frame.held.tolist() == bits
    assert (frame.giving, frame.load) == (giving, min(load, MAX_LOAD))


@given(st.sampled_from([WANT, SPARE, CANCEL, LACK]), st.lists(st.integers(0, 99), min_size=1))
def test_indices_come_back(kind, indices):
    assert decode(encode_indices(kind, indices), 100) == Indices(kind, indices)


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(0, MAX_LOAD))
def test_news_come_back(indices, load):
    assert decode(encode_have(indices, load), 100) == Have(indices, load)


@given(st.integers(0, 99), st.integers(0, 2**32 - 1), st.binary(min_size=1), st.integers(0, MAX_LOAD))
def test_pieces_come_back(index, offset, data, load):
    assert decode(piece_head(index, offset, load) + data, 100) == Piece(index, offset, memoryview(data), load)


@given(st.binary(max_size=40), st.integers(0, 20))
def test_whatever_comes_is_a_message_or_refused(data, count):
    try:
        frame = decode(data, count)
    except BadFrame:
        return
    if isinstance(frame, Indices | Have):
        assert all(index < count or index == ANY for index in frame.indices)
    elif isinstance(frame, Holdings):
        assert len(frame.held) == count
    elif isinstance(frame, Piece):
        assert frame.index < count and len(frame.data) > 0
    else:
        assert isinstance(frame, Sealed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        encode_indices(WANT, []),
        encode_indices(WANT, [8]),
        encode_indices(SPARE, [ANY]),
        encode_indices(WANT, [1] * (MAX_INDICES + 1)),
        encode_have([], 0),
        encode_have([8], 0),
        encode_have([ANY], 0),
        encode_holdings(np.ones(9, dtype=np.bool_), False, 0),
        piece_head(0, 0, 0),
        piece_head(8, 0, 0) + b"x",
    ],
)
def test_what_does_not_fit_eight_chunks_is_refused(data):
    with pytest.raises(BadFrame):
        decode(data, 8)


def test_the_spare_bits_of_a_map_mean_nothing():
    frame = decode(bytes([2, 0, 0, 0, 0xFF]), 3)
    assert isinstance(frame, Holdings) and frame.held.tolist() == [True, True, True]
