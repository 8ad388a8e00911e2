"""The bounded broadcast and the request gate."""

import pytest
import trio

from peers.base import PeerId
from peers.drop_oldest import DropOldestBroadcast
from peers.request_gate import GateFull, RequestGate


async def test_each_subscriber_gets_everything_sent_after_it_came():
    broadcast: DropOldestBroadcast[int] = DropOldestBroadcast(4)
    early = broadcast.subscribe()
    broadcast.send(1)
    late = broadcast.subscribe()
    broadcast.send(2)
    broadcast.close()
    assert [item async for item in early] == [1, 2]
    assert [item async for item in late] == [2]


async def test_a_full_channel_loses_its_oldest_item_and_only_that_channel():
    broadcast: DropOldestBroadcast[int] = DropOldestBroadcast(2)
    slow, quick = broadcast.subscribe(), broadcast.subscribe()
    dropped = []
    for number in range(4):
        dropped.append(broadcast.send(number))
        assert await quick.receive() == number
    assert dropped == [0, 0, 1, 1]
    assert broadcast.dropped == 2
    broadcast.close()
    assert [item async for item in slow] == [2, 3]


async def test_a_subscriber_that_closed_its_channel_is_forgotten():
    broadcast: DropOldestBroadcast[int] = DropOldestBroadcast(1)
    broadcast.subscribe().close()
    assert not broadcast.has_subscribers()
    assert broadcast.send(1) == broadcast.send(2) == 0


async def test_one_peer_cannot_take_all_places_of_the_gate(autojump_clock):
    gate = RequestGate(max_concurrent=1)  # 1 slot and 8 places to wait: 5 for one peer
    greedy, modest = PeerId(b"g" * 32), PeerId(b"m" * 32)
    outcomes: dict[PeerId, list[str]] = {greedy: [], modest: []}

    async def request(peer: PeerId) -> None:
        try:
            async with gate.enter(peer):
                await trio.sleep(1)
            outcomes[peer].append("served")
        except GateFull:
            outcomes[peer].append("refused")

    async with trio.open_nursery() as nursery:
        for peer in [greedy] * 10 + [modest] * 3:
            nursery.start_soon(request, peer)
    assert outcomes[greedy].count("served") == 5
    assert outcomes[modest] == ["served"] * 3
    async with gate.enter(greedy):  # all places were given back
        pass


async def test_a_gate_without_slots_is_a_mistake():
    with pytest.raises(ValueError):
        RequestGate(0)
