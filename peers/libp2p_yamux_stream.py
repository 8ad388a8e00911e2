"""One stream of a multiplexed connection: its two windows, and what came that nobody has read yet."""

import struct
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedStream
from libp2p.io.exceptions import IOException
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from peers.signal import Signal
from peers.uplink import MIN_PIECE_BYTES, Order

if TYPE_CHECKING:
    from peers.libp2p_yamux import SteadyYamux

FIRST_WINDOW_BYTES = 256 * 1024
"""The specification's: what may be sent before the receiver says more."""

MAX_WINDOW_BYTES = 4 * 1024 * 1024
"""A window that its reader empties within two round trips is doubled, up to this."""

STALL_S = 30.0
"""A peer that opens no window for this long loses the stream."""

_HEADER = struct.Struct("!BBHII")
_DATA, _WINDOW_UPDATE = 0, 1
_FIN, _RST = 4, 8


def _call_order() -> Order:
    """Requests and answers go before chunks."""
    return (-1.0,)


class YamuxStream(IMuxedStream):
    """See `SteadyYamux`, its connection. One task reads; several may write."""

    def __init__(self, stream_id: int, connection: "SteadyYamux") -> None:
        self.stream_id = stream_id
        self.muxed_conn = connection
        self.connection = connection
        self.send_window = FIRST_WINDOW_BYTES
        self.closed = False
        self.send_closed = False
        self.queued = 0
        """Frames of this stream that wait in the connection's bulk queue."""
        self.received_bytes = 0
        self._inbox: deque[memoryview] = deque()
        self._window = FIRST_WINDOW_BYTES
        self._receivable = FIRST_WINDOW_BYTES
        """What the peer may send still."""
        self._read_bytes = 0
        """Read since the peer was last told that it may send more."""
        self._told_s = trio.current_time()
        self._ended = False
        self._discarding = False
        self.lost = False
        self._arrived = Signal()
        self._opened = Signal()

    # What the connection brings.

    def take(self, piece: memoryview) -> bool:
        """Data came; False if it is more than the window allows."""
        self._receivable -= len(piece)
        self.received_bytes += len(piece)
        if self._receivable < 0:
            return False
        if not self.lost and not self._discarding:
            self._inbox.append(piece)
            self.connection.unread_bytes += len(piece)
            self._arrived.set()
        return True

    def open_window(self, size_bytes: int) -> None:
        """The peer takes so much more."""
        self.send_window += size_bytes
        self._opened.set()

    def end_of_data(self) -> None:
        """The peer sends nothing more."""
        self._ended = True
        self._arrived.set()
        self._forget_if_over()

    def lose(self) -> None:
        """The peer, or the connection, ended both directions. What came before can still be read."""
        if not self.lost:
            self.connection.unread_bytes -= sum(map(len, self._inbox))
        self.lost = self.closed = self.send_closed = True
        self._arrived.set()
        self._opened.set()
        self.connection.forget(self)

    # Reading.

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes (None: what is there), at least one. Raises `MuxedStreamEOF`,
        `MuxedStreamReset`."""
        piece = await self.read_piece()
        if n is not None and 0 <= n < len(piece):
            self._put_back(piece[n:])
            piece = piece[:n]
        return bytes(piece)

    async def read_piece(self) -> memoryview:
        """The next piece as it came, without a copy. Raises `MuxedStreamEOF`, `MuxedStreamReset`."""
        while not self._inbox:
            if self.lost:
                raise MuxedStreamReset("the stream was reset")
            if self._ended:
                raise MuxedStreamEOF("the peer has sent all")
            await self._arrived.wait()
        piece = self._inbox.popleft()
        self._note_read(len(piece))
        return piece

    def _put_back(self, rest: memoryview) -> None:
        self._inbox.appendleft(rest)
        self._read_bytes -= len(rest)
        if not self.lost:
            self.connection.unread_bytes += len(rest)

    def _note_read(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        if self.lost:
            return
        self.connection.unread_bytes -= size_bytes
        if self._read_bytes < self._window // 2 or self._ended:
            return
        now_s = trio.current_time()
        more = self._read_bytes
        if now_s - self._told_s < 2 * self.connection.round_trip_s and self._window < MAX_WINDOW_BYTES:
            more += self._window
            self._window *= 2
        self._told_s = now_s
        self._read_bytes = 0
        self._receivable += more
        self.connection.push(_HEADER.pack(0, _WINDOW_UPDATE, 0, self.stream_id, more))

    # Writing.

    async def write(self, data: bytes) -> None:
        """Send all of `data`: at once and ahead of bulk if it is small, else as bulk, piece by piece.

        Cancelled, it may have sent some of it: reset the stream then. Raises `MuxedStreamError`,
        `IOException`.
        """
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        if len(view) <= MIN_PIECE_BYTES:
            while view:
                await self.wait_window(1)
                await self.connection.wait_urgent_room()
                view = self._push_some(view, len(view))
            return
        uplink = self.connection.uplink
        while view:
            await self.wait_window(1)
            await self.connection.wait_bulk_room()
            size = min(self.send_window, uplink.piece_bytes(), len(view))
            if size > 0:
                async with uplink.turn(size, _call_order, capped=False):
                    view = self._push_some(view, size)

    def _push_some(self, view: memoryview, size_bytes: int) -> memoryview:
        """Send at most so much of `view`; returns the rest."""
        piece = view[: min(self.send_window, size_bytes)]
        if piece:
            self.push(piece, bulk=len(view) > MIN_PIECE_BYTES or self.queued > 0)
        return view[len(piece) :]

    async def wait_window(self, size_bytes: int) -> None:
        """Until the peer takes so many bytes. Raises `MuxedStreamError` if it takes nothing for long."""
        deadline_s = trio.current_time() + STALL_S
        while self.send_window < size_bytes:
            self._require_open()
            with trio.move_on_at(deadline_s) as stalled:
                before = self.send_window
                await self._opened.wait()
                if self.send_window > before:
                    deadline_s = trio.current_time() + STALL_S
            if stalled.cancelled_caught:
                raise MuxedStreamError(f"the other side took nothing for {STALL_S:g} s")
        self._require_open()

    def push(self, *parts: bytes | memoryview, bulk: bool) -> None:
        """Send one frame, for which there is room in the window. Raises `IOException`.

        One that is not bulk overtakes those of this stream that still wait as bulk.
        """
        size = sum(map(len, parts))
        self.send_window -= size
        frame = b"".join((_HEADER.pack(0, _DATA, 0, self.stream_id, size), *parts))
        if bulk:
            self.connection.push_bulk(self, frame)
        else:
            self.connection.push(frame)

    def _require_open(self) -> None:
        if self.lost:
            raise MuxedStreamReset("the stream was reset")
        if self.send_closed:
            raise MuxedStreamError("the stream is closed for writing")

    # Ending.

    async def close(self) -> None:
        """Send nothing more; what the peer sends can still be read."""
        await trio.lowlevel.checkpoint()
        if not self.send_closed:
            self.send_closed = True
            self._tell(_FIN)
            self._forget_if_over()

    def stop_reading(self) -> None:
        """Drop what is unread and what comes still; the peer's window stays shut."""
        self._discarding = True
        self._drop_unread()

    async def reset(self) -> None:
        """End both directions, dropping what is unread."""
        await trio.lowlevel.checkpoint()
        self.abandon()

    def abandon(self) -> None:
        """`reset`, without waiting."""
        if not self.lost:
            self._tell(_RST)
            self.lose()
        self._inbox.clear()

    def _tell(self, flag: int) -> None:
        frame = _HEADER.pack(0, _WINDOW_UPDATE, flag, self.stream_id, 0)
        try:
            if flag == _FIN and self.queued:
                self.connection.push_bulk(self, frame)
            else:
                self.connection.push(frame)
        except IOException:
            self.lost = True  # the connection is gone, and the stream with it

    def _forget_if_over(self) -> None:
        """Nothing can come any more, and nothing will be sent; what is unread can still be read."""
        if self.send_closed and self._ended:
            self.closed = True
            self.connection.forget(self)

    def _drop_unread(self) -> None:
        if not self.lost:
            self.connection.unread_bytes -= sum(map(len, self._inbox))
        self._inbox.clear()

    # What libp2p asks.

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.connection.get_remote_address()

    async def __aenter__(self) -> "YamuxStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
