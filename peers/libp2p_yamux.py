"""libp2p's stream multiplexer, made safe to cancel, bounded in memory, and able to notice a dead peer."""

import logging
import struct
from typing import Any

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.stream_muxer.yamux.yamux import FLAG_SYN, TYPE_PING, YAMUX_HEADER_FORMAT, Yamux, YamuxStream
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

logger = logging.getLogger(__name__)

WRITE_STALL_S = 30.0
"""A connection whose socket takes no frame (64 KiB at most) for this long is dead."""

KEEPALIVE_INTERVAL_S = 15.0
KEEPALIVE_TIMEOUT_S = 20.0
"""A peer that sends nothing at all, not even the answer to a ping, for this long is dead."""

PIECE_BYTES = 64 * 1024 - 64
"""The largest piece of bulk data: one yamux frame in one Noise message."""

MIN_PIECE_BYTES = 4 * 1024
PIECE_S = 0.05
"""How long the socket should need to take one piece of bulk data: control frames wait that long behind it."""

MAX_FRAME_BYTES = 1024 * 1024
"""libp2p implementations send at most 64 KiB to 256 KiB in one frame."""

MAX_REPLIES = 4096
"""Frames of 12 bytes that may wait to be written in answer to the peer's."""

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""What one connection may hold for streams that have not read it yet, in all."""


class _WatchedConnection:
    """Passes everything on and remembers when the peer was last heard."""

    def __init__(self, inner: ISecureConn) -> None:
        self._inner = inner
        self.heard_at = trio.current_time()

    async def read(self, n: int | None = None) -> bytes:
        data = await self._inner.read(n)
        self.heard_at = trio.current_time()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SteadyYamux(Yamux):
    """One connection's streams.

    * A frame is written whole or the connection ends: a cancelled write would put Noise out of step for all.
    * The reading task never waits for a write: two nodes with full sockets would wait for each other.
    * Unread data and frame sizes are bounded: the sender's side of flow control is not to be trusted.
    * The peer is pinged every `KEEPALIVE_INTERVAL_S`; silence closes the connection.
    """

    def __init__(self, secured: ISecureConn, peer_id: ID) -> None:
        self._watched = _WatchedConnection(secured)
        super().__init__(self._watched, peer_id, is_initiator=secured.is_initiator)  # type: ignore[arg-type]
        self._pinging = trio.Lock()
        self._reader: trio.lowlevel.Task | None = None
        self._replies: list[bytes] = []
        self._replies_waiting = trio.Event()
        self._seconds_per_byte = 0.0
        self.bulk = trio.Lock()
        """Held for each piece of bulk data, so that only one at a time competes with control frames."""

    async def abort(self) -> None:
        """Close the socket; the reading task then ends every stream."""
        await self.secured_conn.close()

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        assert self._nursery is not None, "start() opens it before it starts this task"
        self._nursery.start_soon(self._send_replies)
        await super().handle_incoming()

    async def _write_frame(self, data: bytes) -> None:
        if trio.lowlevel.current_task() is not self._reader:
            await self._write_now(data)
        elif len(self._replies) < MAX_REPLIES:
            self._replies.append(data)
            self._replies_waiting.set()
        else:
            await self.abort()
            raise ConnectionClosedError("the peer asks without reading the answers")

    async def _send_replies(self) -> None:
        """Write what the reading task has to say: acknowledgements, resets, pongs."""
        while True:
            await self._replies_waiting.wait()
            self._replies_waiting = trio.Event()
            frames, self._replies = b"".join(self._replies), []
            try:
                await self._write_now(frames)
            except IOException:
                return  # the reading task sees the closed socket as well

    async def _write_now(self, data: bytes) -> None:
        async with self._write_lock:
            began = trio.current_time()
            with trio.move_on_after(WRITE_STALL_S) as stall:
                stall.shield = True
                await self.secured_conn.write(data)
            if len(data) > MIN_PIECE_BYTES:
                pace = (trio.current_time() - began) / len(data)
                self._seconds_per_byte += (pace - self._seconds_per_byte) / 4
            if stall.cancelled_caught:
                await self.abort()
                raise ConnectionClosedError(f"the peer took nothing for {WRITE_STALL_S:g} s")
        await trio.lowlevel.checkpoint()

    async def forget(self, stream: YamuxStream) -> None:
        """Drop a reset stream with its unread data, which libp2p would keep for a minute and more."""
        async with self.streams_lock:
            self.stream_buffers.pop(stream.stream_id, None)
            self._finalize_stream_locked(stream, fully_closed=True)

    async def _read_data_body(self, length: int) -> bytes:
        unread = sum(len(buffer) for buffer in self.stream_buffers.values())
        if length > MAX_FRAME_BYTES or unread + length > MAX_UNREAD_BYTES:
            logger.warning(
                "peer %s sends more than flow control allows; closing its connection", self.peer_id
            )
            # The one error on which the reading task closes the connection instead of reading on.
            raise trio.TooSlowError
        return await super()._read_data_body(length)

    @property
    def piece_bytes(self) -> int:
        """How much bulk data to write at once on a link of the speed seen lately."""
        if self._seconds_per_byte * PIECE_BYTES <= PIECE_S:
            return PIECE_BYTES
        return max(MIN_PIECE_BYTES + 1, int(PIECE_S / self._seconds_per_byte))

    async def ping(self, timeout_s: float) -> bool:
        """Whether anything was heard from the peer within `timeout_s` of asking."""
        async with self._pinging:
            self._ping_event = trio.Event()
            self._ping_id = (self._ping_id + 1) % 2**32
            header = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, self._ping_id)
            await self._write_frame(header)
            self._ping_sent_time = trio.current_time()
            with trio.move_on_after(timeout_s):
                await self._ping_event.wait()
            return self._ping_event.is_set() or self._watched.heard_at >= self._ping_sent_time

    async def _measure_rtt_loop(self) -> None:
        await trio.sleep(0.5)
        while not self.event_shutting_down.is_set():
            try:
                alive = await self.ping(KEEPALIVE_TIMEOUT_S)
            except IOException:
                return  # the reading task sees the closed socket as well
            if not alive:
                logger.info("peer %s is silent for %g s; closing", self.peer_id, KEEPALIVE_TIMEOUT_S)
                await self.abort()
                return
            with trio.move_on_after(KEEPALIVE_INTERVAL_S):
                await self.event_shutting_down.wait()


class SteadyUpgrader(TransportUpgrader):
    """Makes `SteadyYamux`: libp2p's own upgrader names its Yamux class in the code."""

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        try:
            await self.muxer_multistream.select_transport(conn)
        except (MultiselectError, MultiselectClientError) as error:
            raise MuxerUpgradeFailure("failed to negotiate the multiplexer") from error
        return SteadyYamux(conn, peer_id)
