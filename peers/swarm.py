"""Signed calls and announcements: every message is checked for size, signature, run, sender, replay, kind
and schema.

A bad message costs its sender reputation, is counted by reason and, when it was a call, is answered by a
signed `refusal` that names the reason. Nothing that a peer sends can stop a service.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, overload

import trio

from peers.base import GossipMessage, PeerId, ResponseTooLarge, Transport, TransportError
from peers.drop_oldest import DropOldestBroadcast
from peers.reputation import Reputation
from protocol import limits
from protocol.base import Message
from protocol.envelope import Envelope, ReplayWindow, open_envelope, seal
from protocol.identity import Identity, NodeKey, node_name
from protocol.messages import KINDS, Refusal
from protocol.refusals import RefusalReason, Refused

log = logging.getLogger(__name__)

RPC_PROTOCOL = "/swarmnode/rpc/1"

MAX_REPLAY_WINDOWS = 8_192
"""Senders whose sequence numbers are remembered (at most 0.6 kB each); the one silent for longest is
forgotten first. Forgetting costs little: an old announcement could be shown once more, an old call could
not (its sender is proven)."""

MAX_CONCURRENT_CALLS = 128
MAX_CALLS_PER_PEER = 16
"""Calls of one peer being answered at once; more are refused as `busy`: one peer cannot take all places."""

HANDLER_TIMEOUT_S = 60.0
ANNOUNCEMENT_BUFFER = 1_024

_OVERSIZE_SLACK_BYTES = 64 * 1024
"""Requests a little too large are read, so that the sender can be told; larger ones end with their stream."""

_THREAD_BYTES = 256 * 1024
"""Envelopes from this size on are decoded and verified in a thread: some take tens of milliseconds."""

M = TypeVar("M", bound=Message)
CallHandler = Callable[[PeerId, Message], Awaitable[tuple[str, Message]]]
OnRefusal = Callable[[PeerId | None, RefusalReason, str], None]
AnnouncementChannel = trio.MemoryReceiveChannel[tuple[NodeKey, Message]]


class InvalidResponse(TransportError):
    """The peer answered with something that is no valid answer; it was counted against the peer."""


_KIND_OF: dict[type[Message], str] = {message_class: kind for kind, message_class in KINDS.items()}


def kind_of(message: Message) -> str:
    """The kind under which a message travels. Raises `KeyError` for a class that does not."""
    return _KIND_OF[type(message)]


class ReplayGuard:
    """One replay window per sender, for its calls and its announcements, which may overtake each other."""

    def __init__(self, max_senders: int = MAX_REPLAY_WINDOWS) -> None:
        self._max_senders = max_senders
        self._windows: OrderedDict[NodeKey, ReplayWindow] = OrderedDict()

    def accept(self, sender: NodeKey, sequence: int) -> bool:
        """Record the number; False if it was seen before or is too far behind the sender's highest."""
        window = self._windows.setdefault(sender, ReplayWindow())
        self._windows.move_to_end(sender)
        if len(self._windows) > self._max_senders:
            self._windows.popitem(last=False)
        return window.accept(sequence)

    def highest(self, sender: NodeKey) -> int:
        """The highest number seen of `sender`, -1 if none."""
        window = self._windows.get(sender)
        return -1 if window is None else window.highest

    def __len__(self) -> int:
        return len(self._windows)


