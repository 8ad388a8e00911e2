"""The in-memory back end: a seeded network with delay, loss, duplicates, corruption, partitions, slow links.

Time passes only in `trio.sleep`, so that tests run it on `trio.testing.MockClock`. Simplified against libp2p:
gossip floods every connection between subscribers instead of keeping a mesh, and a corrupted message reaches
the application, where Noise would have dropped the connection.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from peers.base import (
    NOT_RUNNING,
    GossipMessage,
    Handler,
    PeerEvent,
    PeerId,
    PeerUnreachable,
    RequestTimeout,
    ResponseTooLarge,
    Session,
    SessionHandler,
    TransportError,
    refuse_large_announcement,
)
from peers.drop_oldest import DropOldestBroadcast
from peers.libp2p_address import peer_id_to_text, split_peer_id
from peers.memory_link import Link, Links
from peers.memory_session import MemorySession, MemoryWire, pair
from peers.request_gate import HANDLER_TIMEOUT_S, GateFull, RequestGate
from peers.uplink import RateLimit, Uplink
from protocol.identity import Identity

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * 1024
"""Concurrent transfers share an uplink by turns of this size, as streams of one connection do."""

SEEN_MESSAGES = 16_384
GOSSIP_QUEUE = 512
EVENT_QUEUE = 256


@dataclass
class _Served:
    handler: Handler
    max_request_bytes: int
    gate: RequestGate


@dataclass
class _ServedSessions:
    handler: SessionHandler
    max_message_bytes: int
    max_per_peer: int


@dataclass(eq=False)
class _Stream:
    """One request on its way: what the requester waits for, and whether it still does."""

    answered: trio.Event = field(default_factory=trio.Event)
    response: bytes | None = None
    failure: TransportError | None = None
    abandoned: bool = False

    def finish(self, response: bytes | None, failure: TransportError | None = None) -> None:
        if not self.answered.is_set():
            self.response, self.failure = response, failure
            self.answered.set()


class MemoryNetwork:
    """The wire between `MemoryTransport`s, and the controls that a test turns."""

    def __init__(
        self,
        seed: int = 0,
        *,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        duplicate: float = 0.0,
        corrupt: float = 0.0,
        dead_after_s: float = 20.0,
    ) -> None:
        self._links = Links(seed, Link(delay_s, jitter_s, loss, duplicate, corrupt))
        self.dead_after_s = dead_after_s
        self._nodes: dict[PeerId, MemoryTransport] = {}
        self._groups: list[frozenset[PeerId]] = []
        self._partition = 0

    def transport(
        self,
        identity: Identity,
        *,
        uplink_bytes_per_s: float | None = None,
        downlink_bytes_per_s: float | None = None,
        max_upload_bytes_per_s: float | None = None,
        max_download_bytes_per_s: float | None = None,
    ) -> "MemoryTransport":
        """A node's transport. Asking again with the same identity is a restart, once the old one ended.

        The first two are what the node's link carries, the others what it is allowed to use of it.
        """
        wire = MemoryWire(uplink_bytes_per_s, downlink_bytes_per_s)
        limits = RateLimit(max_upload_bytes_per_s), RateLimit(max_download_bytes_per_s)
        return MemoryTransport(self, PeerId(identity.key), wire, *limits)

    def set_link(self, a: PeerId, b: PeerId, link: Link, *, both_ways: bool = True) -> None:
        """How messages from `a` to `b` (and back) fare from now on."""
        self._links.set(a, b, link)
        if both_ways:
            self._links.set(b, a, link)

    def set_default(self, **changes: float) -> None:
        """Change fields of the link that holds where none was set, e.g. `set_default(loss=0.1)`."""
        self._links.change_default(**changes)

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Only members of the same group reach each other; nodes in no group form one more.

        Silent, like a cut cable: connections across the cut are noticed as dead after `dead_after_s`.
        """
        self._groups = [frozenset(group) for group in groups]
        self._partition += 1
        for node in list(self._nodes.values()):
            for peer in node.connected_peers():
                if not self.reachable(node.peer_id, peer):
                    node._start(node._notice_dead, peer, self._partition)

    def heal(self) -> None:
        """End the partition. Connections already given up must be dialed again."""
        self._groups = []
        self._partition += 1

    def reachable(self, a: PeerId, b: PeerId) -> bool:
        """Whether no partition lies between `a` and `b`."""
        return self._group_of(a) == self._group_of(b)

    def _group_of(self, peer: PeerId) -> int:
        return next((i for i, group in enumerate(self._groups) if peer in group), -1)

    async def _carry(
        self,
        source: "MemoryTransport",
        target: PeerId,
        label: str,
        data: bytes,
        stream: _Stream | None = None,
    ) -> tuple[bytes, ...]:
        """Move `data` over a link; returns the copies that arrive (0, 1 or 2) after the time it takes."""
        passage = self._links.carry(source.peer_id, target, label, data)
        receiver = self._nodes.get(target)
        received_at = await source._transmit(label, len(data), receiver, stream)
        await trio.sleep(max(0.0, received_at - trio.current_time()) + passage.delay_s)
        if not self.reachable(source.peer_id, target) or (stream is not None and stream.abandoned):
            return ()
        return passage.arrives


