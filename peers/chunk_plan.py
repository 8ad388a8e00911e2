"""Which chunk to ask of whom next, in one transfer: pure decisions from what peers did so far. No clock.

Nobody announces which chunks it holds: a peer is taken to have all until it lacks one, and then says which it
has. So a complete peer costs nothing extra, and one that is downloading itself is asked for what it has got.
"""

import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from peers.base import PeerId
from peers.reputation import Reputation

MAX_TIMEOUT_FACTOR = 8.0
"""A peer that runs out of time gets twice as long at the next try (up to this), one request at a time."""

SLOW_CHUNK_S = 2.0
"""A peer that needs longer for a chunk gets one request at a time: more would queue before control."""

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
PROBE_AFTER_S = 0.25
MAX_PROBE_AFTER_S = 1.0
"""A peer that has nothing of what is missing is asked again after this long: it may be downloading itself."""
MISSES_BEFORE_PAUSE = 4
"""A peer that so often in a row lacks what its map says it has is asked less."""

RACE_AFTER_S = 2.0
RACE_FACTOR = 3.0
"""With nothing left to ask for, a chunk that takes so many times the usual is asked of a second peer too."""

_SCAN = 256
_SAMPLE = 16
"""Of the missing chunks (at most _SCAN looked at, from a random place on) the rarest of _SAMPLE is taken."""


