"""Downloading a file's chunks from several peers at once: verified by hash, asked elsewhere when one fails.

What to ask of whom is `peers.chunk_plan`'s; here are the sessions with the peers, and their end.
"""

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import trio

from peers.base import PeerId, TransportError
from peers.chunk_frames import (
    LACK,
    MAX_MESSAGE_BYTES,
    OPENING,
    REFUSAL,
    BadFrame,
    Have,
    Holdings,
    Indices,
    Mask,
    Piece,
    Sealed,
    decode,
    encode_sealed,
)
from peers.chunk_layout import FileLayout
from peers.chunk_link import Arriving, ChunkLink
from peers.chunk_plan import ChunkPlan, Step, Withdrawal
from peers.chunk_serving import CHUNK_PROTOCOL
from peers.signal import first_cause
from peers.swarm import Swarm
from protocol.identity import node_name
from protocol.messages import ChunkSession, Refusal
from protocol.refusals import RefusalReason, Refused

log = logging.getLogger(__name__)

GIVE_UP_S = 120.0
MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
"""Chunks asked for and not yet written away: bounds the memory of a download."""

MAX_NEIGHBOURS = 32
"""Peers that one download talks to, however many have the file: drawn by trust and success, and the idle
ones replaced now and then."""
IDLE_S = 20.0
"""A neighbour that has brought nothing for so long makes place for another, if there is one."""

LOOK_EVERY_S = 1.0
"""New providers are looked for this often even when nothing happens."""

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0

Providers = Callable[[], Sequence[PeerId]]
Sink = Callable[[int, bytearray], Awaitable[None]]


class TransferFailed(Exception):
    """No chunk arrived for `give_up_s`; the message tells what each peer's last trouble was."""


@dataclass(frozen=True)
class TransferProgress:
    """How far a transfer is, chunks that were there before included."""

    done_chunks: int
    total_chunks: int
    done_bytes: int
    total_bytes: int


@dataclass
class TransferReport:
    """What a transfer cost."""

    seconds: float = 0.0
    bytes_by_peer: Counter[PeerId] = field(default_factory=Counter)
    """Verified bytes."""
    wasted_bytes: int = 0
    """Received and thrown away: wrong hash, or the slower of two in a race."""
    wrong_hash: Counter[PeerId] = field(default_factory=Counter)
    failures: Counter[PeerId] = field(default_factory=Counter)


async def fetch_chunks(
    swarm: Swarm,
    layout: FileLayout,
    providers: Providers,
    sink: Sink,
    *,
    already: AbstractSet[int] = frozenset(),
    held_by: dict[PeerId, Mask] | None = None,
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    max_neighbours: int = MAX_NEIGHBOURS,
    give_up_s: float = GIVE_UP_S,
    progress: Callable[[TransferProgress], None] | None = None,
    rng: random.Random | None = None,
) -> TransferReport:
    """Fetch the chunks of a file except those in `already`.

    `providers` is asked again and again: peers may join and leave while this runs, and need have nothing of
    the file yet; only connected ones are used. `sink(index, data)` gets each verified chunk once, several at
    a time; while it works, the chunk counts as in flight, so that memory stays below `max_in_flight_bytes`
    (or one chunk). What it raises ends the transfer. `held_by` is kept at what each peer has, for whoever
    serves the file onward meanwhile.

    Raises `TransferFailed` when nothing arrived from anybody for `give_up_s`.
    """
    transfer = _Transfer(
        swarm,
        layout,
        providers,
        sink,
        already,
        held_by={} if held_by is None else held_by,
        max_in_flight_bytes=max_in_flight_bytes,
        max_neighbours=max_neighbours,
        give_up_s=give_up_s,
        progress=progress,
        rng=rng or random.Random(),
    )
    await transfer.run()
    return transfer.report


@dataclass
class _Provider:
    """What is remembered of a peer between its sessions."""

    scope: trio.CancelScope | None = None
    retry_s: float = 0.0
    failures: int = 0
    dropped: bool = False
    trouble: str = ""
    since_s: float = 0.0
    brought_s: float = 0.0


