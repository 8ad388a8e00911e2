"""Envelopes: what the signature covers, the order of the checks, and sequence numbers that count once."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.encoding import decode, encode
from protocol.envelope import ReplayWindow, open_envelope, seal
from protocol.identity import Identity, verify
from protocol.refusals import RefusalReason, Refused

RUN = b"\x01" * 32
SENDER = Identity.from_seed(b"\x02" * 32)
OTHER = Identity.from_seed(b"\x03" * 32)
SEALED = seal(SENDER, RUN, "hello", 7, b"body")


def refusal(data: bytes, run_id: bytes | None = RUN, **bounds: int) -> RefusalReason:
    with pytest.raises(Refused) as caught:
        open_envelope(data, run_id=run_id, **bounds)
    return caught.value.reason


def with_field(index: int, value: Any) -> bytes:
    fields = decode(SEALED)
    fields[index] = value
    return encode(fields)


def test_an_envelope_opens_to_what_was_sealed() -> None:
    envelope = open_envelope(SEALED, run_id=RUN)
    assert (envelope.run_id, envelope.kind, envelope.sender) == (RUN, "hello", SENDER.key)
    assert (envelope.sequence, envelope.body, envelope.encoded) == (7, b"body", SEALED)


def test_the_signature_is_over_the_documented_bytes() -> None:
    fields = encode([1, RUN, "hello", SENDER.key, 7, hashlib.sha256(b"body").digest()])
    signed = b"swarmnode/1 envelope\0" + hashlib.sha256(fields).digest()
    assert decode(SEALED) == [1, RUN, "hello", SENDER.key, 7, b"body", SENDER.sign(signed)]


@pytest.mark.parametrize(
    ("index", "value"),
    [(1, b"\x09" * 32), (2, "hellp"), (3, OTHER.key), (4, 8), (5, b"bodz"), (5, b""), (6, bytes(64))],
    ids=["run", "kind", "sender", "sequence", "body", "empty-body", "signature"],
)
def test_every_tampered_field_breaks_the_signature(index: int, value: Any) -> None:
    assert refusal(with_field(index, value), run_id=None) is RefusalReason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (1, b"\x01" * 31),
        (1, "1" * 32),
        (1, None),
        (2, ""),
        (2, "k" * (limits.MAX_NAME_CHARS + 1)),
        (2, b"hello"),
        (3, b"\x01" * 33),
        (3, 5),
        (4, -1),
        (4, limits.MAX_SEQUENCE + 1),
        (4, True),
        (4, 7.0),
        (4, "7"),
        (5, "body"),
        (5, None),
        (5, [1, 2]),
        (6, b""),
        (6, bytes(65)),
        (6, None),
    ],
)
def test_a_field_of_the_wrong_type_or_length_is_malformed(index: int, value: Any) -> None:
    assert refusal(with_field(index, value)) is RefusalReason.MALFORMED


@pytest.mark.parametrize("version", [0, 2, -1, True, 1.0, "1", None, [1], b"\x01"])
def test_another_protocol_version_is_named_before_anything_else(version: Any) -> None:
    assert refusal(with_field(0, version)) is RefusalReason.WRONG_PROTOCOL


def test_a_later_version_may_have_other_fields_and_is_still_named() -> None:
    assert refusal(encode([2, b"run", {"kind": "x"}, 1, 2, 3, 4, 5, 6])) is RefusalReason.WRONG_PROTOCOL


@pytest.mark.parametrize("plain", [None, 1, "x", {}, [], [1], [1] * 6, [1] * 8, {"a": [1]}])
def test_what_is_no_envelope_is_malformed(plain: Any) -> None:
    assert refusal(encode(plain)) is RefusalReason.MALFORMED


def test_another_run_is_refused_after_the_signature() -> None:
    assert refusal(SEALED, run_id=b"\x05" * 32) is RefusalReason.WRONG_RUN
    assert refusal(with_field(6, bytes(64)), run_id=b"\x05" * 32) is RefusalReason.BAD_SIGNATURE
    assert open_envelope(SEALED, run_id=None).run_id == RUN


def test_size_is_checked_before_all_else() -> None:
    assert refusal(SEALED, max_bytes=len(SEALED) - 1) is RefusalReason.OVERSIZED
    assert open_envelope(SEALED, run_id=RUN, max_bytes=len(SEALED)).body == b"body"
    assert refusal(bytes(limits.MAX_ENVELOPE_BYTES + 1)) is RefusalReason.OVERSIZED


def test_what_is_too_large_to_receive_cannot_be_sealed() -> None:
    overhead = len(seal(SENDER, RUN, "hello", 7, bytes(70_000))) - 70_000
    largest = bytes(limits.MAX_ENVELOPE_BYTES - overhead)
    assert open_envelope(seal(SENDER, RUN, "hello", 7, largest), run_id=RUN).body == largest
    with pytest.raises(Refused) as caught:
        seal(SENDER, RUN, "hello", 7, largest + b"\0")
    assert caught.value.reason is RefusalReason.OVERSIZED


def test_unsigned_lists_and_maps_are_not_read_beyond_a_handful_of_values() -> None:
    assert refusal(encode([1, RUN, "hello", SENDER.key, 7, [0] * 1000, bytes(64)])) is RefusalReason.MALFORMED


@settings(max_examples=60)
@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(SEALED) - 1))
    damaged = bytearray(SEALED)
    damaged[bit // 8] ^= 1 << (bit % 8)
    refusal(bytes(damaged), run_id=None)


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    refusal(data, run_id=None)


def test_a_signature_for_another_purpose_does_not_pass() -> None:
    fields = encode([1, RUN, "hello", SENDER.key, 7, hashlib.sha256(b"body").digest()])
    for signed in (
        fields,
        hashlib.sha256(fields).digest(),
        b"swarmnode/1 group\0" + hashlib.sha256(fields).digest(),
    ):
        assert not verify(
            SENDER.key, b"swarmnode/1 envelope\0" + hashlib.sha256(fields).digest(), SENDER.sign(signed)
        )
        assert refusal(with_field(6, SENDER.sign(signed))) is RefusalReason.BAD_SIGNATURE


def accepted_by_a_set(sequences: list[int]) -> list[bool]:
    """The rule in its plainest form: remember everything, look back as far as the window."""
    seen: set[int] = set()
    answers = []
    for sequence in sequences:
        new = sequence not in seen and sequence > max(seen, default=-1) - limits.REPLAY_WINDOW
        if new:
            seen.add(sequence)
        answers.append(new)
    return answers


WINDOW = limits.REPLAY_WINDOW
NEAR_THE_EDGES = st.one_of(
    st.integers(0, 20),
    st.integers(WINDOW - 5, WINDOW + 5),
    st.integers(2 * WINDOW - 5, 2 * WINDOW + 5),
    st.integers(0, 3 * WINDOW),
    st.just(limits.MAX_SEQUENCE),
)


@settings(max_examples=300)
@given(st.lists(NEAR_THE_EDGES, max_size=60))
def test_the_replay_window_agrees_with_a_set(sequences: list[int]) -> None:
    window = ReplayWindow()
    assert [window.accept(sequence) for sequence in sequences] == accepted_by_a_set(sequences)
    assert window.seen_bits.bit_length() <= WINDOW


def test_a_sequence_number_counts_once_and_late_ones_within_the_window() -> None:
    window = ReplayWindow()
    newest = WINDOW + 100
    steps: list[tuple[int, bool]] = [
        (newest, True),
        (newest, False),
        (newest - WINDOW, False),
        (newest - WINDOW + 1, True),
        (newest - WINDOW + 1, False),
        (newest - 1, True),
        (newest + 1, True),
        (newest - 1, False),
        (newest - WINDOW + 1, False),
    ]
    for sequence, expected in steps:
        assert window.accept(sequence) is expected, sequence


def test_sealing_is_deterministic(make_group: Callable[..., Any]) -> None:
    body = make_group().encode()
    assert seal(SENDER, RUN, "rollout_group", 1, body) == seal(SENDER, RUN, "rollout_group", 1, body)
