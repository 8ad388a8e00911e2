"""The signed envelope around every message: version, run, kind, sender, sequence number, body, signature.

A receiver checks size, then signature, then schema, then rules. The signature covers a domain-separated hash,
so a signature made for another purpose, run or kind can never pass here.
"""

import hashlib
from dataclasses import dataclass

from protocol import limits
from protocol.encoding import decode, encode
from protocol.identity import Identity, NodeKey, verify
from protocol.refusals import RefusalReason, Refused

_DOMAIN = b"swarmnode/1 envelope\0"


@dataclass(frozen=True)
class Envelope:
    """A message whose signature has been verified."""

    run_id: bytes
    kind: str
    sender: NodeKey
    sequence: int
    body: bytes
    encoded: bytes
    """The envelope as it travelled; forwarding it forwards the sender's signature."""


def _signed_digest(run_id: bytes, kind: str, sender: bytes, sequence: int, body: bytes) -> bytes:
    fields = [limits.PROTOCOL_VERSION, run_id, kind, sender, sequence, hashlib.sha256(body).digest()]
    return _DOMAIN + hashlib.sha256(encode(fields)).digest()


def seal(identity: Identity, run_id: bytes, kind: str, sequence: int, body: bytes) -> bytes:
    """Sign `body` (an encoded message) as `identity`.

    Raises `Refused(oversized)` if the result would exceed `MAX_ENVELOPE_BYTES`.
    """
    signature = identity.sign(_signed_digest(run_id, kind, identity.key, sequence, body))
    sealed = encode([limits.PROTOCOL_VERSION, run_id, kind, identity.key, sequence, body, signature])
    if len(sealed) > limits.MAX_ENVELOPE_BYTES:
        raise Refused(RefusalReason.OVERSIZED, f"a {kind} of {len(sealed)} bytes cannot be sent")
    return sealed


def open_envelope(
    data: bytes, *, run_id: bytes | None, max_bytes: int = limits.MAX_ENVELOPE_BYTES
) -> Envelope:
    """Verify and unwrap. `run_id=None` accepts any run (only for the run spec itself, which names the run).

    Raises `Refused`: oversized, malformed, wrong_protocol, wrong_run, bad_signature.
    """
    # So few values that nothing of substance is read before the signature.
    fields = decode(data, max_bytes, max_values=16)
    if not isinstance(fields, list) or not fields:
        raise Refused(RefusalReason.MALFORMED, "an envelope is a list that starts with the protocol version")
    version = fields[0]
    # By type too: True and 1.0 equal 1, and would give one signature several envelopes.
    if type(version) is not int or version != limits.PROTOCOL_VERSION:
        shown = version if isinstance(version, int) else type(version).__name__
        raise Refused(
            RefusalReason.WRONG_PROTOCOL, f"version {shown}, this node speaks {limits.PROTOCOL_VERSION}"
        )
    if len(fields) != 7:
        raise Refused(RefusalReason.MALFORMED, "an envelope is a list of seven fields")
    run, kind, sender, sequence, body, signature = fields[1:]
    well_formed = (
        isinstance(run, bytes)
        and len(run) == 32
        and isinstance(kind, str)
        and 0 < len(kind) <= limits.MAX_NAME_CHARS
        and isinstance(sender, bytes)
        and len(sender) == 32
        and isinstance(sequence, int)
        and not isinstance(sequence, bool)
        and 0 <= sequence <= limits.MAX_SEQUENCE
        and isinstance(body, bytes)
        and isinstance(signature, bytes)
        and len(signature) == 64
    )
    if not well_formed:
        raise Refused(RefusalReason.MALFORMED, "an envelope field has the wrong type or length")
    if not verify(sender, _signed_digest(run, kind, sender, sequence, body), signature):
        raise Refused(RefusalReason.BAD_SIGNATURE, "the signature does not match the sender's key")
    if run_id is not None and run != run_id:
        raise Refused(RefusalReason.WRONG_RUN, f"run {run.hex()[:12]}, this node is in {run_id.hex()[:12]}")
    return Envelope(run, kind, NodeKey(sender), sequence, body, data)


@dataclass
class ReplayWindow:
    """Sequence numbers seen from one sender: each is accepted once, up to `REPLAY_WINDOW` behind the
    highest."""

    highest: int = -1
    seen_bits: int = 0

    def accept(self, sequence: int) -> bool:
        """Record `sequence`; False if it was seen before or lies too far back to know."""
        if sequence > self.highest:
            shift = min(sequence - self.highest, limits.REPLAY_WINDOW)
            mask = (1 << limits.REPLAY_WINDOW) - 1
            self.seen_bits = ((self.seen_bits << shift) | 1) & mask
            self.highest = sequence
            return True
        offset = self.highest - sequence
        if offset >= limits.REPLAY_WINDOW or self.seen_bits >> offset & 1:
            return False
        self.seen_bits |= 1 << offset
        return True
