"""One file to many on virtual time: how close the last peer comes to the least time that the links allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio
import trio.testing

from peers.memory_transport import MemoryNetwork
from tests.swarm.chunk_holders import Content, Holder
from tests.swarm.small_swarm import connect, running

CHUNK = 16_384
RATE = 80_000.0
"""Bytes per second of a uplink of relative speed 1: a chunk takes 0.2 s."""

DOWN_PER_UP = 4.0


@dataclass
class Outcome:
    last: float
    """Seconds of the last peer that was not lost, over the fluid limit."""
    source_sent: float
    """In sizes of the file."""
    peers: Sequence[Holder]


async def broadcast(
    count: int,
    chunks: int,
    *,
    uplinks: Sequence[float] = (1.0,),
    round_trip_s: float = 0.01,
    loss: float = 0.0,
    faults: Mapping[int, str] | None = None,
    neighbours: int | None = None,
) -> Outcome:
    """Give a file to `count` peers; `neighbours` bounds how many others each peer is connected to."""
    network = MemoryNetwork(delay_s=round_trip_s / 2, loss=loss)
    content = Content(CHUNK, chunks)
    mean = sum(uplinks) / len(uplinks)
    down = DOWN_PER_UP * RATE
    ups = [RATE * uplinks[number % len(uplinks)] / mean for number in range(count)]
    source = Holder(network, 1, content, uplink_bytes_per_s=RATE, downlink_bytes_per_s=down)
    peers = [
        Holder(network, number + 2, content, [], uplink_bytes_per_s=ups[number], downlink_bytes_per_s=down)
        for number in range(count)
    ]
    size = len(content.data)
    limit_s = max(size / RATE, size / down, count * size / (RATE + sum(ups)))
    for number, fault in (faults or {}).items():
        if fault == "corrupt":
            peers[number].file.spoils = True
        elif fault == "stalling":
            peers[number].file.stalls_after = 3
    lost = {number for number, fault in (faults or {}).items() if fault == "killed"}
    seconds: dict[int, float] = {}

    async def take(number: int) -> None:
        began_s = trio.current_time()
        with trio.CancelScope() as scope:
            nursery.start_soon(kill, number, scope)
            connected = peers[number].transport.connected_peers
            await peers[number].fetch_from(lambda: sorted(connected()))
            seconds[number] = trio.current_time() - began_s

    async def kill(number: int, scope: trio.CancelScope) -> None:
        if number in lost:
            await trio.sleep(limit_s / 2)
            scope.cancel()
            await peers[number].crash()

    async with running(source, *peers):
        for number, peer in enumerate(peers):
            await connect(peer, source)
            others = [peers[(number + 1 + step) % count] for step in range(count - 1)]
            await connect(peer, *others[: None if neighbours is None else neighbours // 2])
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(take, number)
    assert set(seconds) == set(range(count)) - lost
    sent = source.server.bytes_served.total() / size
    print("RATIO", max(seconds.values()) / limit_s, sent)
    return Outcome(max(seconds.values()) / limit_s, sent, peers)


async def test_equal_uplinks_come_close_to_the_limit(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await broadcast(8, 96)
    # The last chunk alone adds seven chunks' times if only one passes it on: 7 %.
    assert outcome.last <= 1.15
    assert outcome.source_sent <= 1.3


async def test_few_peers_come_as_close(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await broadcast(4, 96)
    assert outcome.last <= 1.10
    assert outcome.source_sent <= 1.3


async def test_unequal_uplinks_all_do_their_part(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await broadcast(8, 96, uplinks=(1, 2, 4, 8))
    assert outcome.last <= 1.30
    slow, fast = outcome.peers[0], outcome.peers[3]
    assert slow.server.bytes_served.total() < fast.server.bytes_served.total() / 4


async def test_long_round_trips_do_not_leave_links_idle(autojump_clock: trio.testing.MockClock) -> None:
    assert (await broadcast(8, 96, round_trip_s=0.2)).last <= 1.35


async def test_peers_that_die_stall_and_corrupt_cost_the_others_little(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = {2: "corrupt", 4: "killed", 5: "stalling", 7: "killed"}
    outcome = await broadcast(8, 96, faults=faults)
    assert outcome.last <= 1.40
    blamed = {peer for holder in outcome.peers for peer, _ in holder.refusals}
    assert blamed == {outcome.peers[2].peer}


async def test_fifty_peers_with_few_neighbours_loss_and_faults(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = {2: "corrupt", 5: "stalling", 4: "killed", 17: "killed", 30: "killed", 44: "killed"}
    outcome = await broadcast(50, 48, loss=0.01, faults=faults, neighbours=12)
    # One to all would take 50; a chunk is 2 % of the file, and passes through a few hands.
    assert outcome.last <= 2.0
    assert outcome.source_sent <= 2.0
