"""Every message: exact round trips, and refusals (never another exception) for everything else."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.encoding import decode, encode
from protocol.messages import (
    KINDS,
    Completion,
    Credit,
    GroupRequest,
    Hello,
    Manifest,
    Message,
    Presence,
    Probe,
    Receipt,
    RolloutGroup,
    group_id,
    prompt_hash,
)
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "messages.json"
EXAMPLES = {entry["kind"]: bytes.fromhex(entry["body"]) for entry in json.loads(VECTORS.read_text("utf-8"))}
DELTA = decode(EXAMPLES["manifest"])["delta"]
CLASSES: dict[str, type[Message]] = {**KINDS, "run_spec": RunSpec}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=80)
    | st.binary(max_size=80)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


def refused(cls: type[Message], data: bytes, **bounds: int) -> Refused:
    with pytest.raises(Refused) as caught:
        cls.decode(data, **bounds)
    assert "\n" not in caught.value.detail
    assert len(caught.value.detail) <= 512
    return caught.value


def assert_decodes_exactly_or_is_refused(cls: type[Message], data: bytes) -> None:
    try:
        message = cls.decode(data)
    except Refused as refusal:
        assert refusal.reason in (RefusalReason.MALFORMED, RefusalReason.OVERSIZED)
    else:
        assert message.encode() == data


def test_there_is_an_example_of_every_kind() -> None:
    assert EXAMPLES.keys() == CLASSES.keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_every_kind_round_trips(kind: str) -> None:
    message = CLASSES[kind].decode(EXAMPLES[kind])
    assert message.encode() == EXAMPLES[kind]
    assert CLASSES[kind].decode(message.encode()) == message


@pytest.mark.parametrize("kind", CLASSES)
def test_an_unknown_field_is_refused(kind: str) -> None:
    refusal = refused(CLASSES[kind], encode(decode(EXAMPLES[kind]) | {"zebra": 1}))
    assert refusal.reason is RefusalReason.MALFORMED


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, body in EXAMPLES.items() for field in decode(body)]
)
def test_a_missing_field_is_refused_even_if_it_has_a_default(kind: str, field: str) -> None:
    plain = decode(EXAMPLES[kind])
    del plain[field]
    assert refused(CLASSES[kind], encode(plain)).reason is RefusalReason.MALFORMED


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, body in EXAMPLES.items() for field in decode(body)]
)
def test_a_field_of_the_wrong_type_is_refused_and_named(kind: str, field: str) -> None:
    refusal = refused(CLASSES[kind], encode(decode(EXAMPLES[kind]) | {field: [[[]]]}))
    assert refusal.reason is RefusalReason.MALFORMED
    assert f"{CLASSES[kind].__name__}.{field}" in refusal.detail


@pytest.mark.parametrize("kind", CLASSES)
def test_a_body_that_is_no_map_is_refused(kind: str) -> None:
    for plain in (None, 1, "x", b"x", [], [1, 2], True, 0.5):
        assert refused(CLASSES[kind], encode(plain)).reason is RefusalReason.MALFORMED


@pytest.mark.parametrize("kind", CLASSES)
def test_size_is_checked_first(kind: str) -> None:
    body = EXAMPLES[kind]
    assert refused(CLASSES[kind], body, max_bytes=len(body) - 1).reason is RefusalReason.OVERSIZED


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("hello", {"name": ""}),
        ("hello", {"name": "n" * 65}),
        ("hello", {"name": "a\x1b[2Jb"}),
        ("hello", {"name": "a\nb"}),
        ("hello", {"name": "a\u202eb"}),
        ("hello", {"role": "boss"}),
        ("hello", {"addresses": ["/ip4/192.0.2.1/tcp/1"] * 17}),
        ("hello", {"addresses": ["a" * 257]}),
        ("hello", {"addresses": ["/ip4/\r\n"]}),
        ("hello", {"policies": [{"policy": b"p" * 31, "version": 1, "served_versions": []}]}),
        ("hello", {"policies": [{"policy": b"p" * 32, "version": -1, "served_versions": []}]}),
        ("hello", {"policies": [{"policy": b"p" * 32, "version": 1, "served_versions": [0] * 65}]}),
        ("presence", {"groups_per_min": -1.0}),
        ("presence", {"groups_per_min": 1e13}),
        ("presence", {"groups_per_min": 12}),  # an integer for a float would be a second encoding
        ("presence", {"reward": 1e300}),
        ("presence", {"accepted": True}),
        ("presence", {"accepted": 2**41}),
        ("presence", {"leaving": 0}),
        ("activation", {"state": "asleep"}),
        ("rollout_group", {"version": 2**40 + 1}),
        ("rollout_group", {"counter": -1}),
        ("rollout_group", {"completions": []}),
        ("rollout_group", {"rewards": [1e13]}),
        ("rollout_group", {"rewards": [0.0] * 65}),
        ("rollout_group", {"prompt_hash": b"x" * 33}),
        ("rollout_announcement", {"size_bytes": limits.MAX_ENVELOPE_BYTES + 1}),
        ("rollout_announcement", {"informative": 1}),
        ("group_request", {"groups": []}),
        ("group_request", {"groups": [b"g" * 32] * 17}),
        ("receipt", {"detail": "two\nlines"}),
        ("receipt", {"reason": "r" * 513}),
        ("credit_request", {"wanted": 0}),
        ("credit_request", {"wanted": 1025}),
        ("credit", {"retry_after_s": -0.5}),
        ("credit", {"retry_after_s": 3601.0}),
        ("manifest", {"chunk_size": 0}),
        ("manifest", {"chunk_size": limits.MAX_CHUNK_BYTES + 1}),
        ("manifest", {"size_bytes": 0}),
        ("manifest", {"size_bytes": 1}),  # one chunk would do
        ("manifest", {"size_bytes": 2**63}),
        ("manifest", {"version": 7}),  # the delta's parent
        ("manifest", {"version": 6}),
        ("manifest", {"size_bytes": 700, "chunks": [b"c" * 32]}),  # the delta is no smaller
        ("manifest", {"delta": DELTA | {"size_bytes": 1025}}),
        ("manifest", {"delta": DELTA | {"chunks": []}}),
        ("manifest", {"delta": DELTA | {"chunk_size": limits.MAX_CHUNK_BYTES + 1}}),
        ("manifest", {"delta": DELTA | {"parent_state": b"x" * 31}}),
        ("manifest", {"delta": DELTA | {"chunk_size": 1}}),
        ("manifest", {"probe": {"tokens": [1, -1], "logprobs": [-0.5]}}),
        ("manifest", {"probe": {"tokens": [1, 2**31], "logprobs": [-0.5]}}),
        ("manifest", {"probe": {"tokens": [1, 2], "logprobs": [-0.5, -0.5]}}),
        ("chunk_session", {"file": "x" * 32}),
        ("chunk_session", {"file": b"x" * 31}),
        ("refusal", {"reason": ""}),
    ],
)
def test_a_value_out_of_range_is_refused(kind: str, changes: dict[str, Any]) -> None:
    assert refused(CLASSES[kind], encode(decode(EXAMPLES[kind]) | changes)).reason is RefusalReason.MALFORMED


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": b""},
        {"tokens": bytes(4 * limits.MAX_COMPLETION_TOKENS + 4)},
        {"version_runs": []},
        {"version_runs": [{"version": 1, "count": 0}]},
        {"version_runs": [{"version": 1, "count": limits.MAX_COMPLETION_TOKENS + 1}]},
        {"version_runs": [{"version": v, "count": 1} for v in range(limits.MAX_VERSION_RUNS + 1)]},
        {"finish": "tired"},
        {"text": "x" * (limits.MAX_TEXT_CHARS + 1)},
    ],
)
def test_a_completion_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    plain = decode(EXAMPLES["rollout_group"])
    plain["completions"][0] |= changes
    assert refused(RolloutGroup, encode(plain)).reason is RefusalReason.MALFORMED


@settings(max_examples=40)
@given(st.sampled_from(sorted(CLASSES)), st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_but_a_refusal(kind: str, data: bytes) -> None:
    assert_decodes_exactly_or_is_refused(CLASSES[kind], data)


@settings(max_examples=100)
@given(st.sampled_from(sorted(CLASSES)), st.data())
def test_damaged_messages_never_raise_anything_but_a_refusal(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(EXAMPLES[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assert_decodes_exactly_or_is_refused(CLASSES[kind], bytes(damaged))


def replace_somewhere(value: Any, data: st.DataObject) -> Any:
    """`value` with one thing inside it replaced, wherever the draw leads."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: replace_somewhere(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], replace_somewhere(value[index], data), *value[index + 1 :]]
    return data.draw(PLAIN)


