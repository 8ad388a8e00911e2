"""Invites: one string, and for every way to damage it one line that says what to do."""

import base64
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.encoding import encode
from protocol.invite import Invite, InviteError, format_invite, parse_invite

ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWExample"
PLAIN = Invite(run_id=b"r" * 32, seeds=[ADDRESS])
PRIVATE = Invite(run_id=b"r" * 32, seeds=[ADDRESS, ADDRESS + "2"], network_key=b"k" * 32)


def wrapped(body: bytes) -> str:
    return "swarm1-" + base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:4] + body).decode().rstrip("=")


@pytest.mark.parametrize("invite", [PLAIN, PRIVATE], ids=["open", "private"])
def test_round_trip(invite: Invite) -> None:
    text = format_invite(invite)
    assert text == wrapped(invite.encode())
    assert parse_invite(text) == invite


@settings(max_examples=50)
@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.text("abc/.:0", min_size=1, max_size=100), min_size=1, max_size=16),
    st.none() | st.binary(min_size=32, max_size=32),
)
def test_any_invite_round_trips(run_id: bytes, seeds: list[str], network_key: bytes | None) -> None:
    invite = Invite(run_id=run_id, seeds=seeds, network_key=network_key)
    assert parse_invite(format_invite(invite)) == invite


def test_white_space_of_terminals_and_mail_is_ignored() -> None:
    text = format_invite(PRIVATE)
    folded = "  " + "\r\n  ".join(text[at : at + 30] for at in range(0, len(text), 30)) + "\t\n"
    assert parse_invite(folded) == PRIVATE


def test_padding_that_some_tool_added_back_is_accepted() -> None:
    text = format_invite(PLAIN)
    assert parse_invite(text + "=" * (-(len(text) - 7) % 4)) == PLAIN


TEXT = format_invite(PRIVATE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "swarm1",
        "swarm1-",
        "swarm1-====",
        "swarm1-a",
        "swarm1-aaaa",
        "swarm2-" + TEXT[7:],
        TEXT[7:],
        TEXT[:-1],
        TEXT[:-20],
        TEXT[:40],
        TEXT + "A",
        TEXT + TEXT,
        TEXT[:20] + "!" + TEXT[21:],
        TEXT[:20] + "é" + TEXT[21:],
        TEXT[:20] + "\x00" + TEXT[21:],
        TEXT[:20] + TEXT[21:],
        TEXT[:20] + TEXT[21] + TEXT[20] + TEXT[22:],
        TEXT.upper(),
        "swarm1-" + "A" * 10_000_000,
        wrapped(b""),
        wrapped(b"\xc1"),
        wrapped(encode([1, 2])),
        wrapped(encode({"run_id": b"r" * 32})),
        wrapped(encode({"network_key": None, "run_id": b"r" * 31, "seeds": [ADDRESS]})),
        wrapped(encode({"network_key": None, "run_id": b"r" * 32, "seeds": []})),
        wrapped(encode({"network_key": None, "run_id": b"r" * 32, "seeds": ["a\nb"]})),
        wrapped(encode({"network_key": None, "run_id": b"r" * 32, "seeds": [ADDRESS] * 17})),
        wrapped(encode({"network_key": b"short", "run_id": b"r" * 32, "seeds": [ADDRESS]})),
        wrapped(encode({"network_key": None, "run_id": b"r" * 32, "seeds": [ADDRESS], "zzz\n": 1})),
    ],
    ids=range(31),
)
def test_a_damaged_invite_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert "copy it" in message or "incompatible version" in message


@settings(max_examples=100)
@given(st.integers(7, len(TEXT) - 1), st.sampled_from("ABCXYZabcxyz0189-_"))
def test_one_mistyped_character_is_noticed(position: int, typed: str) -> None:
    if TEXT[position] == typed:
        return
    try:
        parsed = parse_invite(TEXT[:position] + typed + TEXT[position + 1 :])
    except InviteError:
        return
    # The last character may hold bits that belong to no byte.
    assert position == len(TEXT) - 1
    assert parsed == PRIVATE


def test_the_largest_invite_can_be_read() -> None:
    largest = Invite(
        run_id=b"r" * 32, seeds=["a" * limits.MAX_ADDRESS_CHARS] * limits.MAX_ADDRESSES, network_key=b"k" * 32
    )
    assert parse_invite(format_invite(largest)) == largest
