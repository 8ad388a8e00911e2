"""A service is restarted with back-off for ever; cancellation passes through and is no crash."""

import itertools
import random

import pytest
import trio

from peers.supervisor import Crash, describe, supervise


async def test_a_crashing_service_is_restarted_with_growing_delays(autojump_clock):
    crashes: list[Crash] = []
    starts: list[float] = []

    async def service():
        starts.append(trio.current_time())
        raise OSError("socket gone")

    with trio.move_on_after(600):
        await supervise("gossip", service, crashes.append, rng=random.Random(1))
    assert len(starts) > 20, "it never gives up"
    delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(0.5 * 0.5 * 2**n <= delay <= 0.5 * 2**n for n, delay in enumerate(delays[:6]))
    assert all(15 <= delay <= 30 for delay in delays[6:])
    assert [crash.attempt for crash in crashes[:3]] == [1, 2, 3]
    assert str(crashes[0]).startswith("gossip crashed (OSError: socket gone); restart 1 in 0.")


async def test_a_service_that_was_healthy_for_long_starts_again_quickly(autojump_clock):
    crashes: list[Crash] = []

    async def service():
        await trio.sleep(100)
        raise ValueError("now and then")

    with trio.move_on_after(1000):
        await supervise("discovery", service, crashes.append)
    assert len(crashes) == 9
    assert {crash.attempt for crash in crashes} == {1}


async def test_a_service_that_ends_is_not_restarted(autojump_clock):
    crashes: list[Crash] = []
    runs = []

    async def service():
        runs.append(1)
        if len(runs) < 3:
            raise RuntimeError

    await supervise("once", service, crashes.append)
    assert len(runs) == 3 and len(crashes) == 2


async def test_cancelling_is_no_crash(autojump_clock):
    crashes: list[Crash] = []
    with trio.move_on_after(10) as scope:
        await supervise("idle", trio.sleep_forever, crashes.append)
    assert scope.cancelled_caught and crashes == []


async def test_cancelling_during_the_delay_ends_it(autojump_clock):
    async def service():
        raise RuntimeError

    with trio.move_on_after(0.1) as scope:
        await supervise("crasher", service, lambda crash: None, first_delay_s=10)
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(0.1)


async def test_a_crash_of_one_child_task_is_one_crash(autojump_clock):
    crashes: list[Crash] = []
    runs = []

    async def child():
        raise KeyError("peer")

    async def service():
        runs.append(1)
        if len(runs) == 2:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(child)

    await supervise("nursery", service, crashes.append)
    assert len(crashes) == 1
    assert describe(crashes[0].error) == "KeyError: 'peer'"


async def test_a_crash_while_being_cancelled_is_reported_and_the_cancellation_obeyed(autojump_clock):
    crashes: list[Crash] = []

    async def fails_when_cancelled():
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("could not flush")

    async def service():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_when_cancelled)
            nursery.start_soon(trio.sleep_forever)

    with trio.move_on_after(5) as scope:
        await supervise("flusher", service, crashes.append)
        raise AssertionError("must not be restarted")
    assert trio.current_time() < 6
    assert [describe(crash.error) for crash in crashes] == ["OSError: could not flush"]
    del scope


async def test_an_interrupt_passes_through(autojump_clock):
    async def service():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await supervise("interrupted", service, lambda crash: pytest.fail("not a crash"))


def test_describe_is_one_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(RuntimeError()) == "RuntimeError"
    group = ExceptionGroup("many", [ExceptionGroup("inner", [OSError(28, "No space")]), ValueError()])
    assert describe(group) == "OSError: [Errno 28] No space"
