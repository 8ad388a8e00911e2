"""Giving chunks to others: a session for each downloader, and which chunk goes out next over all of them.

What a session's messages are is `peers.chunk_frames`'; docs/protocol.md has the rules. A chunk goes out in
pieces, one chunk at a time per session, and over all sessions as many at once as the uplink needs to be full:
whole chunks one after the other reach somebody who can pass them on sooner than many that crawl.
"""

import itertools
import logging
import math
import random
from collections import Counter
from functools import partial

import numpy as np
import trio

from peers.base import PeerId, Session, SessionEnded
from peers.chunk_frames import (
    ANY,
    CANCEL,
    LACK,
    MAX_INDICES,
    MAX_MESSAGE_BYTES,
    OPENING,
    REFUSAL,
    SPARE,
    WANT,
    BadFrame,
    Have,
    Holdings,
    Indices,
    Sealed,
    decode,
    encode_have,
    encode_holdings,
    encode_indices,
    encode_sealed,
    piece_head,
)
from peers.chunk_giving import Giving
from peers.chunk_shelf import ChunkFile, ChunkShelf
from peers.signal import Signal
from peers.swarm import Swarm
from peers.uplink import Order
from protocol.identity import node_name
from protocol.messages import ChunkSession
from protocol.refusals import RefusalReason, Refused

log = logging.getLogger(__name__)

CHUNK_PROTOCOL = "/swarmnode/chunk/1"

MAX_OPENING_BYTES = 4 * 1024
OPENING_TIMEOUT_S = 15.0

MAX_SESSIONS = 256
"""Downloaders served at once, over all files. One more is refused as `busy` and finds others to ask."""
MAX_SESSIONS_PER_PEER = 8

MAX_WANTS = 64
"""Chunks that one downloader may have asked for and not got."""

READ_BYTES = 256 * 1024
"""Read from disk at once, for each chunk that is going out."""


class _Served:
    """One file as it is served here."""

    def __init__(self, count: int, giving: Giving | None) -> None:
        self.count = count
        self.giving = giving
        self.sent = [0] * count
        """How often each chunk has gone out."""
        self.sessions = 0

    @property
    def gives(self) -> bool:
        return self.giving is not None and self.giving.active


class _Client:
    """One downloader's session: what it waits for."""

    def __init__(self, session: Session, name: bytes) -> None:
        self.session = session
        self.name = name
        self.served: _Served | None = None
        self.wants: dict[int, None] = {}
        self.spares: dict[int, None] = {}
        """Wanted if this node has nothing else to send."""
        self.any_wants = 0
        self.sending: int | None = None
        self.cancelled = False
        self.changed = Signal()
        self.served_at = 0.0
        self.news_left = 0

    @property
    def count(self) -> int:
        return 0 if self.served is None else self.served.count


