"""Which chunk a complete node gives to whom, so that each leaves it once first: super-seeding. No clock.

A downloader asks such a node for any chunk, and the node chooses: one that nobody has yet. It goes to the
downloader that is expected to have passed it on soonest, so fast uplinks get more of them, and one that keeps
its chunks to itself gets few. What downloaders say that they have is believed as far as it does no harm.
"""

import math
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from peers.chunk_frames import Mask

PATIENCE_S = 2.0
"""A chunk that only one downloader claims to have for so long is given all the same: the claim may be a
lie."""

_WEIGHT = 0.3
"""Of the newest measurement in a moving average."""


@dataclass
class _Client:
    has: Mask
    unspread: dict[int, float] = field(default_factory=dict)
    """Chunks given to it that nobody else has: index and when it was given."""
    pace_s: float | None = None
    """How long it takes to pass one chunk on, once the one before is passed on."""
    last_spread_s: float = -math.inf


class Giving:
    """The chunks of one file, as one complete node sees them spread."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._count = count
        self._clients: dict[Hashable, _Client] = {}
        self._owner: dict[int, Hashable] = {}
        """Who was given a chunk that nobody else has yet."""
        self._given = np.zeros(count, dtype=np.bool_)
        self._copies = np.zeros(count, dtype=np.uint16)
        self._claimed_s = np.zeros(count, dtype=np.float64)
        self._fresh = list(range(count))
        rng.shuffle(self._fresh)

    def join(self, client: Hashable) -> None:
        """A downloader is here, perhaps again."""
        if client not in self._clients:
            self._clients[client] = _Client(np.zeros(self._count, dtype=np.bool_))

    def leave(self, client: Hashable) -> None:
        """The downloader is gone with all it had: what only it was given can be given again."""
        state = self._clients.pop(client)
        self._copies[state.has] -= 1
        for index in state.unspread:
            del self._owner[index]
            if self._copies[index] == 0:
                self._given[index] = False
                self._fresh.append(index)

    def reported(self, client: Hashable, indices: Iterable[int], now_s: float) -> None:
        """The client says that it has these chunks."""
        state = self._clients[client]
        for index in indices:
            if state.has[index]:
                continue
            state.has[index] = True
            self._copies[index] += 1
            if self._copies[index] == 1:
                self._claimed_s[index] = now_s
            owner = self._owner.get(index)
            if owner is not None and owner != client:
                self._spread(index, owner, now_s)

    def _spread(self, index: int, owner: Hashable, now_s: float) -> None:
        del self._owner[index]
        state = self._clients[owner]
        took_s = now_s - max(state.unspread.pop(index), state.last_spread_s)
        state.last_spread_s = now_s
        state.pace_s = took_s if state.pace_s is None else state.pace_s + _WEIGHT * (took_s - state.pace_s)

    def take(self, client: Hashable, now_s: float) -> int | None:
        """The chunk to give to the client now, noted as given; None if it has all that others lack."""
        state = self._clients[client]
        index = self._next(state, now_s)
        if index is not None:
            self._given[index] = True
            if self._copies[index] == 0:
                self._owner[index] = client
                state.unspread[index] = now_s
        return index

    def _next(self, state: _Client, now_s: float) -> int | None:
        passed: list[int] = []
        found: int | None = None
        while self._fresh and found is None:
            index = self._fresh.pop()
            if self._given[index] or self._copies[index]:
                continue
            if state.has[index]:
                passed.append(index)
            else:
                found = index
        self._fresh += reversed(passed)
        if found is None:
            doubtful = self._doubtful() & ~state.has & (self._claimed_s <= now_s - PATIENCE_S)
            if doubtful.any():
                found = int(doubtful.argmax())
        return found

    def _doubtful(self) -> Mask:
        mask: Mask = ~self._given & (self._copies == 1)
        return mask

    @property
    def active(self) -> bool:
        """Whether there are chunks that nobody has been given or is known to have."""
        while self._fresh and (self._given[self._fresh[-1]] or self._copies[self._fresh[-1]]):
            self._fresh.pop()
        return bool(self._fresh) or bool(self._doubtful().any())

    def spread_s(self, client: Hashable, now_s: float) -> float:
        """How long the client is expected to need to pass on what it has, and one chunk more."""
        state = self._clients[client]
        known = [other.pace_s for other in self._clients.values() if other.pace_s is not None]
        pace_s = state.pace_s if state.pace_s is not None else (min(known) if known else 1.0)
        if state.unspread:
            waiting_s = now_s - max(state.last_spread_s, min(state.unspread.values()))
            pace_s = max(pace_s, waiting_s)
        return (len(state.unspread) + 1) * max(pace_s, 1e-3)
