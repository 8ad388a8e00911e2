"""Sequence numbers: never twice, ascending, and normally without a wait for the disk."""

from pathlib import Path

import trio
import trio.testing

from swarmnode.runtime.sequence_numbers import BLOCK, LEAST, SequenceNumbers
from swarmnode.runtime.store_thread import StoreThread
from swarmnode.store import Store


async def test_numbers_ascend_across_blocks_and_restarts(tmp_path: Path, nursery: trio.Nursery) -> None:
    seen: list[int] = []
    for _ in range(2):
        store = Store(tmp_path / "state.sqlite")
        numbers = SequenceNumbers(store, StoreThread(store))
        async with trio.open_nursery() as life:
            life.start_soon(numbers.run)
            for count in range(BLOCK + LEAST):
                seen.append(numbers.next())
                if count % 500 == 0:
                    await trio.testing.wait_all_tasks_blocked(0.001)
            life.cancel_scope.cancel()
        store.close()
    assert seen == sorted(set(seen))


async def test_a_new_block_is_reserved_before_the_old_one_ends(tmp_path: Path, nursery: trio.Nursery) -> None:
    store = Store(tmp_path / "state.sqlite")
    numbers = SequenceNumbers(store, StoreThread(store))
    nursery.start_soon(numbers.run)
    first = numbers.next()
    for _ in range(BLOCK - LEAST):
        numbers.next()
    with trio.fail_after(10):
        while store.counter("sequence") != first + 2 * BLOCK:
            await trio.sleep(0.01)
    reserved = store.reserve
    store.reserve = None  # type: ignore[assignment,method-assign]
    assert [numbers.next() for _ in range(LEAST)][-1] == first + BLOCK
    store.reserve = reserved  # type: ignore[method-assign]
    nursery.cancel_scope.cancel()
