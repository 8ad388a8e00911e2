"""The transport interface: connect, request and answer, gossip. One file per back end implements it."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NewType, Protocol

import trio

from peers.uplink import RateLimit, Uplink
from protocol.limits import MAX_ANNOUNCEMENT_BYTES

PeerId = NewType("PeerId", bytes)
"""A peer's raw 32-byte Ed25519 public key, proven by the transport's handshake."""

Handler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Answers one request of one peer. Raising anything closes that request's stream and nothing else."""


class TransportError(Exception):
    """A request, connection or publication failed; the message names the address or peer and the cause."""


class RequestTimeout(TransportError):
    """No complete answer within the time-out."""


class PeerUnreachable(TransportError):
    """No connection to the peer could be made."""


class ResponseTooLarge(TransportError):
    """The peer announced an answer larger than the caller allows; nothing of it was kept."""


class SessionEnded(TransportError):
    """The session is over: the peer ended it, or its connection is gone."""


@dataclass(frozen=True)
class GossipMessage:
    """A gossip payload. `relayed_by` is the neighbour it came from; its author signed the envelope in it."""

    topic: str
    data: bytes
    relayed_by: PeerId


@dataclass(frozen=True)
class PeerEvent:
    """A connection appeared or went."""

    peer: PeerId
    connected: bool


class Session(Protocol):
    """A two-way stream of messages with one peer, whole and in order, until either side ends it."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def round_trip_s(self) -> float:
        """The shortest time seen lately for a message there and back; 0 if unknown."""
        ...

    async def send(self, message: bytes) -> None:
        """Send something small at once, ahead of bulk. Raises `SessionEnded`."""
        ...

    async def wait_bulk(self, size_bytes: int) -> None:
        """Until a bulk message of that size can be sent without waiting for the peer. Raises
        `SessionEnded`."""
        ...

    async def send_bulk(self, head: bytes, body: bytes | memoryview) -> None:
        """Send `head` and `body` as one message. The caller holds a turn of the transport's `uplink`.

        Raises `SessionEnded`.
        """
        ...

    async def receive(self) -> bytes | memoryview:
        """The next message. Raises `SessionEnded`."""
        ...

    async def aclose(self) -> None:
        """End the session; what was sent before still arrives. Never raises, cannot be cancelled."""
        ...


SessionHandler = Callable[[Session], Awaitable[None]]
"""Serves one session; it ends when this returns or raises."""

NOT_RUNNING = "the transport is not running: use it inside 'async with transport.running()'"


def refuse_large_announcement(data: bytes) -> None:
    """Raise `TransportError` for a payload that no receiver would take."""
    if len(data) > MAX_ANNOUNCEMENT_BYTES:
        raise TransportError(
            f"an announcement has at most {MAX_ANNOUNCEMENT_BYTES:,} bytes, this one {len(data):,}"
        )


class Transport(Protocol):
    """What a node needs of a network. All coroutines are trio's and may be cancelled at any await."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def uplink(self) -> Uplink:
        """Where bulk takes turns for this node's way out."""
        ...

    @property
    def downlink(self) -> RateLimit:
        """The node's cap on bulk that comes in."""
        ...

    @property
    def addresses(self) -> list[str]:
        """What others can dial, ending in /p2p/PEER-ID. Not 0.0.0.0; loopback only if nothing else."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Listen and serve inside the `async with` block. Raises `TransportError` when the port is taken."""
        ...

    async def connect(self, address: str, timeout_s: float) -> PeerId:
        """Dial a multiaddress that ends in /p2p/PEER-ID (dns4 names allowed).

        Raises `PeerUnreachable`, `RequestTimeout`.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None: ...

    def connected_peers(self) -> set[PeerId]: ...

    async def request(
        self, peer: PeerId, protocol: str, payload: bytes, *, timeout_s: float, max_response_bytes: int
    ) -> bytes:
        """One question, one answer, on a stream of its own (4-byte big-endian length before each).

        Raises `PeerUnreachable` when not connected, `RequestTimeout`, `ResponseTooLarge`, `TransportError`.
        """
        ...

    def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int, max_concurrent: int) -> None:
        """Answer requests of `protocol`. Before or inside `running()`.

        Oversized requests are dropped with the stream.
        """
        ...

    async def open_session(self, peer: PeerId, protocol: str, *, max_message_bytes: int) -> Session:
        """Begin a session with a connected peer; larger messages than the bound end it.

        Whether the peer serves `protocol` shows at the first message. Raises `PeerUnreachable`.
        """
        ...

    def serve_sessions(
        self, protocol: str, handler: SessionHandler, *, max_message_bytes: int, max_per_peer: int
    ) -> None:
        """Serve sessions of `protocol`. Before or inside `running()`. One over the bound is ended at once."""
        ...

    async def subscribe(self, topic: str) -> trio.MemoryReceiveChannel[GossipMessage]:
        """Messages of `topic`.

        The channel is bounded; when it is full the oldest waiting message is dropped and counted.
        """
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data`. Delivery is not promised. Raises `TransportError` if it is larger than the limit."""
        ...

    def events(self) -> trio.MemoryReceiveChannel[PeerEvent]:
        """Connections coming and going, bounded, oldest dropped."""
        ...
