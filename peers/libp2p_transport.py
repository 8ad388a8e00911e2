"""The libp2p back end: TCP, Noise, yamux, GossipSub, and requests on streams of their own.

Not used of libp2p: its dialer and listener (addresses, names, ports and errors are handled here), identify,
connection pruning, discovery. After a crash of its services they are rebuilt on the same port; connections
are then lost and reported so.
"""

import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import psutil
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID

from peers.base import (
    NOT_RUNNING,
    GossipMessage,
    Handler,
    PeerEvent,
    PeerId,
    PeerUnreachable,
    RequestTimeout,
    Session,
    SessionHandler,
    TransportError,
    refuse_large_announcement,
)
from peers.drop_oldest import DropOldestBroadcast
from peers.libp2p_address import (
    Endpoint,
    announced_endpoints,
    parse_endpoint,
    peer_id_from_multihash,
    peer_id_to_multihash,
    peer_id_to_text,
    split_peer_id,
)
from peers.libp2p_dialing import first_success, open_stream, resolve
from peers.libp2p_engine import Engine
from peers.libp2p_session import SessionServer, open_session
from peers.libp2p_streams import RequestServer, ask
from peers.link_meter import LinkMeter
from peers.supervisor import Crash, supervise
from peers.uplink import RateLimit, Uplink
from protocol.identity import Identity

logger = logging.getLogger(__name__)

GOSSIP_QUEUE = 512
EVENT_QUEUE = 256
START_TIMEOUT_S = 15.0


