"""Numbers for this node's messages, none used twice, across restarts: blocks are reserved on disk."""

import time
from collections import deque

import trio

from swarmnode.runtime.store_thread import StoreThread
from swarmnode.store import Store

BLOCK = 4096
LEAST = 1024
"""A new block is reserved, in the background, when no more numbers than this are left."""


class SequenceNumbers:
    """Ascending. `run` keeps some ready, so that sending a message does not wait for the disk."""

    def __init__(self, store: Store, thread: StoreThread) -> None:
        self._store = store
        self._thread = thread
        self._blocks: deque[range] = deque()
        self._low = trio.Event()

    def next(self) -> int:
        """The next number."""
        if not self._blocks:
            self._add(_reserve(self._store))
        block = self._blocks.popleft()
        if len(block) > 1:
            self._blocks.appendleft(block[1:])
        if sum(map(len, self._blocks)) <= LEAST:
            self._low.set()
        return block[0]

    async def run(self) -> None:
        """Reserve in the background until cancelled."""
        while True:
            await self._low.wait()
            self._add(await self._thread.run(_reserve))
            self._low = trio.Event()

    def _add(self, start: int) -> None:
        if self._blocks and start < self._blocks[-1].start:
            return  # Two reservations overtook each other; numbers must ascend, and some may be left out.
        self._blocks.append(range(start, start + BLOCK))


def _reserve(store: Store) -> int:
    # A key whose ledger was lost must not start below the numbers that its peers have seen.
    return store.reserve("sequence", BLOCK, time.time_ns() // 1000)