class ChunkServer:
    """Serves a shelf to the swarm from its construction on."""

    def __init__(self, swarm: Swarm, shelf: ChunkShelf, *, rng: random.Random | None = None) -> None:
        self._swarm = swarm
        self._shelf = shelf
        self._rng = rng or random.Random()
        self._uplink = swarm.transport.uplink
        self._served: dict[bytes, _Served] = {}
        self._sessions = 0
        self._clients: set[_Client] = set()
        self._begun = itertools.count(1)
        self.bytes_served: Counter[PeerId] = Counter()
        swarm.transport.serve_sessions(
            CHUNK_PROTOCOL,
            self._serve,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_per_peer=MAX_SESSIONS_PER_PEER,
        )

    async def _serve(self, session: Session) -> None:
        self._sessions += 1
        client: _Client | None = None
        try:
            try:
                client = _Client(session, await self._opened(session))
                await self._converse(client)
            except* Refused as group:
                refused = group.exceptions[0]
                while isinstance(refused, BaseExceptionGroup):
                    refused = refused.exceptions[0]
                assert isinstance(refused, Refused)
                self._swarm.refuse(session.peer, refused.reason, refused.detail)
                await session.send(encode_sealed(REFUSAL, self._swarm.seal_refusal(refused)))
            except* SessionEnded:
                pass
        finally:
            self._sessions -= 1
            if client is not None and client.served is not None:
                self._left(client, client.served)

    async def _opened(self, session: Session) -> bytes:
        """The name of the file that the downloader wants. Raises `Refused`, `SessionEnded`."""
        with trio.move_on_after(OPENING_TIMEOUT_S):
            message = await session.receive()
            if message[:1] != bytes([OPENING]):
                raise Refused(RefusalReason.MALFORMED, "a chunk session begins with its opening")
            envelope = await self._swarm.admit(session.peer, bytes(message[1:]), MAX_OPENING_BYTES)
            if envelope.kind != "chunk_session":
                raise Refused(RefusalReason.WRONG_KIND, f"expected chunk_session, got {envelope.kind!r}")
            if self._sessions > MAX_SESSIONS:
                raise Refused(RefusalReason.BUSY, f"{MAX_SESSIONS} downloaders are served already")
            return ChunkSession.decode(envelope.body).file
        raise Refused(RefusalReason.MALFORMED, f"no opening within {OPENING_TIMEOUT_S:.0f} s")

    async def _converse(self, client: _Client) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, client)
            nursery.start_soon(self._upload, client)
            await self._listen(client)

    # What is here, told to the downloader.

    async def _tell(self, client: _Client) -> None:
        """Until the session ends: what is here at first, and then what comes."""
        file: ChunkFile | None = None
        told = 0
        gives = False
        while True:
            now = self._shelf.get(client.name)
            if now is not None and client.served is None:
                self._join(client, now)
            served = client.served
            if now is not None and served is not None:
                arrived, gave = now.arrived, gives
                gives = served.gives
                if now is not file or gave != gives or len(arrived) - told > MAX_INDICES:
                    held = np.zeros(served.count, dtype=np.bool_)
                    held[arrived] = True
                    file, told = now, len(arrived)
                    await client.session.send(encode_holdings(held, gives, self._load()))
                    if not gives:
                        await self._lack_any(client)
                    continue
                if len(arrived) > told:
                    known = now.held_by.get(client.session.peer)
                    news = [index for index in arrived[told:] if known is None or not known[index]]
                    told = len(arrived)
                    if news:
                        await client.session.send(encode_have(news, self._load()))
                        continue
            elif file is not None and served is not None:
                # The file is gone, for good or until it lies elsewhere.
                file, told, gives = None, 0, False
                client.wants.clear()
                client.spares.clear()
                nothing = np.zeros(served.count, dtype=np.bool_)
                await client.session.send(encode_holdings(nothing, False, self._load()))
                await self._lack_any(client)
                continue
            await self._shelf.changed.wait()

    async def _lack_any(self, client: _Client) -> None:
        """There is nothing more to choose for the downloader; what is on its way already still comes."""
        if client.any_wants:
            lacking, client.any_wants = [ANY] * client.any_wants, 0
            await client.session.send(encode_indices(LACK, lacking))

    def _join(self, client: _Client, file: ChunkFile) -> None:
        served = self._served.get(client.name)
        if served is None:
            count = file.layout.count
            # A node that has only just got the file itself has nothing that others lack.
            whole = len(file.arrived) == count
            served = _Served(count, Giving(count, self._rng) if whole else None)
            self._served[client.name] = served
        served.sessions += 1
        self._clients.add(client)
        if served.giving is not None:
            served.giving.join(client)
        client.news_left = 2 * served.count + MAX_INDICES
        client.served = served

    def _left(self, client: _Client, served: _Served) -> None:
        served.sessions -= 1
        self._clients.discard(client)
        if served.giving is not None:
            served.giving.leave(client)
        if served.sessions == 0:
            del self._served[client.name]

    # What the downloader says.

    async def _listen(self, client: _Client) -> None:
        while True:
            message = await client.session.receive()
            try:
                frame = decode(message, client.count)
            except BadFrame as error:
                raise Refused(RefusalReason.MALFORMED, str(error)) from error
            served = client.served
            if isinstance(frame, Sealed) or served is None:
                raise Refused(RefusalReason.MALFORMED, "this message has no place in the session")
            if isinstance(frame, Holdings):
                self._heard_holdings(client, served, np.flatnonzero(frame.held).tolist())
            elif isinstance(frame, Have):
                self._heard_holdings(client, served, list(frame.indices))
            elif not isinstance(frame, Indices):
                raise Refused(RefusalReason.MALFORMED, "a downloader sends no pieces")
            elif frame.kind == WANT:
                await self._heard_want(client, list(frame.indices), client.wants)
            elif frame.kind == SPARE:
                await self._heard_want(client, list(frame.indices), client.spares)
            elif frame.kind == CANCEL:
                self._heard_cancel(client, list(frame.indices))
            else:
                raise Refused(RefusalReason.MALFORMED, "a downloader has nothing to refuse")
            client.changed.set()

    def _heard_holdings(self, client: _Client, served: _Served, indices: list[int]) -> None:
        client.news_left -= len(indices) + 1
        if client.news_left < 0:
            raise Refused(RefusalReason.MALFORMED, "more news of chunks than the file has chunks")
        if served.giving is not None:
            gave = served.gives
            served.giving.reported(client, indices, trio.current_time())
            if gave != served.gives:
                self._shelf.changed.set()

    async def _heard_want(self, client: _Client, indices: list[int], wants: dict[int, None]) -> None:
        file = self._shelf.get(client.name)
        lacking: list[int] = []
        for index in indices:
            if index == ANY:
                if client.served is not None and client.served.gives:
                    client.any_wants += 1
                else:
                    lacking.append(ANY)
            elif file is None or not file.has(index):
                lacking.append(index)
            else:
                wants[index] = None
        if client.any_wants + len(client.wants) + len(client.spares) > MAX_WANTS:
            raise Refused(RefusalReason.OVERSIZED, f"more than {MAX_WANTS} chunks asked for at once")
        if lacking:
            await client.session.send(encode_indices(LACK, lacking))

    def _heard_cancel(self, client: _Client, indices: list[int]) -> None:
        for index in indices:
            if index == ANY:
                client.any_wants = max(0, client.any_wants - 1)
            elif index == client.sending:
                client.cancelled = True
            else:
                client.wants.pop(index, None)
                client.spares.pop(index, None)

    # What goes out.

    def _load(self) -> int:
        """How many chunks are waited for here."""
        return sum(len(client.wants) + client.any_wants for client in self._clients)

    def _order(self, client: _Client) -> Order:
        """How soon a chunk for this downloader should begin to go out, against those for others."""
        served = client.served
        if served is not None and client.any_wants and served.giving is not None:
            return (1.0, 0.0, served.giving.spread_s(client, trio.current_time()), client.served_at)
        if served is not None and client.wants:
            # The chunk that has gone out least: others will pass on those that have gone out more.
            return (1.0, 1.0, float(_least(served.sent, client.wants)), client.served_at)
        if served is not None and client.spares:
            return (2.0, float(_least(served.sent, client.spares)), client.served_at)
        return (math.inf,)

    def _choose(self, client: _Client) -> int | None:
        served = client.served
        if served is None:
            return None
        if client.any_wants and served.giving is not None:
            index = served.giving.take(client, trio.current_time())
            if index is not None:
                client.any_wants -= 1
                if not served.gives:
                    self._shelf.changed.set()
                return index
        wants = client.wants or client.spares
        if not wants:
            return None
        chosen = min(wants, key=served.sent.__getitem__)
        del wants[chosen]
        return chosen

    async def _upload(self, client: _Client) -> None:
        """Until the session ends: one chunk after the other, each begun when it is its turn."""
        while True:
            if not (client.wants or client.any_wants or client.spares):
                await client.changed.wait()
                continue
            piece_bytes = self._uplink.piece_bytes()
            await client.session.wait_bulk(piece_bytes)
            sending: _Sending | None = None
            async with self._uplink.turn(piece_bytes, partial(self._order, client)) as turn:
                index = self._choose(client)
                if index is not None:
                    client.sending, client.cancelled = index, False
                    client.served_at = trio.current_time()
                    sending = _Sending(client, index, self._shelf.get(client.name))
                    turn.sent_bytes = await self._send_piece(sending, piece_bytes)
            if sending is None:
                await self._lack_any(client)
                continue
            await self._send_rest(sending)
            client.sending = None

    async def _send_rest(self, sending: "_Sending") -> None:
        client = sending.client
        order = partial(_begun, float(next(self._begun)))
        while sending.unfinished:
            await sending.fill()
            piece_bytes = self._uplink.piece_bytes()
            await client.session.wait_bulk(piece_bytes)
            async with self._uplink.turn(piece_bytes, order) as turn:
                turn.sent_bytes = await self._send_piece(sending, piece_bytes)
        if sending.failed:
            await client.session.send(encode_indices(LACK, [sending.index]))
        elif client.served is not None and not client.cancelled:
            client.served.sent[sending.index] += 1

    async def _send_piece(self, sending: "_Sending", piece_bytes: int) -> int:
        """Send the next piece; its size, 0 if the chunk turned out to be over."""
        client = sending.client
        await sending.fill()
        if not sending.unfinished:
            return 0
        piece = sending.take(piece_bytes)
        await client.session.send_bulk(
            piece_head(sending.index, sending.offset - len(piece), self._load()), piece
        )
        self.bytes_served[client.session.peer] += len(piece)
        return len(piece)


