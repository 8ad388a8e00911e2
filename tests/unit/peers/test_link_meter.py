"""What the kernel says of connections, as room for bulk. The kernel is a model: a link with a queue."""

import struct

import pytest
import trio

from peers.link_meter import FIRST_LIMIT_BYTES, LEAST_LIMIT_BYTES, QUEUE_S, RATE_WINDOW_S, STUCK_S, LinkMeter

RATE = 1_000_000.0


class ModelSocket:
    """A connection whose bytes are acknowledged at `rate`, a round trip after they left."""

    def __init__(self, meter: LinkMeter, rate: float = RATE, round_trip_s: float = 0.0) -> None:
        self.meter = meter
        self.rate = rate
        self.round_trip_s = round_trip_s
        self.sent_bytes = 0
        self.unsent = 0
        self.open = True
        self._left: list[tuple[float, int]] = []
        self._free_s = 0.0
        self._acked = 0

    def send(self, size: int) -> None:
        self.sent_bytes += size
        self.meter.sent(self, size)  # type: ignore[arg-type]
        if self.rate:
            self._free_s = max(self._free_s, trio.current_time()) + size / self.rate
            self._left.append((self._free_s + self.round_trip_s, self.sent_bytes))

    def tcp_info(self) -> bytes | None:
        if not self.open:
            return None
        while self._left and self._left[0][0] <= trio.current_time():
            self._acked = self._left.pop(0)[1]
        info = bytearray(232)
        struct.pack_into("=Q", info, 120, self._acked)
        struct.pack_into("=I", info, 144, self.unsent)
        struct.pack_into("=I", info, 148, int(self.round_trip_s * 1e6))
        return bytes(info)


async def saturate(meter: LinkMeter, socket: ModelSocket, seconds: float, piece: int = 10_000) -> list[float]:
    """Send whenever there is room; how long what was sent each time had to wait in the link."""
    waits = []
    end_s = trio.current_time() + seconds
    while trio.current_time() < end_s:
        wait_s = meter.room_s(0)
        if wait_s > 0:
            await trio.sleep(wait_s)
        else:
            socket.send(piece)
            waits.append(socket._free_s - trio.current_time())
    return waits


@pytest.mark.parametrize("round_trip_s", [0.0, 0.1, 0.4])
async def test_a_saturated_link_is_always_busy_and_its_queue_short(autojump_clock, round_trip_s):
    meter = LinkMeter()
    socket = ModelSocket(meter, round_trip_s=round_trip_s)
    await saturate(meter, socket, 10)
    sent_before, began_s = socket.sent_bytes, trio.current_time()
    waits = await saturate(meter, socket, 10)
    assert (socket.sent_bytes - sent_before) / (trio.current_time() - began_s) == pytest.approx(
        RATE, rel=0.05
    )
    assert meter.rate() == pytest.approx(RATE, rel=0.1)
    # What the round trip holds is no queue. A piece may go on top of what is allowed.
    assert max(waits) < QUEUE_S + 0.05 + 0.1 * round_trip_s


async def test_a_slow_link_keeps_little_under_way(autojump_clock):
    meter = LinkMeter()
    socket = ModelSocket(meter, rate=50_000.0)
    await saturate(meter, socket, 10, piece=4_096)
    waits = await saturate(meter, socket, 10, piece=4_096)
    assert max(waits) < (LEAST_LIMIT_BYTES + 4_096) / 50_000 + 0.01


async def test_before_anything_is_known_some_may_be_sent(autojump_clock):
    meter = LinkMeter()
    socket = ModelSocket(meter, rate=1_000.0)
    assert meter.rate() is None
    socket.send(FIRST_LIMIT_BYTES - 1)
    assert meter.room_s(0) == 0
    assert meter.room_s(1) > 0
    assert LinkMeter().room_s(10**9) > 0, "turns that hold more than is allowed wait for one another"


async def test_what_turns_hold_counts(autojump_clock):
    meter = LinkMeter()
    socket = ModelSocket(meter)
    await saturate(meter, socket, 3)
    await trio.sleep(1)
    assert meter.room_s(0) == 0
    assert meter.room_s(200_000) > 0


async def test_a_receiver_that_takes_nothing_blocks_its_own_socket_only(autojump_clock):
    meter = LinkMeter()
    good, stuck = ModelSocket(meter), ModelSocket(meter, rate=0.0)
    await saturate(meter, good, 3)
    stuck.send(150_000)
    stuck.unsent = 150_000
    assert meter.room_s(0) > 0
    await trio.sleep(STUCK_S + 0.1)
    assert meter.room_s(0) == 0


async def test_a_closed_socket_is_forgotten(autojump_clock):
    meter = LinkMeter()
    socket = ModelSocket(meter, rate=0.0)
    socket.send(10**9)
    assert meter.room_s(0) > 0
    socket.open = False
    await trio.sleep(0.1)
    assert meter.room_s(0) == 0


async def test_the_rate_follows_a_link_that_becomes_slower(autojump_clock):
    meter = LinkMeter()
    socket = ModelSocket(meter)
    await saturate(meter, socket, 5)
    socket.rate = RATE / 10
    await saturate(meter, socket, RATE_WINDOW_S + 2)
    assert meter.rate() == pytest.approx(RATE / 10, rel=0.2)
