"""docs/protocol.md names every kind, field, choice, reason and limit that the code has, in its own words."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from protocol import limits
from protocol.base import Message
from protocol.invite import Invite
from protocol.messages import (
    KINDS,
    Completion,
    PeerAddresses,
    PolicyProgress,
    Probe,
    SamplingContract,
    VersionRun,
)
from protocol.refusals import RefusalReason
from protocol.run_spec import MAX_GROUP_ARRAY_BYTES, AlgorithmSpec, Asset, BaseModelRef, RunSpec, TrustRules
from protocol.tasks import TaskRef, TaskSpec

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text("utf-8")
WORDS = set(re.findall(r"`([^`]+)`", TEXT))
PARTS: list[type[Message]] = [
    *(Completion, PeerAddresses, PolicyProgress, Probe, SamplingContract, VersionRun, TaskRef, TaskSpec),
    *(AlgorithmSpec, Asset, BaseModelRef, RunSpec, TrustRules, Invite),
]


def rows_of(kind: str) -> str:
    """The rows of a kind in the table of fields, up to the next kind."""
    table = TEXT.partition("### Fields")[2].partition("| part |")[0]
    start = re.search(rf"^\|[^|]*`{kind}`[^|]*\|", table, re.MULTILINE)
    assert start is not None, f"{kind} has no row"
    following = re.search(r"^\| `", table[start.end() :], re.MULTILINE)
    return table[start.start() : start.end() + following.start()] if following else table[start.start() :]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_kind_stands_in_its_rows(kind: str) -> None:
    rows = rows_of(kind) + (rows_of("hello") if kind == "presence" else "")
    missing = [field for field in KINDS[kind].model_fields if f"`{field}`" not in rows]
    assert not missing
    named = {word for word in re.findall(r"`([a-z_]+)`", re.sub(r"\| [^|]*\|\n", "|\n", rows))}
    assert named <= {*KINDS[kind].model_fields, *KINDS}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_field_of_a_part_is_named(part: type[Message]) -> None:
    missing = [field for field in part.model_fields if not re.search(rf"`(sampling\.)?{field}`", TEXT)]
    assert not missing


@pytest.mark.parametrize("message", [*KINDS.values(), *PARTS], ids=lambda message: message.__name__)
def test_every_choice_is_named(message: type[Message]) -> None:
    for field in message.model_fields.values():
        if get_origin(field.annotation) is Literal:
            assert set(get_args(field.annotation)) <= WORDS


def test_every_refusal_reason_is_listed_and_no_other() -> None:
    listed = TEXT.partition("## 9.")[2].partition("After")[0]
    assert re.findall(r"`([a-z_]+)`", listed) == [reason.value for reason in RefusalReason]


@pytest.mark.parametrize(
    "number",
    [
        *(
            limits.MAX_ENVELOPE_BYTES,
            limits.MAX_ANNOUNCEMENT_BYTES,
            limits.MAX_CHUNK_BYTES,
            limits.MAX_VALUES,
        ),
        *(limits.DEFAULT_CHUNK_BYTES, limits.MAX_CHUNKS, limits.REPLAY_WINDOW, limits.MAX_COMPLETION_TOKENS),
        *(
            limits.MAX_TEXT_CHARS,
            limits.MAX_VERSION_RUNS,
            limits.MAX_TASKS,
            limits.MAX_DEPTH,
            Message.max_values,
        ),
        MAX_GROUP_ARRAY_BYTES // 8,
    ],
)
def test_limits_are_the_codes(number: int) -> None:
    assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", TEXT)
