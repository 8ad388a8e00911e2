"""How many requests of one protocol are answered at once, and how many may wait, in all and per peer."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from peers.base import PeerId

WAITING_PER_SLOT = 8
"""Requests that may wait for each that runs: enough for a burst, bounded so that a flood is refused."""


HANDLER_TIMEOUT_S = 120.0
"""A handler that takes longer is cancelled and its stream closed."""


class GateFull(Exception):
    """Too many requests wait already."""


class RequestGate:
    """At most `max_concurrent` requests inside, `WAITING_PER_SLOT` times as many waiting in order of arrival.

    One peer may hold half of the places, so that it cannot keep the others out.
    """

    def __init__(self, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ValueError("max_concurrent must be at least 1")
        self._slots = trio.Semaphore(max_concurrent)
        self._places = max_concurrent * (1 + WAITING_PER_SLOT)
        self._held: Counter[PeerId] = Counter()

    @asynccontextmanager
    async def enter(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a slot. Raises `GateFull` at once when all places, or this peer's half, are taken."""
        if self._held.total() >= self._places or self._held[peer] >= (self._places + 1) // 2:
            raise GateFull
        self._held[peer] += 1
        try:
            async with self._slots:
                yield
        finally:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