class _Transfer:
    """One `fetch_chunks` at work. A chunk is done when the sink has taken it, not when it has arrived."""

    def __init__(
        self,
        swarm: Swarm,
        layout: FileLayout,
        providers: Providers,
        sink: Sink,
        already: AbstractSet[int],
        *,
        held_by: dict[PeerId, Mask],
        max_in_flight_bytes: int,
        max_neighbours: int,
        give_up_s: float,
        progress: Callable[[TransferProgress], None] | None,
        rng: random.Random,
    ) -> None:
        self.report = TransferReport()
        sizes = [layout.length(index) for index in range(layout.count)]
        self._plan = ChunkPlan(sizes, already, rng, max_in_flight_bytes=max_in_flight_bytes)
        self._swarm = swarm
        self._layout = layout
        self._list_providers = providers
        self._sink = sink
        self._held_by = held_by
        self._max_neighbours = max_neighbours
        self._give_up_s = give_up_s
        self._progress = progress
        self._rng = rng
        self._done = sorted(already)
        """Chunks that are here, in the order in which they came."""
        self._done_bytes = sum(sizes[index] for index in already)
        self._providers: dict[PeerId, _Provider] = {}
        self._links: dict[PeerId, ChunkLink] = {}
        self._nursery: trio.Nursery
        self._last_arrival_s = 0.0
        self._wake = trio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        started_s = self._last_arrival_s = trio.current_time()
        self._tell_progress()
        async with trio.open_nursery() as self._nursery:
            await self._coordinate(self._nursery)
            self._nursery.cancel_scope.cancel()
        self.report.seconds = trio.current_time() - started_s
        if self._failure is not None:
            # Raised here and not inside: a nursery would wrap it in a group.
            raise self._failure

    async def _coordinate(self, nursery: trio.Nursery) -> None:
        look_s = 0.0
        while len(self._done) < self._layout.count and self._failure is None:
            self._wake = trio.Event()
            now_s = trio.current_time()
            if now_s - self._last_arrival_s >= self._give_up_s:
                self._failure = TransferFailed(self._explain(now_s))
                return
            if now_s >= look_s:
                look_s = now_s + LOOK_EVERY_S
                self._meet(nursery, now_s)
            for step in self._plan.steps(now_s):
                if isinstance(step, Withdrawal):
                    self._withdraw(step)
                else:
                    self._say(step)
            give_up_at_s = self._last_arrival_s + self._give_up_s
            with trio.move_on_at(min(self._plan.next_look_s(), look_s, give_up_at_s)):
                await self._wake.wait()

    # Whom to talk to.

    def _meet(self, nursery: trio.Nursery, now_s: float) -> None:
        """Open sessions with connected providers, up to the bound; let idle ones go if others wait."""
        connected = self._swarm.transport.connected_peers()
        candidates: list[PeerId] = []
        for peer in dict.fromkeys(self._list_providers()):
            provider = self._providers.setdefault(peer, _Provider())
            if (
                provider.scope is None
                and peer in connected
                and not provider.dropped
                and provider.retry_s <= now_s
            ):
                candidates.append(peer)
        current = [provider for provider in self._providers.values() if provider.scope is not None]
        places = self._max_neighbours - len(current)
        if len(candidates) > places:
            idle = [p for p in current if now_s - max(p.since_s, p.brought_s) >= IDLE_S]
            for provider in idle[: len(candidates) - places]:
                assert provider.scope is not None
                provider.scope.cancel()
                provider.retry_s = now_s + IDLE_S
        while candidates and places > 0:
            peer = self._swarm.reputation.choose(candidates, self._rng, now_s)
            candidates.remove(peer)
            places -= 1
            provider = self._providers[peer]
            provider.scope = trio.CancelScope()
            provider.since_s = now_s
            nursery.start_soon(self._converse, peer, provider, provider.scope)

    async def _converse(self, peer: PeerId, provider: _Provider, scope: trio.CancelScope) -> None:
        """One session from its opening to its end."""
        try:
            with scope:
                await self._talk(peer)
                return
        except* (TransportError, Refused) as group:
            provider.trouble = str(first_cause(group))
            provider.failures += 1
            self.report.failures[peer] += 1
            delay_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(provider.failures - 1, 20))
            provider.retry_s = trio.current_time() + delay_s * self._rng.uniform(0.5, 1.0)
        finally:
            provider.scope = None
            self._wake.set()

    async def _talk(self, peer: PeerId) -> None:
        transport = self._swarm.transport
        session = await transport.open_session(peer, CHUNK_PROTOCOL, max_message_bytes=MAX_MESSAGE_BYTES)
        try:
            opening = self._swarm.seal(ChunkSession(file=self._layout.name))
            await session.send(encode_sealed(OPENING, opening))
            self._links[peer] = link = ChunkLink(session)
            self._plan.join(peer, session.round_trip_s)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.speak, self._done)
                    await self._listen(peer, link)
            finally:
                del self._links[peer]
                self._held_by.pop(peer, None)
                self._plan.leave(peer)
        finally:
            await session.aclose()

    # What is said.

    def _say(self, step: Step) -> None:
        link = self._links.get(step.peer)
        if link is not None:
            link.say(step)

    # What is heard.

    async def _listen(self, peer: PeerId, link: ChunkLink) -> None:
        """Until the session ends. Raises `Refused` when the peer refused, `TransportError`."""
        while True:
            message = await link.session.receive()
            try:
                frame = decode(message, self._layout.count)
            except BadFrame as error:
                raise self._broken(peer, str(error)) from error
            if isinstance(frame, Piece):
                await self._heard_piece(peer, link, frame)
                continue
            now_s = trio.current_time()
            if isinstance(frame, Holdings):
                self._plan.heard_load(peer, frame.load, now_s)
                self._heard_holdings(peer, link, frame)
            elif isinstance(frame, Have):
                self._plan.heard_load(peer, frame.load, now_s)
                self._plan.heard_have(peer, frame.indices)
            elif isinstance(frame, Indices) and frame.kind == LACK:
                self._plan.lack(peer, frame.indices, now_s)
            elif isinstance(frame, Sealed) and frame.kind == REFUSAL:
                await self._swarm.open_answer(peer, frame.envelope, Refusal)
            else:
                raise self._broken(peer, "a message that only a downloader sends")
            self._wake.set()

    def _heard_holdings(self, peer: PeerId, link: ChunkLink, frame: Holdings) -> None:
        self._plan.heard_holdings(peer, frame.held, frame.giving)
        self._held_by[peer] = frame.held
        link.giving = frame.giving
        link.changed.set()

    async def _heard_piece(self, peer: PeerId, link: ChunkLink, piece: Piece) -> None:
        now_s = trio.current_time()
        self._plan.heard_load(peer, piece.load, now_s)
        size = self._layout.length(piece.index)
        if piece.offset == 0:
            withdrawals = self._plan.begun(peer, piece.index, now_s)
            if withdrawals is not None:
                link.arriving[piece.index] = Arriving(size)
                for withdrawal in withdrawals:
                    self._withdraw(withdrawal)
        arriving = link.arriving.get(piece.index)
        await self._swarm.transport.downlink.take(len(piece.data))
        if arriving is None:
            # Withdrawn while it was on its way; a peer that sends what nobody asked for only wastes its own
            # time, and the transport's flow control bounds what it costs here.
            self.report.wasted_bytes += len(piece.data)
            return
        if not arriving.take(piece.offset, piece.data):
            raise self._broken(peer, f"pieces of chunk {piece.index} that do not fit together")
        self._last_arrival_s = now_s
        self._plan.received(peer, piece.index, len(piece.data), now_s)
        if arriving.is_whole:
            del link.arriving[piece.index]
            self._arrived(peer, piece.index, arriving)

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        link = self._links.get(withdrawal.peer)
        if link is not None:
            arriving = link.arriving.pop(withdrawal.index, None)
            if arriving is not None:
                self.report.wasted_bytes += arriving.size
            self._say(withdrawal)

    def _arrived(self, peer: PeerId, index: int, arriving: Arriving) -> None:
        now_s = trio.current_time()
        if arriving.digest() != self._layout.chunks[index]:
            detail = f"chunk {index} ({self._layout.chunks[index].hex()[:12]}) has another hash"
            log.warning("%s: %s; it is not asked again in this transfer", node_name(peer), detail)
            self._swarm.refuse(peer, RefusalReason.WRONG_HASH, detail)
            self._plan.spoiled(peer, index)
            self._providers[peer].dropped = True
            self.report.wrong_hash[peer] += 1
            self.report.wasted_bytes += arriving.size
            raise TransportError(detail)
        asked_s = self._plan.neighbours[peer].asked[index].asked_s
        self._swarm.reputation.record_success(peer, arriving.size, now_s - asked_s, now_s)
        provider = self._providers[peer]
        provider.failures, provider.brought_s, provider.trouble = 0, now_s, ""
        for withdrawal in self._plan.arrived(peer, index, now_s):
            self._withdraw(withdrawal)
        self.report.bytes_by_peer[peer] += arriving.size
        self._wake.set()
        self._nursery.start_soon(self._keep, index, arriving)

    async def _keep(self, index: int, arriving: Arriving) -> None:
        try:
            await self._sink(index, arriving.data)
        except Exception as error:  # kept to be raised by run(), outside the nursery
            self._failure = error
            self._wake.set()
            return
        self._plan.kept(index)
        self._done.append(index)
        self._done_bytes += arriving.size
        for link in self._links.values():
            if link.giving:
                link.changed.set()
        self._tell_progress()
        self._wake.set()

    def _broken(self, peer: PeerId, detail: str) -> TransportError:
        """The peer does not keep to the protocol: it is counted, and not asked again in this transfer."""
        self._swarm.refuse(peer, RefusalReason.MALFORMED, detail)
        self._providers[peer].dropped = True
        return TransportError(f"{node_name(peer)} broke the protocol: {detail}")

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress(
                TransferProgress(
                    len(self._done), self._layout.count, self._done_bytes, self._layout.size_bytes
                )
            )

    def _explain(self, now_s: float) -> str:
        missing = self._layout.count - len(self._done)
        connected = self._swarm.transport.connected_peers()
        troubles: list[str] = []
        for peer in dict.fromkeys([*self._providers, *self._list_providers()]):
            provider = self._providers.get(peer, _Provider())
            trouble = provider.trouble
            if not trouble and peer in self._plan.neighbours:
                trouble = "lacks what is missing here"
            away = "" if peer in connected else " (not connected)"
            troubles.append(f"{node_name(peer)}: {trouble or 'no answer yet'}{away}")
        text = f"{missing} of {self._layout.count} chunks are missing and none came for "
        text += f"{now_s - self._last_arrival_s:.0f} s; "
        return text + ("; ".join(troubles[:8]) if troubles else "no peer is known to have them")
