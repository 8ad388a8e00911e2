"""Fetching a set of chunks from several peers at once: verified by hash, retried elsewhere, bounded memory.

Simplified: a peer is asked for chunks at random, not told beforehand which it holds; one that lacks a chunk
says so and is asked again later, since it may be downloading itself.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import trio

from peers.base import PeerId, PeerUnreachable, RequestTimeout, ResponseTooLarge, TransportError
from peers.chunk_serving import (
    CHUNK_PROTOCOL,
    DATA,
    REFUSAL,
    ChunkServer,
    ChunkShelf,
    ChunkStore,
)
from peers.swarm import Swarm
from protocol.identity import node_name
from protocol.messages import ChunkRequest, Refusal
from protocol.refusals import RefusalReason, Refused

__all__ = [
    "ChunkServer",
    "ChunkShelf",
    "ChunkStore",
    "TransferFailed",
    "TransferProgress",
    "TransferReport",
    "fetch_chunks",
]

log = logging.getLogger(__name__)

Providers = Callable[[], Sequence[PeerId]]
Sink = Callable[[int, bytes], Awaitable[None]]

CHUNK_TIMEOUT_S = 30.0
GIVE_UP_S = 120.0
PER_PEER_IN_FLIGHT = 2
MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024

MAX_TIMEOUT_FACTOR = 8.0
"""A peer that runs out of time gets twice as long at the next try (up to this), one request at a time."""

SLOW_CHUNK_S = 2.0
"""A peer that needs longer for a chunk gets one request at a time: more would queue before control."""

MAX_PAUSE_S = 10.0
LACKING_RETRY_S = 1.0
MISSES_BEFORE_PAUSE = 4
MAX_MISS_PAUSE_S = 2.0
LOOK_EVERY_S = 1.0
"""New providers are looked for this often even when nothing happens."""

RACE_AFTER_S = 2.0
RACE_FACTOR = 3.0
"""With nothing left to ask for, a chunk that takes so many times the usual is asked of a second peer too."""

_SCAN = 256
"""Chunks looked through for one that a peer is not known to lack."""

_REFUSAL_BYTES = 4 * 1024


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
    wanted: Sequence[tuple[bytes, int]],
    providers: Providers,
    sink: Sink,
    *,
    already: AbstractSet[int] = frozenset(),
    per_peer_in_flight: int = PER_PEER_IN_FLIGHT,
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    chunk_timeout_s: float = CHUNK_TIMEOUT_S,
    give_up_s: float = GIVE_UP_S,
    progress: Callable[[TransferProgress], None] | None = None,
    rng: random.Random | None = None,
) -> TransferReport:
    """Fetch the chunks `wanted`, given as (SHA-256, size in bytes), except the indices in `already`.

    `providers` is asked again and again: peers may join and leave while this runs; only connected ones are
    used. `sink(index, data)` gets each verified chunk once, several at a time; while it works, the chunk
    counts as in flight, so that memory stays below `max_in_flight_bytes` (or one chunk). What it raises
    ends the transfer.

    Raises `TransferFailed` when nothing arrived from anybody for `give_up_s`.
    """
    transfer = _Transfer(
        swarm,
        wanted,
        providers,
        sink,
        already,
        per_peer_in_flight,
        max_in_flight_bytes,
        chunk_timeout_s,
        give_up_s,
        progress,
        rng or random.Random(),
    )
    await transfer.run()
    return transfer.report


@dataclass
class _Peer:
    """What this transfer knows of one peer."""

    in_flight: int = 0
    failures: int = 0
    misses: int = 0
    timeout_factor: float = 1.0
    ready_s: float = 0.0
    dropped: bool = False
    last_trouble: str = ""
    lacks: dict[int, float] = field(default_factory=dict)
    """Chunk index -> when it may be asked for again."""


@dataclass(eq=False)
class _Attempt:
    peer: PeerId
    started_s: float
    scope: trio.CancelScope


class _Transfer:
    """The state of one `fetch_chunks`.

    Invariants: every index is in exactly one of pending, attempts (one or two at work on it) and done; a
    claimed one has arrived and is with the sink or done; bytes in flight are the sizes of all attempts; a
    peer's in_flight is its number of attempts.
    """

    def __init__(
        self,
        swarm: Swarm,
        wanted: Sequence[tuple[bytes, int]],
        providers: Providers,
        sink: Sink,
        already: AbstractSet[int],
        per_peer_in_flight: int,
        max_in_flight_bytes: int,
        chunk_timeout_s: float,
        give_up_s: float,
        progress: Callable[[TransferProgress], None] | None,
        rng: random.Random,
    ) -> None:
        self.report = TransferReport()
        self._swarm = swarm
        self._wanted = wanted
        self._providers = providers
        self._sink = sink
        self._per_peer_in_flight = per_peer_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._chunk_timeout_s = chunk_timeout_s
        self._give_up_s = give_up_s
        self._progress = progress
        self._rng = rng
        self._peers: dict[PeerId, _Peer] = {}
        self._pending = [index for index in range(len(wanted)) if index not in already]
        rng.shuffle(self._pending)
        self._attempts: dict[int, list[_Attempt]] = {}
        self._claimed = set(already)
        self._done = set(already)
        self._bytes_in_flight = 0
        self._total_bytes = sum(size for _, size in wanted)
        self._done_bytes = sum(wanted[index][1] for index in already)
        self._usual_s: float | None = None
        self._last_arrival_s = 0.0
        self._wake = trio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        started_s = self._last_arrival_s = trio.current_time()
        self._tell()
        async with trio.open_nursery() as nursery:
            try:
                await self._coordinate(nursery)
            except TransferFailed as failure:
                self._failure = failure
            nursery.cancel_scope.cancel()
        self.report.seconds = trio.current_time() - started_s
        if self._failure is not None:
            # Raised here and not inside: a nursery would wrap it in a group.
            raise self._failure

    async def _coordinate(self, nursery: trio.Nursery) -> None:
        while len(self._done) < len(self._wanted) and self._failure is None:
            self._wake = trio.Event()
            now_s = trio.current_time()
            if now_s - self._last_arrival_s >= self._give_up_s:
                raise TransferFailed(self._explain(now_s))
            for peer, index in self._assign(now_s):
                attempt = _Attempt(peer, now_s, trio.CancelScope())
                self._attempts.setdefault(index, []).append(attempt)
                self._peers[peer].in_flight += 1
                self._bytes_in_flight += self._wanted[index][1]
                nursery.start_soon(self._try, attempt, index)
            with trio.move_on_at(self._next_look_s(now_s)):
                await self._wake.wait()

    # Deciding.

    def _assign(self, now_s: float) -> list[tuple[PeerId, int]]:
        """(peer, chunk) pairs to start now: peers drawn by trust, success and rate, chunks at random."""
        connected = self._swarm.transport.connected_peers()
        places: dict[PeerId, int] = {}
        for peer in self._providers():
            state = self._peers.setdefault(peer, _Peer())
            free = self._places(peer, state) - state.in_flight
            if peer in connected and not state.dropped and state.ready_s <= now_s and free > 0:
                places[peer] = free
        chosen: list[tuple[PeerId, int]] = []
        budget = self._max_in_flight_bytes - self._bytes_in_flight
        while places:
            peer = self._swarm.reputation.choose(sorted(places), self._rng, now_s)
            index = self._index_for(peer, now_s, chosen)
            if index is None:
                del places[peer]
                continue
            size = self._wanted[index][1]
            if size > budget and (self._bytes_in_flight or chosen):
                break
            budget -= size
            if index not in self._attempts:
                self._pending.remove(index)
            chosen.append((peer, index))
            places[peer] -= 1
            if places[peer] == 0:
                del places[peer]
        return chosen

    def _places(self, peer: PeerId, state: _Peer) -> int:
        rate = self._swarm.reputation.rate_bytes_per_s(peer)
        largest = self._wanted[0][1]
        slow = rate is not None and largest / max(rate, 1e-9) > SLOW_CHUNK_S
        return 1 if slow or state.timeout_factor > 1.0 else self._per_peer_in_flight

    def _index_for(self, peer: PeerId, now_s: float, chosen: list[tuple[PeerId, int]]) -> int | None:
        lacks = self._peers[peer].lacks
        count = len(self._pending)
        if count:
            start = self._rng.randrange(count)
            for step in range(min(count, _SCAN)):
                index = self._pending[(start + step) % count]
                if lacks.get(index, 0.0) <= now_s:
                    return index
            return None
        race_after_s = max(RACE_AFTER_S, RACE_FACTOR * (self._usual_s or 0.0))
        taken = {index for _, index in chosen}
        for index, attempts in self._attempts.items():
            if (
                len(attempts) == 1
                and index not in taken
                and index not in self._claimed
                and attempts[0].peer != peer
                and now_s - attempts[0].started_s >= race_after_s
                and lacks.get(index, 0.0) <= now_s
            ):
                return index
        return None

    def _next_look_s(self, now_s: float) -> float:
        times = [now_s + LOOK_EVERY_S, self._last_arrival_s + self._give_up_s]
        times += [state.ready_s for state in self._peers.values() if state.ready_s > now_s]
        return min(times)

    # Doing.

    async def _try(self, attempt: _Attempt, index: int) -> None:
        """One attempt at one chunk, from request to sink."""
        state = self._peers[attempt.peer]
        size = self._wanted[index][1]
        data: bytes | None = None
        try:
            with attempt.scope:
                data = await self._ask(attempt, index, state)
            if data is not None and index not in self._claimed:
                self._claimed.add(index)
                self.report.bytes_by_peer[attempt.peer] += size
                for other in self._attempts[index]:
                    if other is not attempt:
                        other.scope.cancel()
                try:
                    await self._sink(index, data)
                except Exception as error:  # kept to be raised by run(), outside the nursery
                    self._failure = error
                else:
                    self._done.add(index)
                    self._done_bytes += size
                    self._tell()
            elif data is not None:
                self.report.wasted_bytes += size
        finally:
            state.in_flight -= 1
            self._bytes_in_flight -= size
            left = self._attempts[index]
            left.remove(attempt)
            if not left:
                del self._attempts[index]
                if index not in self._claimed:
                    self._pending.append(index)
            self._wake.set()

    async def _ask(self, attempt: _Attempt, index: int, state: _Peer) -> bytes | None:
        """The verified chunk, or None after noting what went wrong with the peer."""
        peer, (name, size) = attempt.peer, self._wanted[index]
        try:
            data = await self._download(peer, name, size, self._chunk_timeout_s * state.timeout_factor)
        except Refused as refused:
            self._note_refusal(state, index, refused)
            return None
        except PeerUnreachable as error:
            self._note_failure(peer, state, str(error))
            return None
        except ResponseTooLarge as error:
            self._swarm.refuse(peer, RefusalReason.OVERSIZED, f"a chunk larger than its {size} bytes")
            state.dropped, state.last_trouble = True, str(error)
            return None
        except TransportError as error:
            if isinstance(error, RequestTimeout):
                state.timeout_factor = min(MAX_TIMEOUT_FACTOR, 2.0 * state.timeout_factor)
            self._swarm.reputation.record_failure(peer, trio.current_time())
            self._note_failure(peer, state, str(error))
            return None
        now_s = trio.current_time()
        if hashlib.sha256(data).digest() != name:
            detail = f"chunk {index} ({name.hex()[:12]}) has another hash"
            self._swarm.refuse(peer, RefusalReason.WRONG_HASH, detail)
            log.warning("%s sent a wrong chunk; it is not asked again in this transfer", node_name(peer))
            state.dropped, state.last_trouble = True, detail
            self.report.wrong_hash[peer] += 1
            self.report.wasted_bytes += len(data)
            return None
        seconds = now_s - attempt.started_s
        self._swarm.reputation.record_success(peer, size, seconds, now_s)
        self._usual_s = seconds if self._usual_s is None else 0.8 * self._usual_s + 0.2 * seconds
        self._last_arrival_s = now_s
        state.failures = state.misses = 0
        state.timeout_factor = 1.0
        return data

    async def _download(self, peer: PeerId, name: bytes, size: int, timeout_s: float) -> bytes:
        """All bytes of a chunk from one peer, in as many replies as it cuts them into. Unverified.

        One peer only, so that a wrong hash has one culprit. Each reply may take `timeout_s`.
        """
        received = b""
        while len(received) < size:
            rest = size - len(received)
            reply = await self._swarm.transport.request(
                peer,
                CHUNK_PROTOCOL,
                self._swarm.seal(ChunkRequest(chunk=name, offset=len(received))),
                timeout_s=timeout_s,
                max_response_bytes=max(rest, _REFUSAL_BYTES) + 1,
            )
            if reply[:1] == REFUSAL:
                await self._swarm.open_answer(peer, reply[1:], Refusal)
            if reply[:1] != DATA or not 1 < len(reply) <= rest + 1:
                self._swarm.refuse(peer, RefusalReason.MALFORMED, f"no part of a chunk: {len(reply)} bytes")
                raise TransportError(f"{node_name(peer)} answered a chunk request with something else")
            received = received + reply[1:] if received else reply[1:]
            self._last_arrival_s = trio.current_time()
        return received

    def _note_refusal(self, state: _Peer, index: int, refused: Refused) -> None:
        now_s = trio.current_time()
        state.last_trouble = f"refused: {refused}"
        if refused.reason is RefusalReason.NOT_FOUND:
            state.lacks[index] = now_s + LACKING_RETRY_S * self._rng.uniform(0.5, 1.5)
            state.misses += 1
            if state.misses >= MISSES_BEFORE_PAUSE:
                pause_s = 0.1 * 2.0 ** min(state.misses - MISSES_BEFORE_PAUSE, 10)
                state.ready_s = now_s + min(MAX_MISS_PAUSE_S, pause_s) * self._rng.uniform(0.5, 1.0)
            return
        state.failures += 1
        self._pause(state)

    def _note_failure(self, peer: PeerId, state: _Peer, trouble: str) -> None:
        state.last_trouble = trouble
        state.failures += 1
        self.report.failures[peer] += 1
        self._pause(state)

    def _pause(self, state: _Peer) -> None:
        delay_s = min(MAX_PAUSE_S, 0.25 * 2.0 ** min(state.failures, 20))
        state.ready_s = trio.current_time() + delay_s * self._rng.uniform(0.5, 1.0)

    # Telling.

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(
                TransferProgress(len(self._done), len(self._wanted), self._done_bytes, self._total_bytes)
            )

    def _explain(self, now_s: float) -> str:
        missing = len(self._wanted) - len(self._done)
        connected = self._swarm.transport.connected_peers()
        troubles = [
            f"{node_name(peer)}: {state.last_trouble or 'no answer yet'}"
            + ("" if peer in connected else " (not connected)")
            for peer, state in self._peers.items()
        ]
        text = f"{missing} of {len(self._wanted)} chunks are missing and none came for "
        text += f"{now_s - self._last_arrival_s:.0f} s; "
        return text + ("; ".join(troubles[:8]) if troubles else "no peer is known to have them")
