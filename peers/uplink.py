"""Who may send bulk next: turns on a node's way out, by order of urgency, and caps on bytes per second."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

MAX_PIECE_BYTES = 64 * 1024 - 64
"""The largest piece of bulk data: with what is put before it, one yamux frame in one Noise message."""

MIN_PIECE_BYTES = 4 * 1024
PIECE_S = 0.05
"""How long the link should need for one piece: control messages wait that long behind it."""

BURST_S = 0.05
"""What a capped link may send or take at once after a pause, in seconds of its rate."""

Order = tuple[float, ...]
"""Lowest first. A tuple, so that one kind of work can go before another whatever their numbers."""


class RateLimit:
    """At most `bytes_per_s` over any time, but for a burst of `BURST_S`; None: no limit."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_until_s = -math.inf

    def wait_s(self) -> float:
        """How long until something may be sent."""
        if self.bytes_per_s is None:
            return 0.0
        return max(0.0, self._paid_until_s - trio.current_time())

    def spend(self, size_bytes: int) -> None:
        """So many bytes are sent; a negative number takes back what was not."""
        if self.bytes_per_s is not None:
            since_s = max(self._paid_until_s, trio.current_time() - BURST_S)
            self._paid_until_s = since_s + size_bytes / self.bytes_per_s

    async def take(self, size_bytes: int) -> None:
        """Spend so many bytes and wait until they are paid for."""
        self.spend(size_bytes)
        if self.bytes_per_s is not None:
            await trio.sleep(self.wait_s())


@dataclass
class Turn:
    """One turn on the uplink."""

    sent_bytes: int = 0


@dataclass(eq=False)
class _Waiter:
    order: Callable[[], Order]
    event: trio.Event = field(default_factory=trio.Event)


class Uplink:
    """Bulk takes turns here, so that no more of it is under way than keeps the link busy.

    `room_s(taken_bytes)` tells how long the link has no place, given what turns hold that is not sent yet;
    0: there is place now. The waiting turn with the lowest order goes first; orders are looked at anew each
    time, for what is waited for may change.
    """

    def __init__(
        self,
        room_s: Callable[[int], float],
        limit: RateLimit,
        rate_bytes_per_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`rate_bytes_per_s` is what the link has carried lately, None if unknown."""
        self.limit = limit
        self._room_s = room_s
        self._rate_bytes_per_s = rate_bytes_per_s
        self._waiting: list[_Waiter] = []
        self._taken_bytes = 0

    def piece_bytes(self) -> int:
        """How much to send at once."""
        rates = [rate for rate in (self._rate_bytes_per_s(), self.limit.bytes_per_s) if rate is not None]
        if not rates:
            return MAX_PIECE_BYTES
        return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, int(min(rates) * PIECE_S)))

    @asynccontextmanager
    async def turn(
        self, size_bytes: int, order: Callable[[], Order], *, capped: bool = True
    ) -> AsyncIterator["Turn"]:
        """Wait for a place on the link; inside the block, send `size_bytes` at most and note how much it was.

        `capped`: the limit holds for it. Where there is one, uncapped turns should come first in order.
        """
        if self._waiting or self._wait_s(capped) > 0.0:
            await self._wait(order, capped)
        self._taken_bytes += size_bytes
        if capped:
            self.limit.spend(size_bytes)
        turn = Turn()
        try:
            yield turn
        finally:
            self._taken_bytes -= size_bytes
            if capped:
                self.limit.spend(turn.sent_bytes - size_bytes)
            self._wake_first()

    def _wait_s(self, capped: bool) -> float:
        wait_s = max(self.limit.wait_s() if capped else 0.0, self._room_s(self._taken_bytes))
        # A clock cannot be waited for in steps below its resolution.
        return wait_s if wait_s > 1e-6 else 0.0

    async def _wait(self, order: Callable[[], Order], capped: bool) -> None:
        waiter = _Waiter(order)
        self._waiting.append(waiter)
        try:
            while True:
                # The first in order watches the link for all. Who that is may change while it sleeps; there
                # is no place before it wakes in any case, and then it hands the watch over.
                first = self._first()
                wait_s = self._wait_s(capped) if first is waiter else math.inf
                if wait_s <= 0.0:
                    return
                if first is not waiter:
                    first.event.set()
                with trio.move_on_after(wait_s):
                    await waiter.event.wait()
                waiter.event = trio.Event()
        finally:
            self._waiting.remove(waiter)
            self._wake_first()

    def _first(self) -> _Waiter:
        return min(self._waiting, key=lambda waiter: waiter.order())

    def _wake_first(self) -> None:
        if self._waiting:
            self._first().event.set()
