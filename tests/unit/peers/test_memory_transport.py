"""The in-memory network: what it carries, what it loses, and that its seed alone decides."""

from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from peers.base import PeerEvent, PeerId, PeerUnreachable, RequestTimeout, ResponseTooLarge, TransportError
from peers.memory_link import Link
from peers.memory_transport import MemoryNetwork, MemoryTransport
from protocol.identity import Identity

ECHO = "/test/echo/1"


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


@asynccontextmanager
async def nodes(network: MemoryNetwork, count: int, **settings):
    """`count` running, unconnected nodes that answer ECHO."""
    async with AsyncExitStack() as stack:
        started = []
        for number in range(count):
            node = network.transport(identity(number), **settings)
            node.serve(ECHO, echo, max_request_bytes=2**20, max_concurrent=16)
            await stack.enter_async_context(node.running())
            started.append(node)
        yield started


async def connect(a: MemoryTransport, b: MemoryTransport) -> None:
    assert await a.connect(b.addresses[0], 5) == b.peer_id


def waiting(channel) -> list:
    received = []
    while True:
        try:
            received.append(channel.receive_nowait())
        except trio.WouldBlock:
            return received


async def ask(node: MemoryTransport, peer: PeerId, payload: bytes = b"hello", timeout_s: float = 10) -> bytes:
    return await node.request(peer, ECHO, payload, timeout_s=timeout_s, max_response_bytes=2**20)


async def test_requests_are_answered_both_ways_after_the_delay_of_the_link(autojump_clock):
    async with nodes(MemoryNetwork(delay_s=0.25), 2) as (a, b):
        await connect(a, b)
        began = trio.current_time()
        assert await ask(a, b.peer_id) == b"hello"
        assert trio.current_time() - began == pytest.approx(0.5)
        assert await ask(b, a.peer_id) == b"hello"