class MemoryTransport:
    """A `Transport` on a `MemoryNetwork`. Its address is /memory/NAME/p2p/PEER-ID."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: PeerId,
        wire: MemoryWire,
        upload_limit: RateLimit,
        download_limit: RateLimit,
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self.wire = wire
        self.bytes_sent = wire.bytes_sent
        """Payload bytes by protocol or topic; requests, answers, sessions and gossip copies alike."""
        self.uplink = Uplink(wire.room_s, upload_limit, lambda: wire.uplink_bytes_per_s)
        self.downlink = download_limit
        self.counters: Counter[str] = Counter()
        self._sessions: dict[PeerId, list[MemorySession]] = {}
        self._served_sessions: dict[str, _ServedSessions] = {}
        self._nursery: trio.Nursery | None = None
        self._peers: set[PeerId] = set()
        self._asking: dict[PeerId, set[_Stream]] = {}
        self._served: dict[str, _Served] = {}
        self._topics: dict[str, DropOldestBroadcast[GossipMessage]] = {}
        self._events: DropOldestBroadcast[PeerEvent] = DropOldestBroadcast(EVENT_QUEUE)
        self._published = 0
        self._seen: OrderedDict[tuple[PeerId, int], None] = OrderedDict()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> list[str]:
        return [f"/memory/{self._peer_id.hex()[:8]}/p2p/{peer_id_to_text(self._peer_id)}"]

    @property
    def total_bytes_sent(self) -> int:
        """Everything that left through the uplink."""
        return self.bytes_sent.total()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self._nursery is not None:
            raise TransportError("this transport is already running")
        failure: Exception | None = None
        old = self._network._nodes.get(self._peer_id)
        if old is not None:
            raise TransportError(
                f"{self.addresses[0]} is in use by a running node with the same key; stop it first"
            )
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._network._nodes[self._peer_id] = self
            try:
                yield
            except (
                Exception
            ) as error:  # raised again below, outside the nursery that would wrap it in a group
                failure = error
            finally:
                nursery.cancel_scope.cancel()
                self._leave()
        if failure is not None:
            raise failure

    def crash(self) -> None:
        """Die without a word, as by a power cut: `running`'s body is cancelled; peers notice later."""
        assert self._nursery is not None, "crash() needs a running transport"
        self._network._nodes.pop(self._peer_id, None)
        for peer in self._peers:
            node = self._network._nodes.get(peer)
            if node is not None:
                node._start(node._notice_dead, self._peer_id, None)
        self._peers.clear()
        self._nursery.cancel_scope.cancel()

    async def connect(self, address: str, timeout_s: float) -> PeerId:
        self._require_running()
        try:
            _, peer = split_peer_id(address)
        except ValueError as error:
            raise PeerUnreachable(str(error)) from error
        if peer == self._peer_id:
            raise PeerUnreachable(f"{address} is this node itself")
        link = self._network._links.between(self._peer_id, peer)
        with trio.move_on_after(timeout_s):
            await trio.sleep(2 * link.delay_s)
            if not self._network.reachable(self._peer_id, peer):
                await trio.sleep_forever()
            other = self._network._nodes.get(peer)
            if other is None:
                raise PeerUnreachable(f"nobody listens at {address}; is the node running?")
            # A restarted peer has forgotten the connection that this side may still hold.
            if self._peer_id not in other._peers:
                self._connection_changed(peer, False)
            self._connection_changed(peer, True)
            other._connection_changed(self._peer_id, True)
            return peer
        raise RequestTimeout(f"no answer from {address} within {timeout_s:g} s")

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        other = self._network._nodes.get(peer)
        self._connection_changed(peer, False)
        if other is not None:
            other._connection_changed(self._peer_id, False)

    def connected_peers(self) -> set[PeerId]:
        return set(self._peers)

    async def request(
        self, peer: PeerId, protocol: str, payload: bytes, *, timeout_s: float, max_response_bytes: int
    ) -> bytes:
        self._require_running()
        name = peer_id_to_text(peer)
        await trio.lowlevel.checkpoint()
        if peer not in self._peers:
            raise PeerUnreachable(f"not connected to {name}; connect first")
        stream = _Stream()
        self._asking.setdefault(peer, set()).add(stream)
        try:
            with trio.move_on_after(timeout_s):
                copies = await self._network._carry(self, peer, protocol, payload, stream)
                other = self._network._nodes.get(peer)
                if other is None or self._peer_id not in other._peers:
                    if copies:
                        self._connection_changed(peer, False)
                        raise PeerUnreachable(f"the connection to {name} is gone; connect again")
                else:
                    for copy in copies:
                        other._start(other._answer, self, protocol, copy, max_response_bytes, stream)
                await stream.answered.wait()
        finally:
            stream.abandoned = True
            self._asking.get(peer, set()).discard(stream)
        if stream.failure is not None:
            raise stream.failure
        if stream.response is None:
            raise RequestTimeout(f"no complete answer of {name} to {protocol} within {timeout_s:g} s")
        return stream.response

    def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int, max_concurrent: int) -> None:
        if protocol in self._served:
            raise TransportError(f"{protocol} is served already")
        self._served[protocol] = _Served(handler, max_request_bytes, RequestGate(max_concurrent))

    async def open_session(self, peer: PeerId, protocol: str, *, max_message_bytes: int) -> Session:
        self._require_running()
        await trio.lowlevel.checkpoint()
        other = self._network._nodes.get(peer)
        if peer not in self._peers or other is None or self._peer_id not in other._peers:
            raise PeerUnreachable(f"not connected to {peer_id_to_text(peer)}; connect first")
        served = other._served_sessions.get(protocol)
        mine = self._session(peer, protocol, max_message_bytes)
        theirs = other._session(self._peer_id, protocol, served.max_message_bytes if served else 0)
        pair(mine, theirs)
        if served is None or len(other._sessions[self._peer_id]) > served.max_per_peer:
            await theirs.aclose()
        else:
            other._start(other._serve_session, served, theirs)
        return mine

    def serve_sessions(
        self, protocol: str, handler: SessionHandler, *, max_message_bytes: int, max_per_peer: int
    ) -> None:
        if protocol in self._served_sessions:
            raise TransportError(f"{protocol} is served already")
        self._served_sessions[protocol] = _ServedSessions(handler, max_message_bytes, max_per_peer)

    def _session(self, peer: PeerId, protocol: str, max_message_bytes: int) -> MemorySession:
        network = self._network
        session = MemorySession(
            self._peer_id, peer, protocol, max_message_bytes, network._links, self.wire, network.reachable
        )
        open_ones = [one for one in self._sessions.get(peer, []) if not one.ended]
        self._sessions[peer] = [*open_ones, session]
        return session

    async def _serve_session(self, served: _ServedSessions, session: MemorySession) -> None:
        try:
            await served.handler(session)
        except Exception:  # any failure of a handler ends its session only
            self.counters["handler_failed"] += 1
            logger.warning("a session's handler failed; the session was closed", exc_info=True)
        finally:
            await session.aclose()

    async def subscribe(self, topic: str) -> trio.MemoryReceiveChannel[GossipMessage]:
        self._require_running()
        await trio.lowlevel.checkpoint()
        if topic not in self._topics:
            self._topics[topic] = DropOldestBroadcast(GOSSIP_QUEUE)
        return self._topics[topic].subscribe()

    async def publish(self, topic: str, data: bytes) -> None:
        self._require_running()
        await trio.lowlevel.checkpoint()
        refuse_large_announcement(data)
        self._published += 1
        message_id = (self._peer_id, self._published)
        self._remember(message_id)
        self._forward(message_id, topic, data, self._peer_id)

    def events(self) -> trio.MemoryReceiveChannel[PeerEvent]:
        return self._events.subscribe()

    # What the network calls.

    def _require_running(self) -> None:
        if self._nursery is None:
            raise TransportError(NOT_RUNNING)

    def _start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        if self._nursery is not None and not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(function, *args)

    def _leave(self) -> None:
        """Close every connection politely and forget everything that a restart forgets."""
        if self._network._nodes.get(self._peer_id) is self:
            del self._network._nodes[self._peer_id]
        for peer in list(self._peers):
            node = self._network._nodes.get(peer)
            if node is not None and self._network.reachable(self._peer_id, peer):
                node._connection_changed(self._peer_id, False)
            self._connection_changed(peer, False)
        self._nursery = None
        for broadcast in self._topics.values():
            broadcast.close()
        self._topics.clear()
        self._events.close()

    def _connection_changed(self, peer: PeerId, connected: bool) -> None:
        if connected == (peer in self._peers):
            return
        (self._peers.add if connected else self._peers.discard)(peer)
        self._events.send(PeerEvent(peer, connected))
        if not connected:
            text = f"the connection to {peer_id_to_text(peer)} closed during the request"
            for stream in self._asking.pop(peer, set()):
                stream.finish(None, PeerUnreachable(text))
            for session in self._sessions.pop(peer, []):
                session.end(0.0)

    async def _notice_dead(self, peer: PeerId, partition: int | None) -> None:
        """Give a silent connection up after a while, unless the partition that silenced it ended first."""
        await trio.sleep(self._network.dead_after_s)
        if partition is not None:
            silent = self._network._partition == partition
        else:
            other = self._network._nodes.get(peer)
            silent = other is None or self._peer_id not in other._peers
        if silent:
            self._connection_changed(peer, False)

    async def _transmit(
        self, label: str, size: int, receiver: "MemoryTransport | None", stream: _Stream | None
    ) -> float:
        """Take turns on the uplink; returns when the receiver's downlink has taken the last piece."""
        received_at = trio.current_time()
        for start in range(0, max(size, 1), PIECE_BYTES):
            if stream is not None and stream.abandoned:
                break
            piece = min(PIECE_BYTES, size - start)
            await trio.sleep_until(self.wire.leave(label, piece))
            if receiver is not None:
                received_at = receiver.wire.enter(piece, trio.current_time())
        return max(received_at, trio.current_time())

    async def _answer(
        self,
        client: "MemoryTransport",
        protocol: str,
        request: bytes,
        max_response_bytes: int,
        stream: _Stream,
    ) -> None:
        served = self._served.get(protocol)
        name = peer_id_to_text(self._peer_id)
        response, refusal = b"", f"{name} closed the stream of {protocol} without an answer"
        if served is None:
            refusal = f"{name} does not serve {protocol}"
        elif len(request) > served.max_request_bytes:
            self.counters["request_too_large"] += 1
        else:
            refusal, response = await self._run_handler(served, client.peer_id, request, refusal)
        if refusal:
            for _ in await self._network._carry(self, client.peer_id, protocol, b"", stream):
                stream.finish(None, TransportError(refusal))
        elif len(response) > max_response_bytes:
            # Only the length travels: the requester reads it and resets the stream.
            for _ in await self._network._carry(self, client.peer_id, protocol, b"", stream):
                text = f"{name} announced {len(response):,} bytes, allowed are {max_response_bytes:,}"
                stream.finish(None, ResponseTooLarge(text))
        else:
            for copy in await self._network._carry(self, client.peer_id, protocol, response, stream):
                stream.finish(copy)

    async def _run_handler(
        self, served: _Served, peer: PeerId, request: bytes, refusal: str
    ) -> tuple[str, bytes]:
        """(reason for closing the stream or "", the answer)."""
        try:
            async with served.gate.enter(peer):
                with trio.fail_after(HANDLER_TIMEOUT_S):
                    return "", await served.handler(peer, request)
        except GateFull:
            self.counters["request_refused_busy"] += 1
        except Exception:  # any failure of a handler ends its stream only
            self.counters["handler_failed"] += 1
            logger.warning("a request handler failed; its stream was closed", exc_info=True)
        return refusal, b""

    def _remember(self, message_id: tuple[PeerId, int]) -> bool:
        """Whether the message is new."""
        if message_id in self._seen:
            return False
        self._seen[message_id] = None
        if len(self._seen) > SEEN_MESSAGES:
            self._seen.popitem(last=False)
        return True

    def _forward(self, message_id: tuple[PeerId, int], topic: str, data: bytes, source: PeerId) -> None:
        for peer in sorted(self._peers - {source, message_id[0]}):
            self._start(self._gossip_to, peer, message_id, topic, data)

    async def _gossip_to(self, peer: PeerId, message_id: tuple[PeerId, int], topic: str, data: bytes) -> None:
        copies = await self._network._carry(self, peer, topic, data)
        other = self._network._nodes.get(peer)
        if other is None or topic not in other._topics or self._peer_id not in other._peers:
            return
        intact = [copy == data for copy in copies]
        # A spoiled copy is delivered but neither remembered nor passed on: a good one can still come.
        new = not any(intact) or other._remember(message_id)
        if not new:
            return
        for copy in copies:
            other.counters["gossip_dropped"] += other._topics[topic].send(
                GossipMessage(topic, copy, self._peer_id)
            )
        if any(intact):
            other._forward(message_id, topic, data, self._peer_id)
