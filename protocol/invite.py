"""The one string that lets a machine join a run: run id, seed addresses, and a private network's key."""

import base64
import binascii
import hashlib
from typing import Annotated

from pydantic import Field

from protocol import limits
from protocol.base import Address, Digest, Message
from protocol.refusals import Refused

_PREFIX = "swarm1-"


class InviteError(ValueError):
    """A malformed invite; the message says what to do."""


class Invite(Message):
    run_id: Digest
    seeds: Annotated[list[Address], Field(min_length=1, max_length=limits.MAX_ADDRESSES)]
    """Multiaddresses that end in /p2p/PEER-ID."""
    network_key: Annotated[bytes, Field(min_length=32, max_length=32)] | None = None


def format_invite(invite: Invite) -> str:
    """`swarm1-` and URL-safe base64 of four checksum bytes and the encoded invite."""
    body = invite.encode()
    checksum = hashlib.sha256(body).digest()[:4]
    return _PREFIX + base64.urlsafe_b64encode(checksum + body).decode().rstrip("=")


def parse_invite(text: str) -> Invite:
    """Read an invite; white space inside it (from a terminal's line breaks) is ignored. Raises
    `InviteError`."""
    compact = "".join(text.split())
    if not compact.startswith(_PREFIX):
        raise InviteError(f"an invite starts with '{_PREFIX}'; copy it whole from 'swarmnode invite'")
    try:
        data = base64.b64decode(
            compact[len(_PREFIX) :] + "=" * (-len(compact[len(_PREFIX) :]) % 4), b"-_", validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise InviteError("the invite has characters that do not belong; copy it again, whole") from error
    checksum, body = data[:4], data[4:]
    if hashlib.sha256(body).digest()[:4] != checksum:
        raise InviteError(
            "the invite is incomplete or mistyped (its checksum is wrong); copy it again, whole"
        )
    try:
        return Invite.decode(body)
    except Refused as refused:
        raise InviteError(f"the invite was made by an incompatible version: {refused}") from refused
