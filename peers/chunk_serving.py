"""Giving chunks to others: a session for each downloader, and which chunk goes out next over all of them.

What a session's messages are is `peers.chunk_frames`'; docs/protocol.md has the rules. A chunk goes out in
pieces, one chunk at a time per session, and over all sessions as many at once as the uplink needs to be full:
whole chunks one after the other reach somebody who can pass them on sooner than many that crawl.
"""

import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from functools import partial

import numpy as np
import trio

from peers.base import PeerId, Session, SessionEnded
from peers.chunk_client import Client, Sending, ServedFile
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
from peers.signal import first_cause
from peers.swarm import Swarm
from peers.uplink import Order
from protocol.messages import ChunkSession
from protocol.refusals import RefusalReason, Refused

CHUNK_PROTOCOL = "/swarmnode/chunk/1"

MAX_OPENING_BYTES = 4 * 1024
OPENING_TIMEOUT_S = 15.0

MAX_SESSIONS = 256
"""Downloaders served at once, over all files. One more is refused as `busy` and finds others to ask, unless
one has wanted nothing for this long:"""
IDLE_S = 30.0

MAX_SESSIONS_PER_PEER = 8

MAX_WANTS = 64
"""Chunks that one downloader may have asked for and not got."""


class ChunkServer:
    """Serves a shelf to the swarm from its construction on."""

    def __init__(self, swarm: Swarm, shelf: ChunkShelf, *, rng: random.Random | None = None) -> None:
        self._swarm = swarm
        self._shelf = shelf
        self._rng = rng or random.Random()
        self._uplink = swarm.transport.uplink
        self._served: dict[bytes, ServedFile] = {}
        self._clients: set[Client] = set()
        self._begun = itertools.count(1)
        self.bytes_served: Counter[PeerId] = Counter()
        swarm.transport.serve_sessions(
            CHUNK_PROTOCOL,
            self._serve,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_per_peer=MAX_SESSIONS_PER_PEER,
        )

    async def _serve(self, session: Session) -> None:
        client: Client | None = None
        try:
            client = await self._opened(session)
            with client.scope:
                await self._converse(client)
        except* Refused as group:
            refused = first_cause(group)
            assert isinstance(refused, Refused)
            self._swarm.refuse(session.peer, refused.reason, refused.detail)
            with suppress(SessionEnded):
                await session.send(encode_sealed(REFUSAL, self._swarm.seal_refusal(refused)))
        except* SessionEnded:
            pass
        finally:
            if client is not None:
                self._left(client)

    async def _opened(self, session: Session) -> Client:
        """The downloader, once it has said what it wants. Raises `Refused`, `SessionEnded`."""
        with trio.move_on_after(OPENING_TIMEOUT_S):
            message = await session.receive()
            if message[:1] != bytes([OPENING]):
                raise Refused(RefusalReason.MALFORMED, "a chunk session begins with its opening")
            envelope = await self._swarm.admit(session.peer, bytes(message[1:]), MAX_OPENING_BYTES)
            if envelope.kind != "chunk_session":
                raise Refused(RefusalReason.WRONG_KIND, f"expected chunk_session, got {envelope.kind!r}")
            client = Client(session, ChunkSession.decode(envelope.body).file)
            self._make_place()
            self._clients.add(client)
            return client
        raise Refused(RefusalReason.MALFORMED, f"no opening within {OPENING_TIMEOUT_S:.0f} s")

    def _make_place(self) -> None:
        """End the session that has wanted nothing for longest if there are too many. Raises `Refused`."""
        if len(self._clients) < MAX_SESSIONS:
            return
        idle = [c for c in self._clients if not c.is_waiting and c.sending is None]
        longest = min(idle, key=lambda client: client.asked_s, default=None)
        if longest is None or trio.current_time() - longest.asked_s < IDLE_S:
            raise Refused(RefusalReason.BUSY, f"{MAX_SESSIONS} downloaders are served already")
        longest.scope.cancel()
        self._clients.discard(longest)

    async def _converse(self, client: Client) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, client)
            nursery.start_soon(self._upload, client)
            await self._listen(client)

    # What is here, told to the downloader.

    async def _tell(self, client: Client) -> None:
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
                    known = now.held_by.get(client.peer)
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

    async def _lack_any(self, client: Client) -> None:
        """There is nothing more to choose for the downloader; what is on its way already still comes."""
        if client.any_wants:
            lacking, client.any_wants = [ANY] * client.any_wants, 0
            await client.session.send(encode_indices(LACK, lacking))

    def _join(self, client: Client, file: ChunkFile) -> None:
        served = self._served.get(client.name)
        if served is None:
            count = file.layout.count
            # A node that has only just got the file itself has nothing that others lack.
            whole = len(file.arrived) == count
            served = ServedFile(count, Giving(count, self._rng) if whole else None)
            self._served[client.name] = served
        served.sessions += 1
        if served.giving is not None:
            served.giving.join(client.peer)
        client.news_left = served.count + MAX_INDICES
        client.served = served

    def _left(self, client: Client) -> None:
        self._clients.discard(client)
        served = client.served
        if served is None:
            return
        served.sessions -= 1
        # One that is still connected has finished, most likely, and serves what it has.
        still_here = self._swarm.transport.connected_peers()
        still_here |= {other.peer for other in self._clients if other.served is served}
        if served.giving is not None and client.peer not in still_here:
            served.giving.leave(client.peer)
        if served.sessions == 0:
            del self._served[client.name]

    # What the downloader says.

    async def _listen(self, client: Client) -> None:
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

    def _heard_holdings(self, client: Client, served: ServedFile, indices: list[int]) -> None:
        client.news_left -= len(indices) + 1
        if client.news_left < 0:
            raise Refused(RefusalReason.MALFORMED, "more news of chunks than the file has chunks")
        if served.giving is not None:
            gave = served.gives
            served.giving.reported(client.peer, indices, trio.current_time())
            if gave != served.gives:
                self._shelf.changed.set()

    async def _heard_want(self, client: Client, indices: list[int], wants: dict[int, None]) -> None:
        client.asked_s = trio.current_time()
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

    def _heard_cancel(self, client: Client, indices: list[int]) -> None:
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

    def _order(self, client: Client) -> Order:
        """How soon a chunk for this downloader should begin to go out, against those for others."""
        served = client.served
        if served is not None and client.any_wants and served.giving is not None:
            return (1.0, 0.0, served.giving.spread_s(client.peer, trio.current_time()), client.served_s)
        if served is not None and client.wants:
            # The chunk that has gone out least: others will pass on those that have gone out more.
            return (1.0, 1.0, float(_least(served.sent, client.wants)), client.served_s)
        if served is not None and client.spares:
            return (2.0, float(_least(served.sent, client.spares)), client.served_s)
        return (math.inf,)

    def _choose(self, client: Client) -> int | None:
        served = client.served
        if served is None:
            return None
        if client.any_wants and served.giving is not None:
            index = served.giving.take(client.peer, trio.current_time())
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

    async def _upload(self, client: Client) -> None:
        """Until the session ends: one chunk after the other, each begun when it is its turn."""
        while True:
            if not client.is_waiting:
                await client.changed.wait()
                continue
            piece_bytes = self._uplink.piece_bytes()
            await client.session.wait_bulk(piece_bytes)
            sending: Sending | None = None
            async with self._uplink.turn(piece_bytes, partial(self._order, client)) as turn:
                index = self._choose(client)
                if index is not None:
                    client.sending, client.cancelled = index, False
                    client.served_s = trio.current_time()
                    sending = Sending(client, index, self._shelf.get(client.name))
                    turn.sent_bytes = await self._send_piece(sending, piece_bytes)
            if sending is None:
                await self._lack_any(client)
                continue
            await self._send_rest(sending)
            client.sending = None

    async def _send_rest(self, sending: Sending) -> None:
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

    async def _send_piece(self, sending: Sending, piece_bytes: int) -> int:
        """Send the next piece; its size, 0 if the chunk turned out to be over."""
        client = sending.client
        await sending.fill()
        if not sending.unfinished:
            return 0
        piece = sending.take(piece_bytes)
        await client.session.send_bulk(
            piece_head(sending.index, sending.offset - len(piece), self._load()), piece
        )
        self.bytes_served[client.peer] += len(piece)
        return len(piece)


def _least(sent: list[int], wants: dict[int, None]) -> int:
    return min([sent[index] for index in wants])


def _begun(number: float) -> Order:
    """What has begun to go out goes before what has not, the earliest first."""
    return (0.0, number)
