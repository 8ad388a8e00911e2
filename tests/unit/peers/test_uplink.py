"""Turns on the uplink: order, room, caps."""

import pytest
import trio

from peers.uplink import BURST_S, MAX_PIECE_BYTES, MIN_PIECE_BYTES, RateLimit, Uplink


class Link:
    """A link that carries 1,000 bytes per second and may have 1,000 under way."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def room_s(self, taken_bytes: int) -> float:
        return max(0.0, self.free_s + taken_bytes / 1_000 - trio.current_time() - 1.0)

    def send(self, size_bytes: int) -> None:
        self.free_s = max(self.free_s, trio.current_time()) + size_bytes / 1_000


async def take(uplink, link, size, order, done, name):
    async with uplink.turn(size, lambda: order) as turn:
        link.send(size)
        turn.sent_bytes = size
    done.append(name)


async def test_turns_wait_for_room_and_go_in_order(autojump_clock):
    link = Link()
    uplink = Uplink(link.room_s, RateLimit())
    done = []
    began_s = trio.current_time()
    link.free_s = began_s
    async with trio.open_nursery() as nursery:
        await take(uplink, link, 2_000, (1.0,), done, "first come")
        for name, order in (("last", (3.0, 0.0)), ("second", (1.0, 9.0)), ("third", (2.0, 1.0))):
            nursery.start_soon(take, uplink, link, 1_000, order, done, name)
    assert done == ["first come", "second", "third", "last"]
    assert trio.current_time() - began_s == pytest.approx(3.0, abs=0.01)


async def test_an_order_that_changes_while_it_waits_counts_as_it_is(autojump_clock):
    link = Link()
    link.free_s = trio.current_time() + 5
    uplink = Uplink(link.room_s, RateLimit())
    orders = {"a": (1.0,), "b": (2.0,)}
    done = []

    async def go(name):
        async with uplink.turn(1_000, lambda: orders[name]):
            link.send(1_000)
        done.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go, "a")
        nursery.start_soon(go, "b")
        await trio.sleep(1)
        orders["a"] = (3.0,)
    assert done == ["b", "a"]


async def test_a_waiting_turn_that_is_cancelled_leaves_the_others_theirs(autojump_clock):
    link = Link()
    link.free_s = trio.current_time() + 5
    uplink = Uplink(link.room_s, RateLimit())
    done = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, uplink, link, 1_000, (2.0,), done, "b")
        with trio.move_on_after(1):
            await take(uplink, link, 1_000, (1.0,), done, "a")
    assert done == ["b"]


async def test_a_cap_is_kept_over_any_time_but_for_a_burst(autojump_clock):
    limit = RateLimit(1_000.0)
    uplink = Uplink(lambda taken: 0.0, limit)
    began_s = trio.current_time()
    for count in range(1, 101):
        async with uplink.turn(100, lambda: (0.0,)) as turn:
            turn.sent_bytes = 100
        assert (count - 1) * 100 <= 1_000 * (trio.current_time() - began_s + BURST_S) + 1e-6
    assert trio.current_time() - began_s == pytest.approx(9.9 - BURST_S, abs=1e-6)


async def test_what_was_not_sent_is_not_charged_and_calls_are_not_capped(autojump_clock):
    limit = RateLimit(1_000.0)
    uplink = Uplink(lambda taken: 0.0, limit)
    began_s = trio.current_time()
    for _ in range(10):
        async with uplink.turn(4_096, lambda: (0.0,)) as turn:
            turn.sent_bytes = 100
        async with uplink.turn(10**9, lambda: (-1.0,), capped=False):
            pass
    assert trio.current_time() - began_s == pytest.approx(0.9 - BURST_S, abs=1e-6)


async def test_taking_waits_until_it_is_paid_for(autojump_clock):
    limit = RateLimit(1_000.0)
    began_s = trio.current_time()
    for _ in range(5):
        await limit.take(1_000)
    assert trio.current_time() - began_s == pytest.approx(5.0 - BURST_S)
    await RateLimit().take(10**12)
    assert trio.current_time() - began_s == pytest.approx(5.0 - BURST_S)


def test_pieces_fit_the_link():
    rate: list[float | None] = [None]
    uplink = Uplink(lambda taken: 0.0, RateLimit(), lambda: rate[0])
    assert uplink.piece_bytes() == MAX_PIECE_BYTES
    rate[0] = 1e9
    assert uplink.piece_bytes() == MAX_PIECE_BYTES
    rate[0] = 1_000_000.0
    assert uplink.piece_bytes() == 50_000
    rate[0] = 1_000.0
    assert uplink.piece_bytes() == MIN_PIECE_BYTES
    assert Uplink(lambda taken: 0.0, RateLimit(1_000_000.0)).piece_bytes() == 50_000
