"""libp2p's swarm, host, pubsub and GossipSub, changed so that no single peer can end or swell any of them."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any

import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import (
    MultiselectClientError,
    MultiselectCommunicatorError,
    MultiselectError,
)
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue

logger = logging.getLogger(__name__)

OPEN_STALL_S = 30.0
"""A connection on which a stream cannot be opened for this long is dead."""

NEGOTIATE_TIMEOUT_S = 15
MAX_NEGOTIATION_LINE = 1024
MAX_STREAMS_PER_PEER = 256
GOSSIP_QUEUE_PER_PEER = 256
"""Outgoing gossip that may wait for one peer; libp2p's 32 drops bursts."""

Deliver = Callable[[str, bytes, ID], None]
"""(topic, data, the neighbour it came from)"""

AsyncFunction = Callable[..., Coroutine[Any, Any, Any]]


class _GuardedManager:
    """A service's manager on which a task that fails is logged and counted instead of ending the service."""

    def __init__(self, manager: Any, counters: Counter[str]) -> None:
        self._manager = manager
        self._counters = counters

    def run_task(self, function: AsyncFunction, *args: Any, **options: Any) -> None:
        async def guarded() -> None:
            try:
                await function(*args)
            except Exception as error:
                self._counters["network_task_failed"] += 1
                logger.warning(
                    "network task %s failed: %r", getattr(function, "__qualname__", function), error
                )
                await _close_if_connection(getattr(function, "__self__", None))

        options.setdefault("name", getattr(function, "__qualname__", None))
        self._manager.run_task(guarded, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


async def _close_if_connection(owner: object) -> None:
    """The task that failed was the one that served this connection."""
    if isinstance(owner, INetConn | IMuxedConn):
        try:
            await owner.close()
        except Exception as error:
            logger.debug("closing a failed connection: %r", error)


class _GuardedTasks:
    """Mixed into a libp2p service, before it: its `manager` is a `_GuardedManager`."""

    counters: Counter[str]

    @property
    def _manager(self) -> Any:
        return self.__dict__["guarded_manager"]

    @_manager.setter
    def _manager(self, manager: Any) -> None:
        self.__dict__["guarded_manager"] = _GuardedManager(manager, self.counters)


class GuardedSwarm(_GuardedTasks, Swarm):
    """Connections only: it neither listens nor dials (the transport does), nor seeks peers, nor prunes."""

    def __init__(self, counters: Counter[str], *args: Any, **options: Any) -> None:
        self.counters = counters
        super().__init__(*args, **options)
        self.notifees.clear()  # its tag store, which only pruning reads

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.background_nursery = nursery
            self.event_background_nursery_created.set()
            await self.manager.wait_finished()

    async def notify_disconnected(self, conn: INetConn) -> None:
        await self._notify("disconnected", conn)


class BoundedCommunicator(MultiselectCommunicator):
    """Negotiation lines of at most `MAX_NEGOTIATION_LINE` bytes; libp2p reads any announced length."""

    async def read(self) -> str:
        try:
            size, shift = 0, 0
            while True:
                byte = await self._exactly(1)
                size |= (byte[0] & 0x7F) << shift
                if byte[0] < 0x80:
                    break
                shift += 7
                if shift > 14:
                    raise MultiselectCommunicatorError("negotiation line too long")
            if not 0 < size <= MAX_NEGOTIATION_LINE:
                raise MultiselectCommunicatorError(f"negotiation line of {size} bytes")
            line = await self._exactly(size)
            return line.removesuffix(b"\n").decode()
        except (IOException, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError("failed to read a negotiation line") from error

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self.read_writer.read(size - len(data))
            if not piece:
                raise MultiselectCommunicatorError("stream ended during negotiation")
            data += piece
        return data


class GuardedHost(BasicHost):
    """A host without identify, discovery or address guessing, whose stream handlers may fail freely."""

    def __init__(self, swarm: GuardedSwarm, counters: Counter[str], **options: Any) -> None:
        self.counters = counters
        self._streams_of: Counter[ID] = Counter()

        async def refuse(stream: INetStream) -> None:
            await stream.reset()

        # BasicHost serves identify and ping unless it is given some other protocol.
        none = {TProtocol("/swarmnode/none/1"): refuse}
        super().__init__(swarm, default_protocols=none, disable_identify_address_discovery=True, **options)  # type: ignore[arg-type]
        swarm.notifees.clear()  # BasicHost's own, which would start identify on every connection

    async def open_stream(self, peer_id: ID) -> INetStream:
        """Open a stream, nothing negotiated yet. Raises `SwarmException`."""
        stream: INetStream | None = None
        # libp2p loses a slot of the connection when opening is cancelled, so it is not; if it stalls, the
        # connection is closed.
        with trio.move_on_after(OPEN_STALL_S) as stall:
            stall.shield = True
            stream = await self._network.new_stream(peer_id)
        if stream is None:
            for connection in self._network.get_connections(peer_id):
                await connection.muxed_conn.abort()
            raise SwarmException(f"no stream could be opened for {OPEN_STALL_S:g} s; connection closed")
        return stream

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """Open and negotiate a stream. Raises `SwarmException`, `StreamFailure` (not served by the peer)."""
        stream = await self.open_stream(peer_id)
        negotiated = False
        try:
            protocol = await self.multiselect_client.select_one_of(
                protocol_ids, BoundedCommunicator(stream), NEGOTIATE_TIMEOUT_S
            )
            stream.set_protocol(protocol)
            negotiated = True
            return stream
        except MultiselectClientError as error:
            raise StreamFailure(f"the peer refused {', '.join(protocol_ids)}: {error}") from error
        finally:
            if not negotiated:
                await end_stream(stream, ok=False)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        peer_id = net_stream.muxed_conn.peer_id
        if self._streams_of[peer_id] >= MAX_STREAMS_PER_PEER:
            self.counters["stream_refused_too_many"] += 1
            await end_stream(net_stream, ok=False)
            return
        self._streams_of[peer_id] += 1
        try:
            protocol, handler = await self.multiselect.negotiate(
                BoundedCommunicator(net_stream), NEGOTIATE_TIMEOUT_S
            )
            if protocol is None or handler is None:
                await end_stream(net_stream, ok=False)
                return
            net_stream.set_protocol(protocol)
            await handler(net_stream)
            if not net_stream.is_closed:  # type: ignore[attr-defined]  # NetStream's
                await end_stream(net_stream, ok=True)
        except (MultiselectError, IOException) as error:
            logger.debug("stream of %s ended: %r", peer_id, error)
            await end_stream(net_stream, ok=False)
        except Exception:
            self.counters["stream_handler_failed"] += 1
            logger.warning("handling a stream of %s failed; stream closed", peer_id, exc_info=True)
            await end_stream(net_stream, ok=False)
        finally:
            self._streams_of[peer_id] -= 1
            if self._streams_of[peer_id] <= 0:
                del self._streams_of[peer_id]


async def end_stream(stream: INetStream, *, ok: bool) -> None:
    """Close a finished stream, or reset one that is not; never raises, cannot be cancelled."""
    with trio.CancelScope(shield=True):
        try:
            if ok:
                await stream.close()
            else:
                await stream.reset()
        except Exception as error:
            logger.debug("a stream could not be ended: %r", error)


_forwarder: ContextVar[ID] = ContextVar("forwarder")


class GuardedPubsub(_GuardedTasks, Pubsub):
    """Hands messages to `deliver` as they come, with the neighbour they came from; never our own."""

    def __init__(
        self, counters: Counter[str], deliver: Deliver, host: GuardedHost, *args: Any, **options: Any
    ) -> None:
        self.counters = counters
        self._deliver = deliver
        super().__init__(host, *args, **options)
        # Message ids are (author, sequence number). libp2p counts up from the time in seconds, so a node that
        # published faster than that and restarts would repeat ids, and its peers would drop its messages.
        self.counter = secrets.randbits(62)

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        _forwarder.set(msg_forwarder)
        await super().push_msg(msg_forwarder, msg)

    def notify_subscriptions(self, publish_message: rpc_pb2.Message) -> None:
        forwarder = _forwarder.get()
        if forwarder == self.my_id:
            return
        for topic in set(publish_message.topicIDs):
            if topic in self.topic_ids:
                self._deliver(topic, publish_message.data, forwarder)

    async def handle_sending_messages(self, peer_id: ID, stream: INetStream, queue: RpcQueue) -> None:
        queue._queue.max_size = GOSSIP_QUEUE_PER_PEER
        await super().handle_sending_messages(peer_id, stream, queue)

    def drop_dead_streams(self) -> None:
        """Forget gossip streams whose connection is gone, so that they are opened anew on a live one."""
        for peer_id, stream in list(self.peers.items()):
            if stream.is_closed or stream.muxed_conn.is_closed:  # type: ignore[attr-defined]  # NetStream's
                self._handle_dead_peer(peer_id)


class SteadyGossipSub(_GuardedTasks, GossipSub):
    """GossipSub whose heartbeat survives its own errors and whose bookkeeping does not grow without end."""

    def __init__(self, counters: Counter[str], protocols: Sequence[TProtocol]) -> None:
        self.counters = counters
        super().__init__(
            protocols,
            degree=6,
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
        )

    async def heartbeat(self) -> None:
        while True:
            try:
                await super().heartbeat()
            except Exception:
                self.counters["gossip_heartbeat_failed"] += 1
                logger.warning("a gossip heartbeat failed; the next one follows", exc_info=True)
                await trio.sleep(self.heartbeat_interval)

    def _periodic_security_cleanup(self) -> None:
        super()._periodic_security_cleanup()
        # Only adaptive gossip, which is off, reads and trims these.
        self.recent_message_deliveries.clear()
        # Peers may name any topic when they prune.
        for topic in [topic for topic in self.back_off if topic not in self.mesh]:
            del self.back_off[topic]