@settings(max_examples=200)
@given(st.sampled_from(sorted(CLASSES)), st.data())
def test_well_encoded_nonsense_never_raises_anything_but_a_refusal(kind: str, data: st.DataObject) -> None:
    nonsense = replace_somewhere(decode(EXAMPLES[kind]), data)
    assert_decodes_exactly_or_is_refused(CLASSES[kind], encode(nonsense))


def test_huge_field_names_and_many_fields_make_short_refusals() -> None:
    plain = decode(EXAMPLES["receipt"])
    del plain["detail"]
    for hostile in (plain | {"x\n" * 100_000: 1}, {f"{index:04}": 1 for index in range(2000)}):
        assert len(refused(Receipt, encode(hostile)).detail) < 400


def test_a_message_of_few_values_cannot_hold_many() -> None:
    many = encode({"groups": [b""] * 5000})
    assert "more values" in refused(GroupRequest, many).detail
    assert "more values" not in refused(Manifest, encode({"chunks": [b""] * 5000})).detail


def test_the_largest_manifest_fits_an_envelope_with_room_to_spare() -> None:
    manifest = Manifest(
        policy=b"p" * 32,
        version=2**40,
        size_bytes=limits.MAX_CHUNKS * limits.MAX_CHUNK_BYTES,
        chunk_size=limits.MAX_CHUNK_BYTES,
        chunks=[b"c" * 32] * limits.MAX_CHUNKS,
        probe=Probe(tokens=[2**31 - 1] * 64, logprobs=[-1.0] * 63),
    )
    assert len(manifest.encode()) < limits.MAX_ENVELOPE_BYTES - 100_000
    assert Manifest.decode(manifest.encode()) == manifest


