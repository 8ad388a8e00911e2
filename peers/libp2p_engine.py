"""One running set of libp2p services on sockets that are already bound; built anew after a crash."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr  # type: ignore[import-untyped]  # it ships no types

from peers.base import PeerId, PeerUnreachable
from peers.libp2p_address import peer_id_from_multihash, peer_id_to_multihash
from peers.libp2p_services import Deliver, GuardedHost, GuardedPubsub, GuardedSwarm, SteadyGossipSub
from peers.libp2p_socket import GuardedConnection, HandshakeRefused, PeerSocket
from peers.libp2p_yamux import SteadyUpgrader, SteadyYamux
from peers.link_meter import LinkMeter
from peers.uplink import Uplink
from protocol.identity import Identity
from protocol.limits import MAX_ANNOUNCEMENT_BYTES

logger = logging.getLogger(__name__)

MESHSUB = TProtocol("/meshsub/1.1.0")
"""Later versions announce each message to each neighbour first, which pays for far larger messages only."""

MAX_CONNECTIONS = 512
MAX_HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MAX_GOSSIP_FRAME_BYTES = 256 * 1024
PROBE_TIMEOUT_S = 5.0
UPKEEP_INTERVAL_S = 5.0


class _Watcher(INotifee):
    """Tells of every connection that opened or ended."""

    def __init__(self, changed: Callable[[INetConn, bool], None]) -> None:
        self._changed = changed

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._changed(conn, True)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._changed(conn, False)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Any) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Any) -> None: ...


class Engine:
    """Swarm, host, pubsub and GossipSub of one identity. Noise and yamux only."""

    def __init__(
        self,
        identity: Identity,
        private_network_key: bytes | None,
        addresses: Iterable[str],
        deliver: Deliver,
        on_peer: Callable[[PeerId, bool], None],
        counters: Counter[str],
        uplink: Uplink,
        meter: LinkMeter,
    ) -> None:
        keys = create_new_key_pair(identity.private_seed())
        own_id = ID(peer_id_to_multihash(PeerId(identity.key)))
        store = PeerStore()
        store.add_key_pair(own_id, keys)
        upgrader = SteadyUpgrader(
            {NOISE: NoiseTransport(keys, create_noise_key_pair().private_key)},
            {TProtocol(YAMUX): SteadyYamux},
        )
        upgrader.uplink = uplink
        config = ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections_per_peer=4,
        )
        self._private_network_key = private_network_key
        self._meter = meter
        self._counters = counters
        self._on_peer = on_peer
        self._upgrader = upgrader
        self._handshakes = trio.CapacityLimiter(MAX_HANDSHAKES)
        self._nursery: trio.Nursery | None = None
        self._known: set[PeerId] = set()
        self.swarm = GuardedSwarm(counters, own_id, store, upgrader, connection_config=config)
        announced = [Multiaddr(address) for address in addresses]
        self.host = GuardedHost(self.swarm, counters, announce_addrs=announced)
        self.gossip = SteadyGossipSub(counters, [MESHSUB])
        self.pubsub = GuardedPubsub(
            counters,
            deliver,
            self.host,
            self.gossip,
            strict_signing=True,
            max_inbound_rpc_size=MAX_GOSSIP_FRAME_BYTES,
        )
        self.swarm.register_notifee(_Watcher(self._connection_changed))

    @asynccontextmanager
    async def running(self, listeners: list[trio.SocketListener]) -> AsyncIterator[None]:
        """Serve connections of `listeners` until the block is left; then close every connection."""
        async with (
            background_trio_service(self.swarm),
            background_trio_service(self.gossip),
            background_trio_service(self.pubsub),
        ):
            await self.pubsub.wait_until_ready()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if listeners:
                    nursery.start_soon(trio.serve_listeners, self._accept, listeners)
                nursery.start_soon(self._upkeep)
                try:
                    yield
                finally:
                    self._nursery = None
                    with trio.move_on_after(CLOSE_TIMEOUT_S + 0.5) as closing:
                        closing.shield = True
                        await self._close(self.swarm.get_connections())
                    nursery.cancel_scope.cancel()

    # Connections.

    def connections(self, peer: PeerId) -> list[INetConn]:
        """Open connections to `peer`."""
        found = self.swarm.get_connections(ID(peer_id_to_multihash(peer)))
        return [c for c in found if not c.is_closed and not c.muxed_conn.is_closed]

    def peers(self) -> set[PeerId]:
        """Everyone with an open connection."""
        return {peer for peer in self._known if self.connections(peer)}

    async def upgrade(self, stream: trio.SocketStream, peer: PeerId | None) -> SwarmConn:
        """Handshake as the dialer of `peer`, or as the one dialed (None).

        Raises `PeerUnreachable` when the other side is somebody else or speaks something else. Closes
        `stream` on any failure.
        """
        try:
            guarded = GuardedConnection(
                PeerSocket(stream, self._meter.sent), peer is not None, self._private_network_key
            )
            expected = None if peer is None else ID(peer_id_to_multihash(peer))
            try:
                with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                    secured = await self._upgrader.upgrade_security(guarded, peer is not None, expected)
                    muxed = await self._upgrader.upgrade_connection(secured, secured.get_remote_peer())
                    guarded.lift()
                    peer_id_from_multihash(muxed.peer_id.to_bytes())  # refuses other types of keys
                    return await self.swarm.add_conn(muxed, "inbound" if peer is None else "outbound")
            except trio.TooSlowError as error:
                raise PeerUnreachable(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s") from error
            except Exception as error:  # libp2p, Noise and cryptography raise many kinds here
                raise PeerUnreachable(f"handshake failed: {_innermost(error)}") from error
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    async def _accept(self, stream: trio.SocketStream) -> None:
        if len(self.swarm.get_connections()) >= MAX_CONNECTIONS:
            self._counters["connection_refused_full"] += 1
            await trio.aclose_forcefully(stream)
            return
        try:
            self._handshakes.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            self._counters["connection_refused_busy"] += 1
            await trio.aclose_forcefully(stream)
            return
        try:
            connection = await self.upgrade(stream, None)
        except (PeerUnreachable, OSError) as error:
            self._counters["handshake_failed"] += 1
            logger.debug("an incoming connection was refused: %s", error)
            return
        finally:
            self._handshakes.release_on_behalf_of(stream)
        await connection.event_closed.wait()  # trio closes the socket when this task ends

    def _connection_changed(self, conn: INetConn, opened: bool) -> None:
        peer = peer_id_from_multihash(conn.muxed_conn.peer_id.to_bytes())
        connections = self.connections(peer)
        if opened and peer not in self._known:
            self._known.add(peer)
            self._on_peer(peer, True)
        elif opened and len(connections) > 1 and self._nursery is not None:
            # Both dialed at once, or the peer restarted and its old connection is dead: find out which.
            self._nursery.start_soon(self.probe, peer)
        elif not connections and peer in self._known:
            self._known.discard(peer)
            self._on_peer(peer, False)

    async def probe(self, peer: PeerId, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Ping every connection to `peer`, close those that do not answer; whether one did."""
        alive: list[INetConn] = []

        async def ping(conn: INetConn) -> None:
            muxed = conn.muxed_conn
            try:
                if isinstance(muxed, SteadyYamux) and await muxed.ping(timeout_s):
                    alive.append(conn)
                    return
            except Exception as error:  # whatever it is, the connection is of no use
                logger.debug("ping failed: %r", error)
            await self._close([conn])

        async with trio.open_nursery() as nursery:
            for conn in self.connections(peer):
                nursery.start_soon(ping, conn)
        return bool(alive)

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`."""
        await self._close(self.connections(peer))

    async def _close(self, connections: list[INetConn]) -> None:
        async def close(conn: INetConn) -> None:
            try:
                with trio.move_on_after(CLOSE_TIMEOUT_S):
                    await conn.close()
                    return
                # The farewell waits behind a write that the peer does not take.
                await conn.muxed_conn.secured_conn.close()
            except Exception as error:
                logger.debug("closing a connection: %r", error)

        async with trio.open_nursery() as nursery:
            for conn in connections:
                nursery.start_soon(close, conn)

    # Gossip.

    async def join(self, topic: str) -> None:
        """Subscribe to a topic; its messages go to `deliver`."""
        self.pubsub.set_topic_validator(topic, _small_enough, is_async_validator=False)
        await self.pubsub.subscribe(topic)

    async def _upkeep(self) -> None:
        """Give every connected peer a gossip stream: libp2p tries only right after the connection opened."""
        while True:
            await trio.sleep(UPKEEP_INTERVAL_S)
            self.pubsub.drop_dead_streams()
            for peer in self.peers():
                peer_id = ID(peer_id_to_multihash(peer))
                if peer_id not in self.pubsub.peers:
                    self.pubsub._schedule_peer_stream_retry(peer_id)


def _small_enough(_: ID, message: Any) -> bool:
    return len(message.data) <= MAX_ANNOUNCEMENT_BYTES


def _innermost(error: BaseException) -> str:
    """The most telling text of a chain of exceptions: our own refusal if there is one, else the cause."""
    text = ""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, HandshakeRefused):
            return str(current)
        text = str(current) or text or type(current).__name__
        current = current.__cause__ or current.__context__
    return text