class Swarm:
    """A node's voice in one run.

    `next_sequence` must never give a number twice for this identity, restarts included. `on_refusal` is
    told of every message refused here: by whom (None when nobody can be blamed), why, and one line of
    detail; it must not block.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        run_id: bytes,
        *,
        next_sequence: Callable[[], int],
        on_refusal: OnRefusal,
        reputation: Reputation | None = None,
    ) -> None:
        self.transport = transport
        self.identity = identity
        self.run_id = run_id
        self.topic = f"swarmnode/1/{run_id.hex()}"
        self.reputation = reputation or Reputation()
        self.replay_guard = ReplayGuard()
        self.duplicates = 0
        """Announcements that arrived more than once (ordinary in gossip)."""
        self.announcements_dropped = 0
        """Announcements lost because a reader of this node was too slow."""
        self.listening = trio.Event()
        self._next_sequence = next_sequence
        self._on_refusal = on_refusal
        self._handlers: dict[str, tuple[CallHandler, int, float]] = {}
        self._readers: dict[str, DropOldestBroadcast[tuple[NodeKey, Message]]] = {}
        self._answering: Counter[PeerId] = Counter()
        transport.serve(
            RPC_PROTOCOL,
            self._answer,
            max_request_bytes=limits.MAX_ENVELOPE_BYTES + _OVERSIZE_SLACK_BYTES,
            max_concurrent=MAX_CONCURRENT_CALLS,
        )

    # --- calls ----------------------------------------------------------------------------------------------

    def serve(
        self,
        kind: str,
        handler: CallHandler,
        *,
        max_bytes: int = limits.MAX_ENVELOPE_BYTES,
        timeout_s: float = HANDLER_TIMEOUT_S,
    ) -> None:
        """Answer calls of `kind` by `handler(sender, message) -> (kind, message)`.

        A `Refused` raised by the handler is what the caller gets. Envelopes above `max_bytes` are refused,
        and a handler that takes longer than `timeout_s` is cancelled and the call refused as `busy`.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no message kind")
        self._handlers[kind] = (handler, max_bytes, timeout_s)

    @overload
    async def call(self, peer: PeerId, message: Message, *, timeout_s: float) -> Message: ...
    @overload
    async def call(self, peer: PeerId, message: Message, *, timeout_s: float, expect: type[M]) -> M: ...

    async def call(
        self, peer: PeerId, message: Message, *, timeout_s: float, expect: type[Message] = Message
    ) -> Message:
        """Ask `peer` and return its answer, an instance of `expect`.

        Raises `Refused` when the peer refused (a reason unknown here becomes `wrong_protocol`, the word
        kept in the detail) or when the message is too large to send; `TransportError` when no valid answer
        came.

        An answer carries no name of its question: it comes back on the question's own stream, which the
        transport encrypts and authenticates as `peer`'s. So only `peer` can put bytes there, and a peer
        that sends an old answer of its own says nothing that it could not sign afresh. The envelope is
        checked to be `peer`'s own all the same, so that a peer cannot pass on another's signed words as its
        answer.
        """
        request = self.seal(message)
        try:
            data = await self.transport.request(
                peer,
                RPC_PROTOCOL,
                request,
                timeout_s=timeout_s,
                max_response_bytes=limits.MAX_ENVELOPE_BYTES,
            )
        except ResponseTooLarge:
            self.refuse(peer, RefusalReason.OVERSIZED, f"answer to {kind_of(message)} is too large")
            raise
        return await self.open_answer(peer, data, expect)

    async def open_answer(self, peer: PeerId, data: bytes, expect: type[M]) -> M:
        """The message of `peer`'s answer. Raises `Refused` if it refuses, `InvalidResponse` if it is bad."""
        try:
            envelope = await _open(data, None, limits.MAX_ENVELOPE_BYTES)
            if envelope.sender != NodeKey(peer):
                raise Refused(RefusalReason.WRONG_SENDER, "the answer is signed by somebody else")
            refusal = Refusal.decode(envelope.body) if envelope.kind == "refusal" else None
            if refusal is None:
                # A node of another run refuses in the name of its own run; anything else from there is wrong.
                if envelope.run_id != self.run_id:
                    raise Refused(
                        RefusalReason.WRONG_RUN, f"the answer is of run {envelope.run_id.hex()[:12]}"
                    )
                answer = _decode(envelope)
                if not isinstance(answer, expect):
                    raise Refused(
                        RefusalReason.WRONG_KIND, f"expected {expect.__name__}, got {envelope.kind!r}"
                    )
                return answer
        except Refused as refused:
            self.refuse(peer, refused.reason, refused.detail)
            raise InvalidResponse(f"{node_name(peer)} gave an invalid answer: {refused}") from refused
        raise _refused_by(refusal)

    def seal(self, message: Message) -> bytes:
        """The message in an envelope signed by this node. Raises `Refused(oversized)`."""
        return seal(self.identity, self.run_id, kind_of(message), self._next_sequence(), message.encode())

    async def admit(self, peer: PeerId, data: bytes, max_bytes: int = limits.MAX_ENVELOPE_BYTES) -> Envelope:
        """Check a request that came from `peer`: size, signature, run, sender, replay. Raises `Refused`."""
        envelope = await _open(data, self.run_id, max_bytes)
        if envelope.sender != NodeKey(peer):
            raise Refused(
                RefusalReason.WRONG_SENDER,
                f"signed by {node_name(envelope.sender)}, sent by {node_name(peer)}",
            )
        if not self.replay_guard.accept(envelope.sender, envelope.sequence):
            raise Refused(
                RefusalReason.REPLAYED,
                f"sequence number {envelope.sequence} was seen before or is too old; the highest seen is "
                f"{self.replay_guard.highest(envelope.sender)}",
            )
        return envelope

    def refuse(self, peer: PeerId | None, reason: RefusalReason, detail: str) -> None:
        """Count a refusal and lower the peer's reputation as far as the reason says."""
        if peer is not None:
            self.reputation.penalize(peer, reason, trio.current_time())
        self._on_refusal(peer, reason, detail)

    def seal_refusal(self, refused: Refused) -> bytes:
        """The signed answer to a refused request."""
        return self.seal(Refusal(reason=refused.reason.value, detail=refused.detail))

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        self._answering[peer] += 1
        try:
            if self._answering[peer] > MAX_CALLS_PER_PEER:
                raise Refused(RefusalReason.BUSY, f"more than {MAX_CALLS_PER_PEER} calls at once")
            return self.seal(await self._handle(peer, data))
        except Refused as refused:
            self.refuse(peer, refused.reason, refused.detail)
            return self.seal_refusal(refused)
        finally:
            self._answering[peer] -= 1
            if self._answering[peer] <= 0:
                del self._answering[peer]

    async def _handle(self, peer: PeerId, data: bytes) -> Message:
        envelope = await self.admit(peer, data)
        if envelope.kind not in self._handlers:
            raise Refused(RefusalReason.WRONG_KIND, f"this node does not answer {envelope.kind!r}")
        handler, max_bytes, timeout_s = self._handlers[envelope.kind]
        if len(data) > max_bytes:
            raise Refused(RefusalReason.OVERSIZED, f"{len(data)} bytes, {envelope.kind} may have {max_bytes}")
        message = _decode(envelope)
        with trio.move_on_after(timeout_s):
            kind, answer = await handler(peer, message)
            if KINDS.get(kind) is not type(answer):
                raise TypeError(
                    f"the handler of {envelope.kind} answered a {type(answer).__name__} as {kind!r}"
                )
            return answer
        raise Refused(RefusalReason.BUSY, f"{envelope.kind} was not answered within {timeout_s:.0f} s")

    # --- announcements --------------------------------------------------------------------------------------

    async def announce(self, message: Message) -> None:
        """Gossip a message to the run. Delivery is not promised.

        Raises `Refused(oversized)` above `MAX_ANNOUNCEMENT_BYTES`, `TransportError` when it could not be
        published.
        """
        data = self.seal(message)
        if len(data) > limits.MAX_ANNOUNCEMENT_BYTES:
            raise Refused(
                RefusalReason.OVERSIZED,
                f"{kind_of(message)} has {len(data)} bytes, gossip takes {limits.MAX_ANNOUNCEMENT_BYTES}",
            )
        await self.transport.publish(self.topic, data)

    def announcements(self, kind: str) -> AnnouncementChannel:
        """(author, message) of every valid announcement of `kind` from others, from now on.

        Each call gives a channel of its own. When `ANNOUNCEMENT_BUFFER` wait in it, the oldest is dropped and
        counted in `announcements_dropped`.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no message kind")
        if kind not in self._readers:
            self._readers[kind] = DropOldestBroadcast(ANNOUNCEMENT_BUFFER)
        return self._readers[kind].subscribe()

    async def run(self) -> None:
        """Receive announcements until cancelled: a service to supervise. The transport must be running.

        `listening` is set once announcements can arrive.
        """
        channel = await self.transport.subscribe(self.topic)
        self.listening.set()
        async for gossip in channel:
            try:
                self._receive(gossip)
            except Refused as refused:
                # Named and counted, but no loss of reputation: neighbours pass gossip on unread, and whoever
                # publishes rubbish must not be able to ruin the honest nodes that relay it.
                self._on_refusal(gossip.relayed_by, refused.reason, refused.detail)
            except Exception:
                # Whatever a message from outside can break must break for this message only.
                log.exception(
                    "an announcement relayed by %s broke this node's reader", node_name(gossip.relayed_by)
                )

    def _receive(self, gossip: GossipMessage) -> None:
        """Check one announcement and hand it to its readers.

        Raises `Refused` for what nobody has signed for this run. Faults in what somebody did sign for it are
        counted against that author here.
        """
        envelope = open_envelope(gossip.data, run_id=self.run_id, max_bytes=limits.MAX_ANNOUNCEMENT_BYTES)
        if envelope.sender == self.identity.key:
            return
        if not self.replay_guard.accept(envelope.sender, envelope.sequence):
            self.duplicates += 1
            return
        try:
            message = _decode(envelope)
        except Refused as refused:
            self.refuse(PeerId(envelope.sender), refused.reason, refused.detail)
            return
        readers = self._readers.get(envelope.kind)
        if readers is not None:
            self.announcements_dropped += readers.send((envelope.sender, message))


async def _open(data: bytes, run_id: bytes | None, max_bytes: int) -> Envelope:
    check = partial(open_envelope, data, run_id=run_id, max_bytes=max_bytes)
    if len(data) < _THREAD_BYTES or len(data) > max_bytes:
        return check()
    return await trio.to_thread.run_sync(check)


def _decode(envelope: Envelope) -> Message:
    message_class = KINDS.get(envelope.kind)
    if message_class is None:
        raise Refused(RefusalReason.WRONG_KIND, f"{envelope.kind!r} is no message kind")
    return message_class.decode(envelope.body)


def _refused_by(refusal: Refusal) -> Refused:
    """What the peer said, as an exception."""
    try:
        return Refused(RefusalReason(refusal.reason), refusal.detail)
    except ValueError:
        return Refused(
            RefusalReason.WRONG_PROTOCOL,
            f"refused with the unknown reason {refusal.reason!r}: {refusal.detail}",
        )
