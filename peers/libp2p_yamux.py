"""The stream multiplexer yamux (github.com/hashicorp/yamux/blob/master/spec.md) on one connection.

libp2p's own copies each byte some ten times, cannot be cancelled in a write, gives up on a window that stays
shut for 5 s and lets bulk stand before control messages; this one is built around what is to go out next.
"""

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.abc import ConnectionType, IMuxedConn, IMuxedStream, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamError,
)
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr  # type: ignore[import-untyped]  # it ships no types

from peers.libp2p_noise import MAX_PLAINTEXT_BYTES, NoiseLink
from peers.libp2p_yamux_stream import YamuxStream
from peers.signal import Signal
from peers.uplink import RateLimit, Uplink

logger = logging.getLogger(__name__)

WRITE_STALL_S = 30.0
"""A connection whose socket takes nothing for this long is dead."""

KEEPALIVE_INTERVAL_S = 15.0
KEEPALIVE_TIMEOUT_S = 20.0
"""A peer that sends nothing at all, not even the answer to a ping, for this long is dead."""

MAX_FRAME_BYTES = 1024 * 1024
"""libp2p implementations send at most 64 KiB to 256 KiB in one frame."""

MANY_URGENT_BYTES = 64 * 1024
"""Who can wait does, while so much waits to be written in small frames."""

