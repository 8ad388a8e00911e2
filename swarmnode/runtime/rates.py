"""Rates over a sliding window, for display and offers."""

from collections import deque

import trio

WINDOW_S = 30.0


class Rate:
    """Events per second over the last `WINDOW_S` seconds (or since the first event, when that is shorter)."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def add(self, amount: float) -> None:
        """`amount` happened now."""
        self._events.append((trio.current_time(), amount))
        self._total += amount
        self._drop_old()

    def clear(self) -> None:
        """Forget everything: the source stopped."""
        self._events.clear()
        self._total = 0.0

    def per_second(self) -> float:
        """The current rate."""
        self._drop_old()
        if not self._events:
            return 0.0
        span = max(1.0, trio.current_time() - self._events[0][0])
        return max(0.0, self._total) / span

    def _drop_old(self) -> None:
        limit = trio.current_time() - WINDOW_S
        while self._events and self._events[0][0] < limit:
            self._total -= self._events.popleft()[1]