class Libp2pTransport:
    """A `Transport` over libp2p.

    `listen` are addresses such as /ip4/0.0.0.0/tcp/4001, port 0 for any free one; without any, it only dials.
    `announce` are the addresses that others are told instead, for nodes behind a port mapping or a name.
    `private_network_key`, 32 bytes, keeps out everyone who does not have it. The caps are on chunks, over
    all their transfers together; calls and gossip are not held back.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        private_network_key: bytes | None = None,
        max_upload_bytes_per_s: float | None = None,
        max_download_bytes_per_s: float | None = None,
    ) -> None:
        if private_network_key is not None and len(private_network_key) != 32:
            raise TransportError(f"a private-network key has 32 bytes, got {len(private_network_key)}")
        try:
            self._listen = [parse_endpoint(address) for address in listen]
            announced_endpoints(announce, [], [])
        except ValueError as error:
            raise TransportError(str(error)) from error
        for endpoint in self._listen:
            if endpoint.kind not in ("ip4", "ip6"):
                raise TransportError(
                    f"cannot listen on '{endpoint}': give an IP address, e.g. /ip4/0.0.0.0/tcp/4001"
                )
        self._identity = identity
        self._announce = list(announce)
        self._private_network_key = private_network_key
        self._peer_id = PeerId(identity.key)
        self._bound: list[Endpoint] = []
        self._nursery: trio.Nursery | None = None
        self._engine: Engine | None = None
        self._servers: dict[str, RequestServer | SessionServer] = {}
        self._meter = LinkMeter()
        self.uplink = Uplink(self._meter.room_s, RateLimit(max_upload_bytes_per_s), self._meter.rate)
        self.downlink = RateLimit(max_download_bytes_per_s)
        self._topics: dict[str, DropOldestBroadcast[GossipMessage]] = {}
        self._events: DropOldestBroadcast[PeerEvent] = DropOldestBroadcast(EVENT_QUEUE)
        self._connected: set[PeerId] = set()
        self._dialing: dict[PeerId, trio.Lock] = {}
        self.counters: Counter[str] = Counter()
        """What was refused, dropped or restarted, by reason."""
        _quiet_libp2p()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> list[str]:
        own_ips: list[str] = []
        if not self._announce:
            own_ips = [a.address for entries in psutil.net_if_addrs().values() for a in entries if _is_ip(a)]
        suffix = f"/p2p/{peer_id_to_text(self._peer_id)}"
        return [
            f"{endpoint}{suffix}" for endpoint in announced_endpoints(self._announce, self._bound, own_ips)
        ]

    @property
    def listening(self) -> list[str]:
        """The addresses bound, with the real port where port 0 was asked for."""
        return [str(endpoint) for endpoint in self._bound]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self._nursery is not None:
            raise TransportError("this transport is already running")
        failure: Exception | None = None
        listeners = self._bind(self._listen)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            started = trio.Event()
            nursery.start_soon(
                supervise, "network", partial(self._run_engine, listeners, started), self._engine_crashed
            )
            try:
                with trio.move_on_after(START_TIMEOUT_S):
                    await started.wait()
                if not started.is_set():
                    raise TransportError("libp2p's services did not start; the log has the cause")
                yield
            except (
                Exception
            ) as error:  # raised again below, outside the nursery that would wrap it in a group
                failure = error
            finally:
                self._nursery = None
                nursery.cancel_scope.cancel()
        self._bound = []
        for broadcast in self._topics.values():
            broadcast.close()
        self._topics.clear()
        self._events.close()
        if failure is not None:
            raise failure

    async def connect(self, address: str, timeout_s: float) -> PeerId:
        engine = self._running_engine()
        try:
            location, peer = split_peer_id(address)
            endpoint = parse_endpoint(location)
        except ValueError as error:
            raise PeerUnreachable(str(error)) from error
        if peer == self._peer_id:
            raise PeerUnreachable(f"{address} is this node itself")
        failures: list[Exception] = []
        lock = self._dialing.setdefault(peer, trio.Lock())
        try:
            with trio.move_on_after(timeout_s):
                async with lock:
                    if engine.connections(peer) and await engine.probe(peer, timeout_s / 3):
                        return peer
                    dials = [
                        partial(self._dial, engine, family, ip, endpoint.port, peer)
                        for family, ip in await resolve(endpoint)
                    ]
                    if await first_success(dials, failures) is not None:
                        return peer
                    raise PeerUnreachable(f"{address} cannot be reached: {_causes(failures)}")
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialing.pop(peer, None)
        raise RequestTimeout(f"no answer from {address} within {timeout_s:g} s: {_causes(failures)}")

    async def _dial(
        self, engine: Engine, family: socket.AddressFamily, ip: str, port: int, peer: PeerId
    ) -> PeerId:
        try:
            stream = await open_stream(family, ip, port)
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            raise PeerUnreachable(f"{ip} port {port}: {cause}") from error
        try:
            await engine.upgrade(stream, peer)
            return peer
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{ip} port {port}: {error}") from error

    async def disconnect(self, peer: PeerId) -> None:
        await self._running_engine().disconnect(peer)

    def connected_peers(self) -> set[PeerId]:
        return set() if self._engine is None else self._engine.peers()

    async def request(
        self, peer: PeerId, protocol: str, payload: bytes, *, timeout_s: float, max_response_bytes: int
    ) -> bytes:
        engine, nursery = self._running_engine(), self._nursery
        assert nursery is not None
        name = peer_id_to_text(peer)
        await trio.lowlevel.checkpoint()
        if not engine.connections(peer):
            raise PeerUnreachable(f"not connected to {name}; connect first")
        answers: list[bytes] = []
        failures: list[TransportError] = []
        done = trio.Event()
        scope = trio.CancelScope()

        async def exchange() -> None:
            # In a task of its own: what must not be interrupted (a frame half written) delays no caller.
            try:
                with scope:
                    host, peer_id = engine.host, ID(peer_id_to_multihash(peer))
                    answers.append(await ask(host, peer_id, protocol, payload, max_response_bytes))
            except TransportError as error:
                failures.append(error)
            except Exception as error:
                logger.warning("a request to %s failed unexpectedly", name, exc_info=True)
                failures.append(TransportError(f"the request to {name} failed: {error!r}"))
            finally:
                done.set()

        nursery.start_soon(exchange)
        try:
            with trio.move_on_after(timeout_s):
                await done.wait()
        finally:
            scope.cancel()
        if answers:
            return answers[0]
        if failures:
            raise failures[0]
        if self._nursery is None:
            raise TransportError(f"the transport was stopped during the request to {name}")
        # Either the peer is slow, or its connection is dead and must not be offered again: ask.
        self._nursery.start_soon(engine.probe, peer)
        raise RequestTimeout(f"no complete answer of {name} to {protocol} within {timeout_s:g} s")

    def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int, max_concurrent: int) -> None:
        self._serve(protocol, RequestServer(handler, max_request_bytes, max_concurrent, self.counters))

    def serve_sessions(
        self, protocol: str, handler: SessionHandler, *, max_message_bytes: int, max_per_peer: int
    ) -> None:
        self._serve(protocol, SessionServer(handler, max_message_bytes, max_per_peer, self.counters))

    async def open_session(self, peer: PeerId, protocol: str, *, max_message_bytes: int) -> Session:
        engine = self._running_engine()
        await trio.lowlevel.checkpoint()
        if not engine.connections(peer):
            raise PeerUnreachable(f"not connected to {peer_id_to_text(peer)}; connect first")
        return await open_session(engine.host, ID(peer_id_to_multihash(peer)), protocol, max_message_bytes)

    def _serve(self, protocol: str, server: RequestServer | SessionServer) -> None:
        if protocol in self._servers:
            raise TransportError(f"{protocol} is served already")
        self._servers[protocol] = server
        if self._engine is not None:
            self._engine.host.set_stream_handler(TProtocol(protocol), server)

    async def subscribe(self, topic: str) -> trio.MemoryReceiveChannel[GossipMessage]:
        engine = self._running_engine()
        if topic not in self._topics:
            self._topics[topic] = DropOldestBroadcast(GOSSIP_QUEUE)
            await engine.join(topic)
        return self._topics[topic].subscribe()

    async def publish(self, topic: str, data: bytes) -> None:
        engine = self._running_engine()
        refuse_large_announcement(data)
        await engine.pubsub.publish(topic, data)

    def events(self) -> trio.MemoryReceiveChannel[PeerEvent]:
        return self._events.subscribe()

    # The services underneath.

    def _running_engine(self) -> Engine:
        if self._nursery is None:
            raise TransportError(NOT_RUNNING)
        if self._engine is None:
            raise TransportError("the network services are being restarted; try again in a moment")
        return self._engine

    async def _run_engine(self, listeners: list[trio.SocketListener], started: trio.Event) -> None:
        if not listeners:
            listeners.extend(self._bind(self._bound))
        engine = Engine(
            self._identity,
            self._private_network_key,
            [address.partition("/p2p/")[0] for address in self.addresses],
            self._deliver,
            self._peer_changed,
            self.counters,
            self.uplink,
            self._meter,
        )
        for protocol, server in self._servers.items():
            engine.host.set_stream_handler(TProtocol(protocol), server)
        try:
            async with engine.running(list(listeners)):
                listeners.clear()  # closed when the engine ends; a restart binds new ones
                for topic in self._topics:
                    await engine.join(topic)
                self._engine = engine
                started.set()
                await trio.sleep_forever()
        finally:
            self._engine = None
            for peer in list(self._connected):
                self._peer_changed(peer, False)

    def _engine_crashed(self, crash: Crash) -> None:
        self.counters["network_restarts"] += 1
        logger.error("%s", crash, exc_info=crash.error)

    def _bind(self, endpoints: Sequence[Endpoint]) -> list[trio.SocketListener]:
        """Bind and listen; sets `listening`. Raises `TransportError` with the address and what to do."""
        listeners: list[trio.SocketListener] = []
        bound: list[Endpoint] = []
        for endpoint in endpoints:
            family = socket.AF_INET if endpoint.kind == "ip4" else socket.AF_INET6
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((endpoint.host, endpoint.port))
                sock.listen(128)
            except OSError as error:
                sock.close()
                for listener in listeners:
                    listener.socket.close()
                raise TransportError(_cannot_listen(endpoint, error)) from error
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
            bound.append(Endpoint(endpoint.kind, endpoint.host, sock.getsockname()[1]))
        self._bound = bound
        return listeners

    def _deliver(self, topic: str, data: bytes, forwarder: ID) -> None:
        broadcast = self._topics.get(topic)
        if broadcast is not None:
            message = GossipMessage(topic, data, peer_id_from_multihash(forwarder.to_bytes()))
            self.counters["gossip_dropped"] += broadcast.send(message)

    def _peer_changed(self, peer: PeerId, connected: bool) -> None:
        if connected == (peer in self._connected):
            return
        (self._connected.add if connected else self._connected.discard)(peer)
        self._events.send(PeerEvent(peer, connected))


def _is_ip(entry: object) -> bool:
    return getattr(entry, "family", None) in (socket.AF_INET, socket.AF_INET6)


def _causes(failures: list[Exception]) -> str:
    return "; ".join(str(failure) for failure in failures) or "no reaction"


def _cannot_listen(endpoint: Endpoint, error: OSError) -> str:
    advice = {
        errno.EADDRINUSE: f"stop the program that uses it ('ss -ltnp sport = :{endpoint.port}' names it), "
        "or choose another port, 0 for any free one",
        errno.EADDRNOTAVAIL: "no interface of this machine has the address; 0.0.0.0 listens on all of them",
        errno.EACCES: "ports below 1024 need privileges; choose a higher one",
    }.get(error.errno or 0, "choose another address")
    return f"cannot listen on {endpoint.host} port {endpoint.port}: {error.strerror or error}; {advice}"


def _quiet_libp2p() -> None:
    """libp2p logs every failed dial and handshake as an error; those are raised and counted here instead."""
    if os.environ.get("LIBP2P_DEBUG"):
        return
    logging.getLogger("libp2p").setLevel(logging.ERROR)
    logging.getLogger("libp2p").propagate = True
    for noisy in ("network", "protocol_muxer", "security", "stream_muxer", "transport", "pubsub.utils"):
        logging.getLogger(f"libp2p.{noisy}").setLevel(logging.CRITICAL)