def _least(sent: list[int], wants: dict[int, None]) -> int:
    return min([sent[index] for index in wants])


def _begun(number: float) -> Order:
    """What has begun to go out goes before what has not, the earliest first."""
    return (0.0, number)


class _Sending:
    """A chunk on its way out, read from disk as it goes."""

    def __init__(self, client: _Client, index: int, file: ChunkFile | None) -> None:
        self.client = client
        self.index = index
        self.offset = 0
        self.failed = file is None
        self._file = file
        self._size = 0 if file is None else file.layout.length(index)
        self._read = memoryview(b"")

    @property
    def unfinished(self) -> bool:
        return not self.failed and not self.client.cancelled and self.offset < self._size

    async def fill(self) -> None:
        """Have something to take, unless it is finished or fails."""
        if self._read or not self.unfinished or self._file is None:
            return
        try:
            data = await self._file.read(self.index, self.offset, READ_BYTES)
        except (KeyError, OSError) as error:
            # Deleted or closed meanwhile: an old version's time is over.
            log.info("a chunk for %s could not be read: %s", node_name(self.client.session.peer), error)
            self.failed = True
            return
        self._read = memoryview(data)
        self.failed = not data

    def take(self, size_bytes: int) -> memoryview:
        piece = self._read[:size_bytes]
        self._read = self._read[size_bytes:]
        self.offset += len(piece)
        return piece