async def test_events_tell_both_sides_of_a_connection_and_of_its_end(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        seen_a, seen_b = a.events(), b.events()
        await connect(a, b)
        assert b.connected_peers() == {a.peer_id}
        await a.disconnect(b.peer_id)
        assert a.connected_peers() == b.connected_peers() == set()
        assert waiting(seen_a) == [PeerEvent(b.peer_id, True), PeerEvent(b.peer_id, False)]
        assert waiting(seen_b) == [PeerEvent(a.peer_id, True), PeerEvent(a.peer_id, False)]


async def test_unknown_and_unconnected_peers_are_unreachable(autojump_clock):
    network = MemoryNetwork()
    absent = network.transport(identity(99))
    async with nodes(network, 2) as (a, b):
        with pytest.raises(PeerUnreachable, match="not connected"):
            await ask(a, b.peer_id)
        with pytest.raises(PeerUnreachable, match="nobody listens"):
            await a.connect(absent.addresses[0], 5)
        with pytest.raises(PeerUnreachable, match="itself"):
            await a.connect(a.addresses[0], 5)
        with pytest.raises(PeerUnreachable, match="not an address"):
            await a.connect("/ip4/127.0.0.1/tcp/1", 5)


async def test_a_failing_handler_ends_only_its_own_request(autojump_clock):
    async def refuse(peer: PeerId, payload: bytes) -> bytes:
        raise ValueError("no")

    async with nodes(MemoryNetwork(), 2) as (a, b):
        b.serve("/test/refuse/1", refuse, max_request_bytes=10, max_concurrent=1)
        await connect(a, b)
        for payload in (b"x", b"x" * 11):
            with pytest.raises(TransportError, match="without an answer"):
                await a.request(b.peer_id, "/test/refuse/1", payload, timeout_s=5, max_response_bytes=10)
        with pytest.raises(TransportError, match="does not serve"):
            await a.request(b.peer_id, "/test/nothing/1", b"", timeout_s=5, max_response_bytes=10)
        assert await ask(a, b.peer_id) == b"hello"
        assert b.counters["handler_failed"] == 1
        assert b.counters["request_too_large"] == 1


async def test_an_answer_over_the_callers_limit_is_refused_before_it_travels(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        await connect(a, b)
        with pytest.raises(ResponseTooLarge):
            await a.request(b.peer_id, ECHO, b"x" * 11, timeout_s=5, max_response_bytes=10)
        assert b.total_bytes_sent == 0


async def test_a_lost_request_times_out(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        await connect(a, b)
        a._network.set_link(a.peer_id, b.peer_id, Link(loss=1.0), both_ways=False)
        began = trio.current_time()
        with pytest.raises(RequestTimeout):
            await ask(a, b.peer_id, timeout_s=3)
        assert trio.current_time() - began == pytest.approx(3)


async def test_a_duplicated_request_is_handled_twice_and_answered_once(autojump_clock):
    calls = []

    async def count(peer: PeerId, payload: bytes) -> bytes:
        calls.append(payload)
        return b"done"

    async with nodes(MemoryNetwork(duplicate=1.0), 2) as (a, b):
        b.serve("/test/count/1", count, max_request_bytes=10, max_concurrent=2)
        await connect(a, b)
        answer = await a.request(b.peer_id, "/test/count/1", b"once", timeout_s=5, max_response_bytes=10)
        assert (answer, calls) == (b"done", [b"once", b"once"])


async def test_corruption_flips_one_bit(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        await connect(a, b)
        a._network.set_link(b.peer_id, a.peer_id, Link(corrupt=1.0), both_ways=False)
        answer = await ask(a, b.peer_id, b"\0" * 100)
        assert sum(byte.bit_count() for byte in answer) == 1


async def faults_of(seed: int) -> list[bytes | None]:
    """Which of 40 concurrent requests come back, and how."""
    answers: list[bytes | None] = [None] * 40
    async with nodes(MemoryNetwork(seed, loss=0.2, corrupt=0.2), 2) as (a, b):
        await connect(a, b)

        async def one(number: int) -> None:
            with suppress(RequestTimeout):
                answers[number] = await ask(a, b.peer_id, bytes([number]) * 8)

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
    return answers


async def test_the_seed_alone_decides_what_is_lost_and_spoiled(autojump_clock):
    first = await faults_of(1)
    assert first == await faults_of(1)
    assert first != await faults_of(2)
    assert 0 < first.count(None) < 40


async def test_a_slow_uplink_is_shared_by_concurrent_transfers(autojump_clock):
    async with nodes(MemoryNetwork(delay_s=0), 3) as (a, b, c):
        await connect(a, b)
        await connect(a, c)
        a.wire.uplink_bytes_per_s = 64 * 1024
        took = []
        began = trio.current_time()

        async def fetch(node: MemoryTransport, size: int) -> None:
            await node.request(a.peer_id, ECHO, b"x" * size, timeout_s=60, max_response_bytes=2**20)
            took.append((size, trio.current_time() - began))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, b, 640 * 1024)
            nursery.start_soon(fetch, c, 64 * 1024)
        # The small answer takes turns with the large one; nothing of the rate is lost.
        assert took[0][0] == 64 * 1024
        assert took[0][1] <= 2.0
        assert took[1] == (640 * 1024, pytest.approx(11.0))
        assert a.bytes_sent[ECHO] == 704 * 1024


async def test_a_slow_downlink_bounds_what_fast_uplinks_bring(autojump_clock):
    async with nodes(MemoryNetwork(delay_s=0), 2) as (a, b):
        await connect(a, b)
        b.wire.downlink_bytes_per_s = 32 * 1024
        began = trio.current_time()
        await ask(b, a.peer_id, b"x" * 64 * 1024)
        assert trio.current_time() - began == pytest.approx(2.0)


async def test_an_abandoned_transfer_stops_using_the_uplink(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        await connect(a, b)
        b.wire.uplink_bytes_per_s = 16 * 1024
        with pytest.raises(RequestTimeout):
            await ask(a, b.peer_id, b"x" * 2**20, timeout_s=3)
        await trio.sleep(100)
        assert b.total_bytes_sent <= 4 * 16 * 1024


async def test_gossip_crosses_a_line_of_subscribers_once_each(autojump_clock):
    async with nodes(MemoryNetwork(), 3) as (a, b, c):
        await connect(a, b)
        await connect(b, c)
        heard = [await node.subscribe("news") for node in (a, b, c)]
        await a.publish("news", b"hi")
        await trio.sleep(1)
        received = [waiting(channel) for channel in heard]
        assert [len(messages) for messages in received] == [0, 1, 1]
        assert received[2][0].data == b"hi"
        assert received[2][0].relayed_by == b.peer_id


async def test_gossip_in_a_ring_is_delivered_once_unless_the_link_doubles_it(autojump_clock):
    network = MemoryNetwork()
    async with nodes(network, 3) as (a, b, c):
        for x, y in ((a, b), (b, c), (c, a)):
            await connect(x, y)
        heard = await b.subscribe("news")
        await c.subscribe("news")
        await a.publish("news", b"hi")
        await trio.sleep(1)
        assert len(waiting(heard)) == 1
        network.set_default(duplicate=1.0)
        await a.publish("news", b"ho")
        await trio.sleep(1)
        assert [message.data for message in waiting(heard)] == [b"ho", b"ho"]


async def test_a_slow_subscriber_loses_the_oldest_and_it_is_counted(autojump_clock):
    async with nodes(MemoryNetwork(), 2) as (a, b):
        await connect(a, b)
        heard = await b.subscribe("news")
        for number in range(600):
            await a.publish("news", b"%d" % number)
            await trio.sleep(0.1)
        await trio.sleep(1)
        numbers = [int(message.data) for message in waiting(heard)]
        assert numbers == list(range(88, 600))
        assert b.counters["gossip_dropped"] == 88


async def test_an_oversized_announcement_is_refused_at_the_sender(autojump_clock):
    async with nodes(MemoryNetwork(), 1) as (a,):
        with pytest.raises(TransportError, match="at most 8,192 bytes"):
            await a.publish("news", b"x" * 8193)


async def test_a_partition_is_silent_then_noticed_and_heals_by_a_new_connection(autojump_clock):
    network = MemoryNetwork(dead_after_s=20)
    async with nodes(network, 3) as (a, b, c):
        for x, y in ((a, b), (b, c), (a, c)):
            await connect(x, y)
        network.partition([a.peer_id, b.peer_id], [c.peer_id])
        with pytest.raises(RequestTimeout):
            await ask(a, c.peer_id, timeout_s=5)
        assert await ask(a, b.peer_id) == b"hello"
        await trio.sleep(20)
        assert a.connected_peers() == {b.peer_id}
        assert c.connected_peers() == set()
        with pytest.raises(RequestTimeout):
            await a.connect(c.addresses[0], 5)
        network.heal()
        await connect(a, c)
        assert await ask(c, a.peer_id) == b"hello"


async def test_a_short_partition_keeps_connections(autojump_clock):
    network = MemoryNetwork(dead_after_s=20)
    async with nodes(network, 2) as (a, b):
        await connect(a, b)
        network.partition([a.peer_id], [b.peer_id])
        await trio.sleep(10)
        network.heal()
        await trio.sleep(20)
        assert await ask(a, b.peer_id) == b"hello"


async def test_a_crash_is_noticed_and_the_restarted_node_can_be_dialed(autojump_clock):
    network = MemoryNetwork(dead_after_s=20)
    async with nodes(network, 1) as (a,):
        b = network.transport(identity(7))
        async with b.running():
            await connect(a, b)
            b.crash()
            await trio.sleep_forever()
        assert a.connected_peers() == {b.peer_id}
        with pytest.raises(PeerUnreachable, match="gone"):
            await ask(a, b.peer_id)
        assert a.connected_peers() == set()
        again = network.transport(identity(7))
        again.serve(ECHO, echo, max_request_bytes=10, max_concurrent=1)
        async with again.running():
            await connect(a, again)
            assert await ask(a, again.peer_id) == b"hello"
        assert a.connected_peers() == set()


async def test_a_peer_that_leaves_ends_the_requests_that_wait_for_it(autojump_clock):
    network = MemoryNetwork()

    async def never(peer: PeerId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with nodes(network, 1) as (a,):
        b = network.transport(identity(7))
        b.serve("/test/never/1", never, max_request_bytes=10, max_concurrent=1)
        async with b.running():
            await connect(a, b)

            async with trio.open_nursery() as nursery:

                async def expect_closed() -> None:
                    with pytest.raises(PeerUnreachable, match="closed during"):
                        await a.request(b.peer_id, "/test/never/1", b"", timeout_s=1000, max_response_bytes=1)

                nursery.start_soon(expect_closed)
                await trio.sleep(1)
                await b.disconnect(a.peer_id)


async def test_requests_beyond_the_bound_wait_and_a_flood_of_one_peer_is_refused(autojump_clock):
    running = []
    most = []

    async def slow(peer: PeerId, payload: bytes) -> bytes:
        running.append(payload)
        most.append(len(running))
        await trio.sleep(1)
        running.remove(payload)
        return b""

    async with nodes(MemoryNetwork(), 2) as (a, b):
        b.serve("/test/slow/1", slow, max_request_bytes=10, max_concurrent=2)
        await connect(a, b)
        outcomes = []

        async def one(number: int) -> None:
            try:
                await a.request(
                    b.peer_id, "/test/slow/1", b"%d" % number, timeout_s=100, max_response_bytes=1
                )
                outcomes.append("answered")
            except TransportError:
                outcomes.append("refused")

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(one, number)
        # 2 slots and 16 places to wait, of which one peer gets half: 9.
        assert (outcomes.count("answered"), outcomes.count("refused")) == (9, 21)
        assert max(most) == 2
        assert b.counters["request_refused_busy"] == 21


async def test_an_error_in_the_body_comes_out_as_itself():
    with pytest.raises(KeyError):
        async with MemoryNetwork().transport(identity(0)).running():
            raise KeyError
