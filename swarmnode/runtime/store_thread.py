"""Runs the store's transactions in one worker thread, so that a slow disk never stops the event loop."""

from collections.abc import Callable
from typing import TypeVar

import trio

from swarmnode.store import Store

Result = TypeVar("Result")


class StoreThread:
    """`await run(lambda store: store.accept(...))`: one transaction at a time, in order of arrival.

    A transaction that was started always finishes: cancelling the caller does not tear it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, transaction: Callable[[Store], Result]) -> Result:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(transaction, self._store, limiter=self._limiter)