def test_a_delta_cannot_take_a_manifest_beyond_the_limit_on_chunks() -> None:
    fields = {**Manifest.decode(EXAMPLES["manifest"]).model_dump(), "chunk_size": 1}
    half = limits.MAX_CHUNKS // 2
    fields |= {"size_bytes": half + 1, "chunks": [b"c" * 32] * (half + 1)}
    delta = DELTA | {"chunk_size": 1}
    good = Manifest(
        **fields | {"delta": delta | {"size_bytes": half - 1, "chunks": [b"d" * 32] * (half - 1)}}
    )
    assert Manifest.decode(good.encode()) == good and len(good.encode()) < limits.MAX_ENVELOPE_BYTES
    with pytest.raises(ValueError, match="the limit is 120000"):
        Manifest(**fields | {"delta": delta | {"size_bytes": half, "chunks": [b"d" * 32] * half}})


def test_the_most_fragmented_group_has_few_enough_values() -> None:
    completion = Completion.build(
        [1] * limits.MAX_VERSION_RUNS,
        [-1.0] * limits.MAX_VERSION_RUNS,
        [(version, 1) for version in range(limits.MAX_VERSION_RUNS)],
        "stop",
    )
    group = RolloutGroup.decode(EXAMPLES["rollout_group"])
    group = group.model_copy(
        update={"completions": [completion] * limits.MAX_GROUP_SIZE, "rewards": [0.5] * limits.MAX_GROUP_SIZE}
    )
    assert RolloutGroup.decode(group.encode()) == group


def test_text_for_people_is_made_fit_when_it_is_set_and_refused_when_it_arrives_unfit() -> None:
    receipt = Receipt(group=b"g" * 32, accepted=False, detail="first\nsecond\x1b[31m\ud800" + "x" * 600)
    assert receipt.detail.startswith("first second [31m x")
    assert len(receipt.detail) == 512
    assert Receipt.decode(receipt.encode()) == receipt
    refused(Receipt, encode(decode(receipt.encode()) | {"detail": "a\nb"}))


def test_messages_are_frozen() -> None:
    credit = Credit(granted=1, version=2, retry_after_s=0.0)
    with pytest.raises(ValueError, match="frozen"):
        credit.granted = 2  # type: ignore[misc]


def test_a_presence_is_a_hello_with_more() -> None:
    assert issubclass(Presence, Hello)
    assert decode(EXAMPLES["hello"]).items() <= decode(EXAMPLES["presence"]).items()


def test_arrays_travel_as_little_endian_words() -> None:
    completion = Completion.build([1, 65_538], [-0.5, -2.0], [(3, 2)], "stop")
    assert completion.tokens.hex() == "0100000002000100"
    assert completion.logprobs.hex() == "000000bf000000c0"
    assert completion.token_array().tolist() == [1, 65_538]
    assert completion.logprob_array().tolist() == [-0.5, -2.0]


def test_hashes_of_prompts_and_groups_are_what_the_document_says() -> None:
    assert prompt_hash([1, 256]) == hashlib.sha256(bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert (
        group_id(b"s" * 32, b"body") == hashlib.sha256(b"swarmnode/1 group\0" + b"s" * 32 + b"body").digest()
    )
