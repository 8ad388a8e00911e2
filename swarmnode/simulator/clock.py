"""Virtual time: events in the order of their times, equal times in the order in which they were scheduled."""

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Invariant: time never goes back; an event runs once. Nothing depends on how objects hash."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` at a time; one that has passed counts as now."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._scheduled, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` so much later."""
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until_s: float, check: Callable[[], None]) -> None:
        """Handle every event up to a time; `check` follows each of them."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
            self.handled += 1
            check()
        self.now = until_s
