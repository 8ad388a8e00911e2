"""Sessions on libp2p streams: each message is one frame of the multiplexer, 4 bytes of length before it."""

import logging
import struct
from collections import Counter

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.utils import encode_delim

from peers.base import PeerId, PeerUnreachable, SessionEnded, SessionHandler
from peers.libp2p_address import peer_id_from_multihash
from peers.libp2p_services import BoundedCommunicator, GuardedHost, end_stream
from peers.libp2p_yamux_stream import YamuxStream

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")

_STREAM_ERRORS = (IOException, MuxedStreamError, MultiselectCommunicatorError)


class StreamSession:
    """See `Session`. Small messages overtake bulk at the bounds of messages: each is a frame of its own."""

    def __init__(self, stream: INetStream, max_message_bytes: int, protocol: str | None) -> None:
        """`protocol`: what the peer has yet to confirm that it serves; None on its side."""
        muxed = stream.muxed_stream  # type: ignore[attr-defined]  # NetStream's
        assert isinstance(muxed, YamuxStream)
        self._stream = stream
        self._muxed = muxed
        self._max_message_bytes = max_message_bytes
        self._unconfirmed = protocol
        self._opened_here = protocol is not None
        self._peer = peer_id_from_multihash(muxed.connection.peer_id.to_bytes())
        self._rest = memoryview(b"")

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def round_trip_s(self) -> float:
        return self._muxed.connection.round_trip_s

    async def send(self, message: bytes) -> None:
        """See `Session`."""
        await trio.lowlevel.checkpoint()
        try:
            await self._muxed.connection.wait_urgent_room()
            await self._muxed.wait_window(len(message) + _LENGTH.size)
            self._muxed.push(_LENGTH.pack(len(message)), message, bulk=False)
        except _STREAM_ERRORS as error:
            raise SessionEnded(f"the session is over: {error}") from error

    async def wait_bulk(self, size_bytes: int) -> None:
        """See `Session`."""
        try:
            while self._muxed.send_window < size_bytes + 64 or not self._muxed.connection.has_bulk_room:
                await self._muxed.wait_window(size_bytes + 64)
                await self._muxed.connection.wait_bulk_room()
        except _STREAM_ERRORS as error:
            raise SessionEnded(f"the session is over: {error}") from error

    async def send_bulk(self, head: bytes, body: bytes | memoryview) -> None:
        """See `Session`."""
        size = len(head) + len(body)
        try:
            await self._muxed.wait_window(size + _LENGTH.size)
            self._muxed.push(_LENGTH.pack(size), head, body, bulk=True)
        except _STREAM_ERRORS as error:
            raise SessionEnded(f"the session is over: {error}") from error

    async def receive(self) -> bytes | memoryview:
        """See `Session`."""
        try:
            await self._confirm()
            rest = self._rest or await self._muxed.read_piece()
            while len(rest) < _LENGTH.size:
                rest = memoryview(bytes(rest) + bytes(await self._muxed.read_piece()))
            (size,) = _LENGTH.unpack_from(rest)
            if size > self._max_message_bytes:
                raise SessionEnded(
                    f"the peer announced {size:,} bytes, allowed are {self._max_message_bytes:,}"
                )
            end = _LENGTH.size + size
            if len(rest) < end:
                rest = await self._assemble(rest, end)
        except _STREAM_ERRORS as error:
            raise SessionEnded(f"the session is over: {error}") from error
        self._rest = rest[end:]
        return rest[_LENGTH.size : end]

    async def _assemble(self, first: memoryview, size_bytes: int) -> memoryview:
        """A message that came in several pieces, as another implementation may send it."""
        data = bytearray(first)
        while len(data) < size_bytes:
            data += await self._muxed.read_piece()
        return memoryview(bytes(data))

    async def _confirm(self) -> None:
        if self._unconfirmed is None:
            return
        lines = BoundedCommunicator(self._stream)
        if await lines.read() != MULTISELECT_PROTOCOL_ID or await lines.read() != self._unconfirmed:
            raise SessionEnded(f"the peer does not serve {self._unconfirmed}")
        self._unconfirmed = None

    async def aclose(self) -> None:
        """See `Session`."""
        self._muxed.stop_reading()
        await end_stream(self._stream, ok=not self._opened_here and not self._muxed.lost)


async def open_session(
    host: GuardedHost, peer_id: ID, protocol: str, max_message_bytes: int
) -> StreamSession:
    """Open a stream and ask for `protocol`; that it is served shows with the first message received."""
    try:
        stream = await host.open_stream(peer_id)
    except (SwarmException, IOException, MuxedStreamError) as error:
        raise PeerUnreachable(f"no stream to {peer_id} could be opened: {error}") from error
    try:
        hello = encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode())
        stream.set_protocol(TProtocol(protocol))
        await stream.write(hello)
    except BaseException as error:
        await end_stream(stream, ok=False)
        if isinstance(error, IOException):
            raise PeerUnreachable(f"the connection to {peer_id} closed: {error}") from error
        raise
    return StreamSession(stream, max_message_bytes, protocol)


class SessionServer:
    """Serves the sessions of one protocol; whatever goes wrong ends that session and is counted."""

    def __init__(
        self, handler: SessionHandler, max_message_bytes: int, max_per_peer: int, counters: Counter[str]
    ) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._max_per_peer = max_per_peer
        self._counters = counters
        self._open: Counter[PeerId] = Counter()

    async def __call__(self, stream: INetStream) -> None:
        session = StreamSession(stream, self._max_message_bytes, None)
        if self._open[session.peer] >= self._max_per_peer:
            self._counters["session_refused_too_many"] += 1
            await end_stream(stream, ok=False)
            return
        self._open[session.peer] += 1
        try:
            await self._handler(session)
        except Exception:
            self._counters["handler_failed"] += 1
            logger.warning("a session's handler failed; the session was closed", exc_info=True)
        finally:
            self._open[session.peer] -= 1
            if self._open[session.peer] <= 0:
                del self._open[session.peer]
            await session.aclose()
