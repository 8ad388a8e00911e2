"""One question and one answer on a stream: 4-byte big-endian length, then that many bytes, each way."""

import logging
from collections import Counter

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID
from libp2p.utils import encode_delim

from peers.base import Handler, PeerUnreachable, ResponseTooLarge, TransportError
from peers.libp2p_address import peer_id_from_multihash
from peers.libp2p_services import BoundedCommunicator, GuardedHost, end_stream
from peers.libp2p_yamux_stream import STALL_S
from peers.request_gate import HANDLER_TIMEOUT_S, GateFull, RequestGate

logger = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 15.0
MIN_RATE_BYTES_PER_S = 16 * 1024
"""A stream that moves slower than this, after a grace of `STALL_S`, is given up."""


class TooLarge(Exception):
    """The announced length is over the limit; nothing was read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def transfer_timeout_s(size: int) -> float:
    """How long `size` bytes may take on the slowest link that is served."""
    return STALL_S + size / MIN_RATE_BYTES_PER_S


async def send_frame(stream: INetStream, payload: bytes, *, before: bytes = b"") -> None:
    """Write `before`, the length, `payload`. Raises IOException if the stream breaks or the peer stalls."""
    await stream.write(b"".join((before, len(payload).to_bytes(4, "big"), payload)))


async def receive_length(stream: INetStream, limit: int) -> int:
    """The announced length of the next frame. Raises `TooLarge` if it is over `limit`."""
    size = int.from_bytes(await _receive(stream, 4), "big")
    if size > limit:
        raise TooLarge(size)
    return size


async def _receive(stream: INetStream, size: int) -> bytes:
    """Exactly `size` bytes; memory grows with what arrives, not with what was announced."""
    data = bytearray()
    while len(data) < size:
        piece = await stream.read(min(64 * 1024, size - len(data)))
        if not piece:
            raise IOException("the stream ended early")
        data += piece
    return bytes(data)


async def ask(
    host: GuardedHost, peer_id: ID, protocol: str, payload: bytes, max_response_bytes: int
) -> bytes:
    """Open a stream, send `payload`, return the answer. Raises as `Transport.request`; never times out."""
    ok = False
    try:
        stream = await host.open_stream(peer_id)
    except (SwarmException, IOException) as error:
        raise PeerUnreachable(f"no stream to {peer_id} could be opened: {error}") from error
    try:
        # The negotiation and the question leave together: one round trip instead of three.
        hello = encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode())
        stream.set_protocol(TProtocol(protocol))
        await send_frame(stream, payload, before=hello)
        lines = BoundedCommunicator(stream)
        if await lines.read() != MULTISELECT_PROTOCOL_ID or await lines.read() != protocol:
            raise TransportError(f"{peer_id} does not serve {protocol}")
        response = await _receive(stream, await receive_length(stream, max_response_bytes))
        ok = True
        return response
    except TooLarge as error:
        text = f"{peer_id} announced {error.size:,} bytes, allowed are {max_response_bytes:,}"
        raise ResponseTooLarge(text) from error
    except (IOException, MultiselectCommunicatorError) as error:
        if stream.muxed_conn.is_closed:
            raise PeerUnreachable(f"the connection to {peer_id} closed during the request") from error
        raise TransportError(f"{peer_id} closed the stream of {protocol} without an answer") from error
    finally:
        await end_stream(stream, ok=ok)


class RequestServer:
    """Answers the requests of one protocol; whatever goes wrong ends that stream and is counted."""

    def __init__(
        self, handler: Handler, max_request_bytes: int, max_concurrent: int, counters: Counter[str]
    ) -> None:
        self._handler = handler
        self._max_request_bytes = max_request_bytes
        self._gate = RequestGate(max_concurrent)
        self._counters = counters

    async def __call__(self, stream: INetStream) -> None:
        ok = False
        try:
            ok = await self._serve(stream)
        except TooLarge:
            self._counters["request_too_large"] += 1
        except GateFull:
            self._counters["request_refused_busy"] += 1
        except trio.TooSlowError:
            self._counters["request_stalled"] += 1
        except IOException:
            self._counters["request_abandoned"] += 1
        finally:
            await end_stream(stream, ok=ok)

    async def _serve(self, stream: INetStream) -> bool:
        peer = peer_id_from_multihash(stream.muxed_conn.peer_id.to_bytes())
        with trio.fail_after(HEADER_TIMEOUT_S):
            size = await receive_length(stream, self._max_request_bytes)
        async with self._gate.enter(peer):
            with trio.fail_after(transfer_timeout_s(size)):
                request = await _receive(stream, size)
            try:
                with trio.fail_after(HANDLER_TIMEOUT_S):
                    response = await self._handler(peer, request)
            except Exception:
                self._counters["handler_failed"] += 1
                logger.warning("a request handler failed; its stream was closed", exc_info=True)
                return False
            with trio.fail_after(transfer_timeout_s(len(response))):
                await send_frame(stream, response)
        return True