@dataclass
class PeerState:
    """What a transfer knows of one peer."""

    in_flight: int = 0
    failures: int = 0
    """In a row."""
    misses: int = 0
    """How often in a row it lacked what it had said to have."""
    timeout_factor: float = 1.0
    ready_s: float = 0.0
    dropped: bool = False
    last_trouble: str = ""
    holdings: bytes | None = None
    """Bit map of what the peer has, from its last miss. None: it has lacked nothing yet and may have all."""
    probe_s: float = 0.0
    """When a chunk that is not in `holdings` may be asked for, to get a newer map or the chunk."""
    fruitless_probes: int = 0

    def may_have(self, index: int) -> bool:
        return self.holdings is None or bool(self.holdings[index // 8] >> index % 8 & 1)


@dataclass
class _Work:
    """A chunk being asked for, of one peer or, in a race, of two."""

    first_began_s: float
    peers: list[PeerId] = field(default_factory=list)


class ChunkPlan:
    """Missing chunks, chunks in flight, and what is known of each peer.

    Invariants: an index not arrived is either pending or in flight; `in_flight_bytes` is the sum over all
    requests under way; a dropped peer is never chosen again.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        already: AbstractSet[int],
        reputation: Reputation,
        rng: random.Random,
        *,
        per_peer_in_flight: int,
        max_in_flight_bytes: int,
    ) -> None:
        self.peers: dict[PeerId, PeerState] = {}
        self.arrived = set(already)
        self._sizes = sizes
        self._reputation = reputation
        self._rng = rng
        self._per_peer_in_flight = per_peer_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._pending = [index for index in range(len(sizes)) if index not in already]
        self._work: dict[int, _Work] = {}
        self._in_flight_bytes = 0
        self._usual_s: float | None = None

    def begin(self, peers: Iterable[PeerId], now_s: float) -> list[tuple[PeerId, int]]:
        """(peer, chunk) requests to start now, noted as begun. `peers` can be asked at this moment.

        Peers are drawn by trust, success and rate, as long as they and the transfer have places free.
        """
        ready: list[PeerId] = []
        for peer in sorted(set(peers)):
            state = self.peers.setdefault(peer, PeerState())
            if not state.dropped and state.ready_s <= now_s and state.in_flight < self._places(peer, state):
                ready.append(peer)
        weights = self._reputation.weights(ready, now_s)
        begun: list[tuple[PeerId, int]] = []
        while ready:
            position = self._rng.choices(range(len(ready)), weights)[0] if sum(weights) > 0 else 0
            peer = ready[position]
            state = self.peers[peer]
            index = self._choose(peer, state, now_s)
            if index is not None:
                size = self._sizes[index]
                if self._in_flight_bytes and self._in_flight_bytes + size > self._max_in_flight_bytes:
                    break
                self._note_begun(peer, state, index, now_s)
                begun.append((peer, index))
            if index is None or state.in_flight >= self._places(peer, state):
                del ready[position], weights[position]
        return begun

    def arrive(self, peer: PeerId, index: int, seconds: float, now_s: float) -> bool:
        """A verified chunk came from `peer`; False if another peer had brought it before."""
        state = self.peers[peer]
        state.failures = state.misses = state.fruitless_probes = 0
        state.timeout_factor = 1.0
        state.probe_s = now_s
        self._usual_s = seconds if self._usual_s is None else 0.8 * self._usual_s + 0.2 * seconds
        if index in self.arrived:
            return False
        self.arrived.add(index)
        return True

    def miss(self, peer: PeerId, index: int, holdings: bytes, now_s: float) -> None:
        """`peer` lacks the chunk and sent a map of what it has. A map that makes no sense counts as empty."""
        state = self.peers[peer]
        state.last_trouble = "lacks what is missing here"
        claimed = state.holdings is not None and state.may_have(index)
        size = -(-len(self._sizes) // 8)
        state.holdings = holdings if len(holdings) == size else bytes(size)
        if state.may_have(index):
            state.holdings = bytes(size)
        state.misses = state.misses + 1 if claimed else 0
        if state.misses >= MISSES_BEFORE_PAUSE:
            state.ready_s = now_s + MAX_PROBE_AFTER_S * self._rng.uniform(0.5, 1.0)

    def fail(self, peer: PeerId, trouble: str, now_s: float, *, timed_out: bool = False) -> None:
        """A request failed: the peer rests for a while, longer each time in a row."""
        state = self.peers[peer]
        state.last_trouble = trouble
        state.failures += 1
        if timed_out:
            state.timeout_factor = min(MAX_TIMEOUT_FACTOR, 2.0 * state.timeout_factor)
        delay_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(state.failures - 1, 20))
        state.ready_s = now_s + delay_s * self._rng.uniform(0.5, 1.0)

    def drop(self, peer: PeerId, trouble: str) -> None:
        """Never ask this peer again in this transfer."""
        state = self.peers[peer]
        state.dropped, state.last_trouble = True, trouble

    def end(self, peer: PeerId, index: int) -> None:
        """The request is over, and with it the memory that its chunk took; call once per request begun."""
        self.peers[peer].in_flight -= 1
        self._in_flight_bytes -= self._sizes[index]
        work = self._work[index]
        work.peers.remove(peer)
        if not work.peers:
            del self._work[index]
            if index not in self.arrived:
                self._pending.append(index)

    def next_look_s(self, now_s: float) -> float:
        """When a peer's pause ends that may change what `begin` gives; infinity if there is none."""
        times = (time_s for state in self.peers.values() for time_s in (state.ready_s, state.probe_s))
        return min((time_s for time_s in times if time_s > now_s), default=float("inf"))

    def _places(self, peer: PeerId, state: PeerState) -> int:
        rate = self._reputation.rate_bytes_per_s(peer)
        slow = rate is not None and self._sizes[0] > rate * SLOW_CHUNK_S
        return 1 if slow or state.timeout_factor > 1.0 else self._per_peer_in_flight

    def _note_begun(self, peer: PeerId, state: PeerState, index: int, now_s: float) -> None:
        if index in self._work:
            self._work[index].peers.append(peer)
        else:
            self._pending.remove(index)
            self._work[index] = _Work(now_s, [peer])
        state.in_flight += 1
        self._in_flight_bytes += self._sizes[index]

    def _choose(self, peer: PeerId, state: PeerState, now_s: float) -> int | None:
        """The chunk to ask `peer` for next, if any: rare ones first, so that soon all can serve some."""
        count = len(self._pending)
        if count == 0:
            return self._race(peer, state, now_s)
        start = self._rng.randrange(count)
        sample: list[int] = []
        for step in range(min(count, _SCAN)):
            index = self._pending[(start + step) % count]
            if state.may_have(index):
                sample.append(index)
                if len(sample) == _SAMPLE:
                    break
        if sample:
            maps = [other.holdings for other in self.peers.values() if other.holdings and not other.dropped]
            return min(sample, key=lambda index: sum(bits[index // 8] >> index % 8 & 1 for bits in maps))
        if now_s < state.probe_s or state.in_flight:
            return None
        delay_s = min(MAX_PROBE_AFTER_S, PROBE_AFTER_S * 1.5 ** min(state.fruitless_probes, 10))
        state.probe_s = now_s + delay_s * self._rng.uniform(0.8, 1.2)
        state.fruitless_probes += 1
        return self._pending[start]

    def _race(self, peer: PeerId, state: PeerState, now_s: float) -> int | None:
        """A chunk that one other peer is taking suspiciously long for."""
        race_after_s = max(RACE_AFTER_S, RACE_FACTOR * (self._usual_s or 0.0))
        for index, work in self._work.items():
            if (
                len(work.peers) == 1
                and index not in self.arrived
                and peer not in work.peers
                and now_s - work.first_began_s >= race_after_s
                and state.may_have(index)
            ):
                return index
        return None
