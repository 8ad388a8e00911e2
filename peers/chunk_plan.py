"""Which chunk to ask of whom next, in one download: pure decisions from what peers said and did. No clock.

Rare chunks first, so that soon all can pass some on; each chunk of one peer at a time; few requests open with
each, so that no slow one holds many; what waits where it is slow moves to who has become quicker.
"""

import math
import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from peers.base import PeerId
from peers.chunk_frames import ANY, Mask
from peers.chunk_neighbour import Asked, Neighbour

RELIEF_EVERY_S = 0.1
"""How often it is looked whether peers with a place can help with what waits at others."""

GAIN = 2.0
"""They do if they are expected to bring it so many times sooner, and by this at least:"""
LEAST_GAIN_S = 0.25

TIMEOUT_FACTOR = 8.0
LEAST_TIMEOUT_S = 8.0
FIRST_TIMEOUT_S = 30.0
"""A peer that brings nothing of what it was asked for in so many times the usual (at least this; before
anything usual is known, that) has failed: its chunks are asked of others."""

ASK_AGAIN_S = 1.0
"""A giver that has nothing for us now is asked again after this long."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


@dataclass(frozen=True)
class Request:
    """Ask `peer` for chunk `index` (or ANY); `spare`: to be served only when it has nothing else to do."""

    peer: PeerId
    index: int
    spare: bool = False


@dataclass(frozen=True)
class Withdrawal:
    """Tell `peer` that chunk `index` (or ANY) is no longer wanted from it."""

    peer: PeerId
    index: int


Step = Request | Withdrawal


class ChunkPlan:
    """Missing chunks, open requests, and what is known of each peer.

    Invariants: `in_flight_bytes` is the sum over all open requests; a chunk is asked of two peers at most
    and then comes from the one that begins first; what has arrived is never asked for.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        already: AbstractSet[int],
        rng: random.Random,
        *,
        max_in_flight_bytes: int,
    ) -> None:
        count = len(sizes)
        self.neighbours: dict[PeerId, Neighbour] = {}
        self.missing = np.ones(count, dtype=np.bool_)
        self.missing[list(already)] = False
        self.in_flight_bytes = 0
        self.keeping_bytes = 0
        """Arrived and not yet written away."""
        self._sizes = sizes
        self._rng = rng
        self._max_in_flight_bytes = max_in_flight_bytes
        self._askers: dict[int, list[Neighbour]] = {}
        """For each chunk asked for by index, or begun: of whom."""
        self._free = self.missing.copy()
        """Missing and asked of nobody."""
        self._copies = np.zeros(count, dtype=np.int32)
        """How many neighbours have each chunk."""
        self._any_bytes = max(sizes, default=0)
        self._stirred: set[Neighbour] = set()
        """Who may have become worth asking since `steps` looked."""
        self._was_full = False
        self._relief_s = -math.inf

    # What happens.

    def join(self, peer: PeerId, round_trip_s: float = 0.0) -> None:
        """A session with `peer` is open; nothing is known of what it has."""
        self.neighbours[peer] = Neighbour(peer, round_trip_s)

    def leave(self, peer: PeerId) -> None:
        """The session is over; what was asked of the peer is free again."""
        neighbour = self.neighbours.pop(peer)
        self._forget_requests(neighbour)
        self._stirred.discard(neighbour)
        if neighbour.held is not None:
            self._copies -= neighbour.held

    def heard_holdings(self, peer: PeerId, held: Mask, giving: bool) -> None:
        """The peer says what it has, and whether it chooses what to bring."""
        neighbour = self.neighbours[peer]
        if neighbour.held is not None:
            self._copies -= neighbour.held
        neighbour.held = held
        self._copies += held
        neighbour.giving = giving
        self._stirred.add(neighbour)
        for index in [index for index in neighbour.asked if not held[index]]:
            self._close(neighbour, index)

    def heard_have(self, peer: PeerId, indices: Iterable[int]) -> None:
        """The peer has got these."""
        neighbour = self.neighbours[peer]
        if neighbour.held is None:
            neighbour.held = np.zeros(len(self._sizes), dtype=np.bool_)
        for index in indices:
            if not neighbour.held[index]:
                neighbour.held[index] = True
                self._copies[index] += 1
                if self._free[index]:
                    self._stirred.add(neighbour)

    def heard_load(self, peer: PeerId, load: int, now_s: float) -> None:
        """The peer says how many chunks wait at it."""
        neighbour = self.neighbours[peer]
        neighbour.load, neighbour.load_s = load, now_s

    def lack(self, peer: PeerId, indices: Iterable[int], now_s: float) -> None:
        """The peer will not bring these after all."""
        neighbour = self.neighbours[peer]
        for index in indices:
            if index == ANY:
                if neighbour.any_asked:
                    neighbour.any_asked.pop()
                    self.in_flight_bytes -= self._any_bytes
                    self._stirred.add(neighbour)
                neighbour.gives_at_s = now_s + ASK_AGAIN_S
                continue
            if neighbour.held is not None and neighbour.held[index]:
                neighbour.held[index] = False
                self._copies[index] -= 1
            if index in neighbour.asked:
                self._close(neighbour, index)
        neighbour.heard_s = now_s

    def begun(self, peer: PeerId, index: int, now_s: float) -> list[Withdrawal] | None:
        """The first piece of a chunk comes. Who need not bring it any more; None if it was not asked for."""
        neighbour = self.neighbours[peer]
        asked = neighbour.asked.get(index)
        withdrawals: list[Withdrawal] = []
        if asked is None:
            if not neighbour.any_asked:
                return None
            asked = Asked(neighbour.any_asked.pop(0))
            self.in_flight_bytes -= self._any_bytes
            self._open(neighbour, index, asked)
        for other in list(self._askers[index]):
            if other is not neighbour and other.asked[index].first_piece_s is None:
                withdrawals.append(self._withdraw(other, index))
        if not self.missing[index]:
            withdrawals.append(self._withdraw(neighbour, index))
        asked.first_piece_s, asked.received_bytes = now_s, 0
        return withdrawals

    def received(self, peer: PeerId, index: int, size_bytes: int, now_s: float) -> None:
        """A piece of a chunk came."""
        neighbour = self.neighbours[peer]
        neighbour.heard_s = now_s
        asked = neighbour.asked.get(index)
        if asked is not None:
            if asked.received_bytes == 0:
                asked.first_piece_bytes = size_bytes
            asked.received_bytes += size_bytes

    def arrived(self, peer: PeerId, index: int, now_s: float) -> list[Withdrawal]:
        """All of a chunk came and it is the right one. Others need not bring it any more."""
        neighbour = self.neighbours[peer]
        asked = neighbour.asked[index]
        neighbour.brought(asked, self._sizes[index], now_s)
        self.missing[index] = self._free[index] = False
        self.keeping_bytes += self._sizes[index]
        others = [other for other in self._askers[index] if other is not neighbour]
        self._close(neighbour, index)
        return [self._withdraw(other, index) for other in others]

    def kept(self, index: int) -> None:
        """A chunk that arrived takes no memory any more."""
        self.keeping_bytes -= self._sizes[index]

    def spoiled(self, peer: PeerId, index: int) -> None:
        """All of a chunk came and it is a wrong one."""
        self._close(self.neighbours[peer], index)

    # What to do.

    def steps(self, now_s: float) -> list[Step]:
        """Requests and withdrawals to send now, in order; noted as sent."""
        done: list[Step] = []
        relieving = now_s >= self._relief_s
        if relieving:
            self._relief_s = now_s + RELIEF_EVERY_S
            self._time_out(now_s, done)
        looked_at = self.neighbours.values() if relieving or self._was_full else self._stirred
        places = [n for n in looked_at if self._has_place(n, now_s)]
        self._stirred = set()
        self._was_full = False
        self._rng.shuffle(places)
        places.sort(key=lambda n: self._expected_s(n, now_s))
        idle: list[Neighbour] = []
        while places:
            still: list[Neighbour] = []
            for neighbour in places:
                if self._is_full():
                    self._was_full = True
                    return done
                index = self._choose(neighbour, now_s)
                if index is None:
                    idle.append(neighbour)
                    continue
                done.append(self._request(neighbour, index, now_s))
                if self._has_place(neighbour, now_s):
                    still.append(neighbour)
            places = still
        if relieving and self._askers:
            for neighbour in idle:
                while self._has_place(neighbour, now_s) and not self._is_full():
                    if not self._relieve(neighbour, now_s, done):
                        break
        return done

    def next_look_s(self) -> float:
        """When `steps` may give something without anything happening before."""
        return self._relief_s if any(n.open for n in self.neighbours.values()) else math.inf

    def _is_full(self) -> bool:
        taken = self.in_flight_bytes + self.keeping_bytes
        return taken > 0 and taken + self._any_bytes > self._max_in_flight_bytes

    def _has_place(self, neighbour: Neighbour, now_s: float) -> bool:
        return (
            neighbour.held is not None
            and neighbour.ready_s <= now_s
            and neighbour.open < neighbour.window(now_s)
        )

    def _service(self, neighbour: Neighbour) -> float:
        """How long it is expected to take to send a chunk."""
        if neighbour.service_s is not None:
            return neighbour.service_s
        known = [n.service_s for n in self.neighbours.values() if n.service_s is not None]
        return sum(known) / len(known) if known else 0.0

    def _expected_s(self, neighbour: Neighbour, now_s: float) -> float:
        """How long a chunk asked of this peer now is expected to take."""
        return (neighbour.waiting(now_s) + 1) * self._service(neighbour) + neighbour.round_trip_s

    def _choose(self, neighbour: Neighbour, now_s: float) -> int | None:
        assert neighbour.held is not None
        # As many of the free chunks as were asked for without saying which are on their way.
        coming = sum(self._any_coming(n, now_s) for n in self.neighbours.values())
        if coming and int(self._free.sum()) <= coming:
            return None
        if self._gives(neighbour):
            return ANY if self._free.any() and neighbour.gives_at_s <= now_s else None
        candidates = np.flatnonzero(self._free & neighbour.held)
        if candidates.size == 0:
            return None
        copies = self._copies[candidates]
        rarest = candidates[copies == copies.min()]
        return int(rarest[self._rng.randrange(rarest.size)])

    def _any_coming(self, neighbour: Neighbour, now_s: float) -> int:
        """How many chunks of its choice the peer may still be expected to bring."""
        patience_s = 2.0 * (neighbour.latency_s or 0.0) + 1.0
        return sum(1 for asked_s in neighbour.any_asked if now_s - asked_s <= patience_s)

    def _gives(self, giver: Neighbour) -> bool:
        """Whether the peer chooses what to bring. If all have everything, that is of no use to anybody."""
        if not giver.giving:
            return False
        others = [n.held for n in self.neighbours.values() if n is not giver and n.held is not None]
        return not others or not all(held.all() for held in others)

    def _request(self, neighbour: Neighbour, index: int, now_s: float, spare: bool = False) -> Request:
        if neighbour.open == 0:
            neighbour.heard_s = now_s
        if index == ANY:
            neighbour.any_asked.append(now_s)
            self.in_flight_bytes += self._any_bytes
        else:
            self._open(neighbour, index, Asked(now_s, max(neighbour.waiting(now_s), neighbour.open), spare))
        return Request(neighbour.peer, index, spare)

    def _relieve(self, idle: Neighbour, now_s: float, done: list[Step]) -> bool:
        """Let a peer with a place help with the chunk that is expected to take longest where it was asked."""
        assert idle.held is not None
        if self._gives(idle):
            return False
        here_s = GAIN * self._expected_s(idle, now_s) + LEAST_GAIN_S
        spare_s = GAIN * (self._service(idle) + idle.round_trip_s) + LEAST_GAIN_S
        best: tuple[float, int, Neighbour] | None = None
        for index, askers in self._askers.items():
            if len(askers) == 1 and idle.held[index] and askers[0] is not idle:
                there_s = self._remaining_s(askers[0], index, now_s)
                if there_s > spare_s and (best is None or there_s > best[0]):
                    best = (there_s, index, askers[0])
        if best is None:
            return False
        there_s, index, other = best
        moves = there_s > here_s and other.asked[index].first_piece_s is None
        if moves:
            done.append(self._withdraw(other, index))
        done.append(self._request(idle, index, now_s, spare=not moves))
        return True

    def _remaining_s(self, neighbour: Neighbour, index: int, now_s: float) -> float:
        """How long a chunk that was asked of this peer is expected to take still."""
        asked = neighbour.asked[index]
        if asked.first_piece_s is not None and asked.received_bytes:
            elapsed_s = now_s - asked.first_piece_s
            left = self._sizes[index] - asked.received_bytes
            return max(left * elapsed_s / asked.received_bytes, now_s - neighbour.heard_s)
        service_s, elapsed_s = self._service(neighbour), now_s - asked.asked_s
        usual_s = (asked.ahead + 1) * service_s + neighbour.round_trip_s
        if elapsed_s > usual_s:
            # Later than what waited there explains: it may take as long again as it is late.
            return elapsed_s - usual_s
        return min(usual_s - elapsed_s, (neighbour.waiting(now_s) + 1) * service_s)

    # Time-outs.

    def _timeout_s(self, neighbour: Neighbour) -> float:
        usual = [n.latency_s for n in self.neighbours.values() if n.latency_s is not None]
        if not usual:
            return FIRST_TIMEOUT_S
        own_s = neighbour.latency_s if neighbour.latency_s is not None else max(usual)
        return max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * own_s)

    def _time_out(self, now_s: float, done: list[Step]) -> None:
        for neighbour in self.neighbours.values():
            if neighbour.open == 0 or now_s < neighbour.heard_s + self._timeout_s(neighbour):
                continue
            for index in list(neighbour.asked):
                done.append(self._withdraw(neighbour, index))
            for _ in neighbour.any_asked:
                done.append(Withdrawal(neighbour.peer, ANY))
                self.in_flight_bytes -= self._any_bytes
            neighbour.any_asked.clear()
            self.failed(neighbour.peer, now_s)

    def failed(self, peer: PeerId, now_s: float) -> None:
        """The peer rests for a while, longer each time in a row, and then gets one request at a time."""
        neighbour = self.neighbours[peer]
        delay_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(neighbour.failures, 20))
        neighbour.failures += 1
        neighbour.ready_s = now_s + delay_s * self._rng.uniform(0.75, 1.25)

    # Book-keeping.

    def _open(self, neighbour: Neighbour, index: int, asked: Asked) -> None:
        neighbour.asked[index] = asked
        self._askers.setdefault(index, []).append(neighbour)
        self._free[index] = False
        self.in_flight_bytes += self._sizes[index]

    def _close(self, neighbour: Neighbour, index: int) -> None:
        del neighbour.asked[index]
        self._stirred.add(neighbour)
        askers = self._askers[index]
        askers.remove(neighbour)
        self.in_flight_bytes -= self._sizes[index]
        if not askers:
            del self._askers[index]
            if self.missing[index]:
                # Anybody who has it may be asked now.
                self._free[index] = True
                self._stirred.update(self.neighbours.values())

    def _withdraw(self, neighbour: Neighbour, index: int) -> Withdrawal:
        self._close(neighbour, index)
        return Withdrawal(neighbour.peer, index)

    def _forget_requests(self, neighbour: Neighbour) -> None:
        for index in list(neighbour.asked):
            self._close(neighbour, index)
        self.in_flight_bytes -= self._any_bytes * len(neighbour.any_asked)
        neighbour.any_asked.clear()