MAX_URGENT_BYTES = 1024 * 1024
"""More than this waits only when the peer asks without reading the answers."""

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""What one connection may hold for streams that have not read it yet, in all."""

MAX_STREAMS = 1024
"""Streams of one connection that the peer may have opened."""

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct("!BBHII")


class SteadyYamux(IMuxedConn):
    """One connection's streams.

    * Frames wait in two queues, urgent and bulk; they are encrypted and written whole by whoever comes, so a
      cancelled task leaves nothing half written and the reading task never waits for a write.
    * A bulk frame is taken only when no urgent one waits, and one at a time: what waits in the kernel and on
      the link is bounded elsewhere.
    * What is unread, what is unsent and the number of streams are bounded: the peer is not to be trusted.
    * The peer is pinged every `KEEPALIVE_INTERVAL_S`; silence closes the connection.
    """

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, uplink: Uplink | None = None) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.uplink = uplink or Uplink(lambda taken_bytes: 0.0, RateLimit())
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.streams: dict[int, YamuxStream] = {}
        self.link = NoiseLink(secured_conn)
        self.taken = Signal()
        """Frames began to go out, so others may wait."""
        self.heard_s = trio.current_time()
        self.round_trip_s = 0.0
        """The shortest answer to a ping."""
        self.unread_bytes = 0
        self._is_initiator = secured_conn.is_initiator
        self._next_id = 1 if self._is_initiator else 2
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](MAX_STREAMS)
        self._urgent: deque[bytes] = deque()
        self._urgent_bytes = 0
        self._bulk: deque[tuple[YamuxStream, bytes]] = deque()
        self._sending = memoryview(b"")
        """What is left of the message that the kernel has taken a part of."""
        self._blocked = False
        self._unblock = trio.Event()
        self._ending = False
        self._scope = trio.CancelScope()
        self._pings = 0
        self._pong = trio.Event()
        self._pinging = trio.Lock()
        # The frame that is being read: its header as far as it is here, or its stream and what is missing.
        self._head = b""
        self._body_of: YamuxStream | None = None
        self._body_left = 0
        self._body_flags = 0

    # Life.

    async def start(self) -> None:
        """Serve the connection until it ends."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_when_possible)
                    nursery.start_soon(self._keep_alive)
                    self.event_started.set()
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def _finish(self) -> None:
        self._ending = True
        self._scope.cancel()
        self.event_started.set()
        self._accept_send.close()
        await self.link.socket.close()
        for stream in list(self.streams.values()):
            stream.lose()
        self.streams.clear()
        self._urgent.clear()
        self._bulk.clear()
        self.taken.set()
        if not self.event_closed.is_set():
            self.event_closed.set()
            if self.on_close is not None:
                await self.on_close()

    async def close(self) -> None:
        """Say goodbye if that needs no waiting, and end."""
        if not self._ending:
            self._ending = True
            try:
                self.push(HEADER.pack(0, GO_AWAY, 0, 0, 0))
            except IOException:
                logger.debug("the connection to %s was closed already", self.peer_id)
        await self._finish()

    async def abort(self) -> None:
        """Close the socket and end every stream."""
        await self._finish()

    @property
    def is_initiator(self) -> bool:
        return self._is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._ending

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    # Streams.

    async def open_stream(self) -> YamuxStream:
        """A new stream; nothing is waited for. Raises `MuxedStreamError`."""
        await trio.lowlevel.checkpoint()
        if self._ending:
            raise MuxedStreamError("the connection is closing")
        stream = YamuxStream(self._next_id, self)
        self._next_id += 2
        self.streams[stream.stream_id] = stream
        self.push(HEADER.pack(0, WINDOW_UPDATE, SYN, stream.stream_id, 0))
        return stream

    async def accept_stream(self) -> IMuxedStream:
        """The next stream that the peer opened. Raises `MuxedConnUnavailable` at the connection's end."""
        try:
            return await self._accept_receive.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("connection closed") from None

    def forget(self, stream: YamuxStream) -> None:
        """The stream is over on both sides."""
        self.streams.pop(stream.stream_id, None)

    # Writing.

    def push(self, frame: bytes) -> None:
        """Send a small frame at once, ahead of bulk. Raises `ConnectionClosedError`."""
        if self.event_closed.is_set():
            raise ConnectionClosedError("the connection is closed")
        self._urgent.append(frame)
        self._urgent_bytes += len(frame)
        if self._urgent_bytes > MAX_URGENT_BYTES:
            self._fail("the peer asks without reading the answers")
            raise ConnectionClosedError("the peer does not read")
        self._write()

    async def wait_urgent_room(self) -> None:
        """Until not many small frames wait. Raises `ConnectionClosedError`."""
        while self._urgent_bytes >= MANY_URGENT_BYTES:
            if self.event_closed.is_set():
                raise ConnectionClosedError("the connection is closed")
            await self.taken.wait()

    @property
    def has_bulk_room(self) -> bool:
        """Whether a bulk frame would not have to wait for another."""
        return not self._bulk and not self._blocked

    async def wait_bulk_room(self) -> None:
        """Until the bulk frames before are on their way. Raises `ConnectionClosedError`."""
        while not self.has_bulk_room:
            if self.event_closed.is_set():
                raise ConnectionClosedError("the connection is closed")
            await self.taken.wait()

    def push_bulk(self, stream: YamuxStream, frame: bytes) -> None:
        """Queue a frame behind the bulk before it. Raises `ConnectionClosedError`."""
        if self.event_closed.is_set():
            raise ConnectionClosedError("the connection is closed")
        self._bulk.append((stream, frame))
        stream.queued += 1
        self._write()

    def _write(self) -> None:
        if not self._blocked:
            try:
                self._write_some()
            except ConnectionClosedError as error:
                self._fail(str(error))

    def _write_some(self) -> None:
        """Hand frames to the kernel until it takes no more."""
        socket = self.link.socket
        while True:
            while self._sending:
                sent = socket.send_now(self._sending)
                if sent == 0:
                    self._blocked = True
                    self._unblock.set()
                    return
                self._sending = self._sending[sent:]
            plaintext = self._next_plaintext()
            if plaintext is None:
                return
            self._sending = memoryview(self.link.seal(plaintext))

    def _next_plaintext(self) -> bytes | None:
        if self._urgent:
            frames = [self._urgent.popleft()]
            size = len(frames[0])
            while self._urgent and size + len(self._urgent[0]) <= MAX_PLAINTEXT_BYTES:
                frames.append(self._urgent.popleft())
                size += len(frames[-1])
            self._urgent_bytes -= size
            self.taken.set()
            return frames[0] if len(frames) == 1 else b"".join(frames)
        while self._bulk:
            stream, frame = self._bulk.popleft()
            stream.queued -= 1
            self.taken.set()
            if not stream.lost:
                return frame
        return None

    async def _write_when_possible(self) -> None:
        """Go on writing whenever the kernel, having taken no more, takes more again."""
        while True:
            await self._unblock.wait()
            self._unblock = trio.Event()
            with trio.move_on_after(WRITE_STALL_S) as stall:
                try:
                    await self.link.socket.wait_writable()
                    self._blocked = False
                    self._write_some()
                except ConnectionClosedError as error:
                    self._fail(str(error))
                    return
                if not self._blocked:
                    self.taken.set()
            if stall.cancelled_caught:
                self._fail(f"the peer took nothing for {WRITE_STALL_S:g} s")

    def _fail(self, why: str) -> None:
        """End the connection from a place that cannot wait."""
        if not self._ending:
            logger.info("the connection to %s ends: %s", self.peer_id, why)
        self._ending = True
        self._scope.cancel()

    # Reading.

    async def _read(self) -> None:
        while True:
            try:
                messages = await self.link.receive()
            except IOException as error:
                self._fail(str(error))
                return
            if not messages:
                return
            self.heard_s = trio.current_time()
            for message in messages:
                if not self._take_in(message):
                    return
            if self._ending:
                return

    def _take_in(self, message: bytes) -> bool:
        """Read the frames in a decrypted message; False if the connection is over."""
        view = memoryview(message)
        position = 0
        while position < len(view):
            if self._body_left:
                piece = view[position : position + self._body_left]
                position += len(piece)
                self._body_left -= len(piece)
                if not self._take_data(piece):
                    return False
                continue
            if self._head or len(view) - position < HEADER.size:
                needed = HEADER.size - len(self._head)
                self._head += bytes(view[position : position + needed])
                position += min(needed, len(view) - position)
                if len(self._head) < HEADER.size:
                    return True
                fields = HEADER.unpack(self._head)
                self._head = b""
            else:
                fields = HEADER.unpack_from(view, position)
                position += HEADER.size
            if not self._take_frame(*fields):
                return False
        return True

    def _take_frame(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> bool:
        if version != 0 or kind > GO_AWAY:
            self._fail(f"not yamux: version {version}, frame type {kind}")
        elif kind == GO_AWAY:
            self._ending = True
        elif kind == PING:
            self._take_ping(flags, length)
        else:
            stream = self._accept(stream_id) if flags & SYN else self.streams.get(stream_id)
            if kind == WINDOW_UPDATE:
                if stream is not None:
                    stream.open_window(length)
                    self._take_flags(stream, flags)
            elif length > MAX_FRAME_BYTES:
                self._fail(f"a frame of {length} bytes")
            elif length == 0:
                if stream is not None:
                    self._take_flags(stream, flags)
            else:
                self._body_of, self._body_left, self._body_flags = stream, length, flags
        return not self._ending

    def _take_data(self, piece: memoryview) -> bool:
        stream = self._body_of
        if stream is None:
            return True  # of a stream that was reset here: the peer did not know yet
        if not stream.take(piece) or self.unread_bytes > MAX_UNREAD_BYTES:
            self._fail("the peer sends more than flow control allows")
            return False
        if not self._body_left and self._body_flags:
            self._take_flags(stream, self._body_flags)
        return True

    def _take_flags(self, stream: YamuxStream, flags: int) -> None:
        if flags & RST:
            stream.lose()
        elif flags & FIN:
            stream.end_of_data()

    def _accept(self, stream_id: int) -> YamuxStream | None:
        """A stream that the peer opens; None if that cannot be."""
        theirs = stream_id % 2 == (0 if self._is_initiator else 1)
        if not theirs or stream_id == 0 or stream_id in self.streams:
            self._fail(f"the peer opened stream {stream_id}, which it may not")
            return None
        count = sum(1 for other in self.streams if other % 2 == stream_id % 2)
        if count >= MAX_STREAMS:
            self.push(HEADER.pack(0, WINDOW_UPDATE, RST, stream_id, 0))
            return None
        stream = YamuxStream(stream_id, self)
        self.streams[stream_id] = stream
        self.push(HEADER.pack(0, WINDOW_UPDATE, ACK, stream_id, 0))
        try:
            self._accept_send.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError):
            stream.abandon()
        return stream

    # Pings.

    def _take_ping(self, flags: int, number: int) -> None:
        if flags & SYN:
            self.push(HEADER.pack(0, PING, ACK, 0, number))
        elif flags & ACK and number == self._pings:
            self._pong.set()

    async def ping(self, timeout_s: float) -> bool:
        """Whether anything was heard from the peer within `timeout_s` of asking."""
        async with self._pinging:
            self._pong = trio.Event()
            self._pings = (self._pings + 1) % 2**32
            self.push(HEADER.pack(0, PING, SYN, 0, self._pings))
            asked_s = trio.current_time()
            with trio.move_on_after(timeout_s):
                await self._pong.wait()
                took_s = trio.current_time() - asked_s
                self.round_trip_s = min(self.round_trip_s or took_s, took_s)
            return self._pong.is_set() or self.heard_s >= asked_s

    async def _keep_alive(self) -> None:
        await trio.sleep(0.5)
        while True:
            try:
                alive = await self.ping(KEEPALIVE_TIMEOUT_S)
            except IOException:
                return  # the reading task sees the closed socket as well
            if not alive:
                self._fail(f"the peer is silent for {KEEPALIVE_TIMEOUT_S:g} s")
                return
            await trio.sleep(KEEPALIVE_INTERVAL_S)

    # What libp2p asks.

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.link.socket.get_remote_address()


class SteadyUpgrader(TransportUpgrader):
    """Makes `SteadyYamux`: libp2p's own upgrader names its Yamux class in the code."""

    uplink: Uplink

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        try:
            await self.muxer_multistream.select_transport(conn)
        except (MultiselectError, MultiselectClientError) as error:
            raise MuxerUpgradeFailure("failed to negotiate the multiplexer") from error
        return SteadyYamux(conn, peer_id, self.uplink)
