"""Fetching a set of chunks from several peers at once: verified by hash, retried elsewhere, bounded memory.

What to ask of whom is `peers.chunk_plan`'s; here are the requests themselves, their time-outs and their end.
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
from peers.chunk_plan import ChunkPlan
from peers.chunk_serving import CHUNK_PROTOCOL, DATA, LACKING, REFUSAL, ChunkServer, ChunkShelf, ChunkStore
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

CHUNK_TIMEOUT_S = 30.0
GIVE_UP_S = 120.0
PER_PEER_IN_FLIGHT = 2
MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024
LOOK_EVERY_S = 1.0
"""New providers are looked for this often even when nothing happens."""

_REFUSAL_BYTES = 4 * 1024

Providers = Callable[[], Sequence[PeerId]]
Sink = Callable[[int, bytes], Awaitable[None]]


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
    """Fetch the chunks of a file, given in their order as (SHA-256, size in bytes), except those in
    `already`.

    `providers` is asked again and again: peers may join and leave while this runs; only connected ones are
    used. `sink(index, data)` gets each verified chunk once, several at a time; while it works, the chunk
    counts as in flight, so that memory stays below `max_in_flight_bytes` (or one chunk). What it raises
    ends the transfer.

    Raises `TransferFailed` when nothing arrived from anybody for `give_up_s`.
    """
    rng = rng or random.Random()
    plan = ChunkPlan(
        [size for _, size in wanted],
        already,
        swarm.reputation,
        rng,
        per_peer_in_flight=per_peer_in_flight,
        max_in_flight_bytes=max_in_flight_bytes,
    )
    transfer = _Transfer(swarm, wanted, providers, sink, plan, chunk_timeout_s, give_up_s, progress)
    await transfer.run()
    return transfer.report


class _Lacking(Exception):
    """The peer does not have the chunk; `holdings` is its bit map."""

    def __init__(self, holdings: bytes) -> None:
        super().__init__("lacking")
        self.holdings = holdings


class _Transfer:
    """One `fetch_chunks` at work. A chunk is done when the sink has taken it, not when it has arrived."""

    def __init__(
        self,
        swarm: Swarm,
        wanted: Sequence[tuple[bytes, int]],
        providers: Providers,
        sink: Sink,
        plan: ChunkPlan,
        chunk_timeout_s: float,
        give_up_s: float,
        progress: Callable[[TransferProgress], None] | None,
    ) -> None:
        self.report = TransferReport()
        self._swarm = swarm
        self._wanted = wanted
        self._providers = providers
        self._sink = sink
        self._plan = plan
        self._chunk_timeout_s = chunk_timeout_s
        self._give_up_s = give_up_s
        self._progress = progress
        self._done_chunks = len(plan.arrived)
        self._done_bytes = sum(wanted[index][1] for index in plan.arrived)
        self._total_bytes = sum(size for _, size in wanted)
        self._requests: dict[int, list[trio.CancelScope]] = {}
        self._last_arrival_s = 0.0
        self._wake = trio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        started_s = self._last_arrival_s = trio.current_time()
        self._tell()
        async with trio.open_nursery() as nursery:
            await self._coordinate(nursery)
            nursery.cancel_scope.cancel()
        self.report.seconds = trio.current_time() - started_s
        if self._failure is not None:
            # Raised here and not inside: a nursery would wrap it in a group.
            raise self._failure

    async def _coordinate(self, nursery: trio.Nursery) -> None:
        while self._done_chunks < len(self._wanted) and self._failure is None:
            self._wake = trio.Event()
            now_s = trio.current_time()
            if now_s - self._last_arrival_s >= self._give_up_s:
                self._failure = TransferFailed(self._explain(now_s))
                return
            connected = self._swarm.transport.connected_peers()
            for peer, index in self._plan.begin(connected.intersection(self._providers()), now_s):
                scope = trio.CancelScope()
                self._requests.setdefault(index, []).append(scope)
                nursery.start_soon(self._fetch, peer, index, scope)
            give_up_at_s = self._last_arrival_s + self._give_up_s
            with trio.move_on_at(min(self._plan.next_look_s(now_s), now_s + LOOK_EVERY_S, give_up_at_s)):
                await self._wake.wait()

    async def _fetch(self, peer: PeerId, index: int, scope: trio.CancelScope) -> None:
        """One request for one chunk, from asking to the end of the sink. A faster peer cancels `scope`."""
        began_s = trio.current_time()
        data: bytes | None = None
        try:
            with scope:
                data = await self._ask(peer, index)
            if data is not None:
                now_s = self._last_arrival_s = trio.current_time()
                self._swarm.reputation.record_success(peer, len(data), now_s - began_s, now_s)
                if self._plan.arrive(peer, index, now_s - began_s, now_s):
                    self.report.bytes_by_peer[peer] += len(data)
                    for other in self._requests[index]:
                        if other is not scope:
                            other.cancel()
                    await self._keep(index, data)
                else:
                    self.report.wasted_bytes += len(data)
        finally:
            self._requests[index].remove(scope)
            self._plan.end(peer, index)
            self._wake.set()

    async def _keep(self, index: int, data: bytes) -> None:
        try:
            await self._sink(index, data)
        except Exception as error:  # kept to be raised by run(), outside the nursery
            self._failure = error
            return
        self._done_chunks += 1
        self._done_bytes += len(data)
        self._tell()

    async def _ask(self, peer: PeerId, index: int) -> bytes | None:
        """The verified chunk, or None after noting what went wrong with the peer."""
        name, size = self._wanted[index]
        timeout_s = self._chunk_timeout_s * self._plan.peers[peer].timeout_factor
        try:
            data = await self._download(peer, name, size, timeout_s)
        except _Lacking as lacking:
            self._plan.miss(peer, index, lacking.holdings, trio.current_time())
        except Refused as refused:
            self._plan.fail(peer, f"refused: {refused}", trio.current_time())
        except ResponseTooLarge as error:
            self._swarm.refuse(peer, RefusalReason.OVERSIZED, f"more than the {size} bytes of chunk {index}")
            self._plan.drop(peer, str(error))
        except TransportError as error:
            now_s = trio.current_time()
            if not isinstance(error, PeerUnreachable):
                self._swarm.reputation.record_failure(peer, now_s)
            self._plan.fail(peer, str(error), now_s, timed_out=isinstance(error, RequestTimeout))
            self.report.failures[peer] += 1
        else:
            if hashlib.sha256(data).digest() == name:
                return data
            detail = f"chunk {index} ({name.hex()[:12]}) has another hash"
            log.warning("%s: %s; it is not asked again in this transfer", node_name(peer), detail)
            self._swarm.refuse(peer, RefusalReason.WRONG_HASH, detail)
            self._plan.drop(peer, detail)
            self.report.wrong_hash[peer] += 1
            self.report.wasted_bytes += len(data)
        return None

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
                max_response_bytes=max(rest, _REFUSAL_BYTES, -(-len(self._wanted) // 8)) + 1,
            )
            if reply[:1] == LACKING:
                raise _Lacking(reply[1:])
            if reply[:1] == REFUSAL:
                await self._swarm.open_answer(peer, reply[1:], Refusal)
            if reply[:1] != DATA or not 1 < len(reply) <= rest + 1:
                self._swarm.refuse(peer, RefusalReason.MALFORMED, f"no part of a chunk: {len(reply)} bytes")
                raise TransportError(f"{node_name(peer)} answered a chunk request with something else")
            received = received + reply[1:] if received else reply[1:]
            self._last_arrival_s = trio.current_time()
        return received

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(
                TransferProgress(self._done_chunks, len(self._wanted), self._done_bytes, self._total_bytes)
            )

    def _explain(self, now_s: float) -> str:
        missing = len(self._wanted) - self._done_chunks
        connected = self._swarm.transport.connected_peers()
        troubles: list[str] = []
        for peer in dict.fromkeys([*self._plan.peers, *self._providers()]):
            state = self._plan.peers.get(peer)
            trouble = state.last_trouble if state is not None else ""
            away = "" if peer in connected else " (not connected)"
            troubles.append(f"{node_name(peer)}: {trouble or 'no answer yet'}{away}")
        text = f"{missing} of {len(self._wanted)} chunks are missing and none came for "
        text += f"{now_s - self._last_arrival_s:.0f} s; "
        return text + ("; ".join(troubles[:8]) if troubles else "no peer is known to have them")
