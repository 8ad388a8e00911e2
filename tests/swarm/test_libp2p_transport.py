"""Real libp2p hosts on loopback: what they carry, and what one bad peer cannot do to the others."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_varint_prefixed

from peers import libp2p_services, libp2p_yamux
from peers.base import (
    PeerEvent,
    PeerId,
    PeerUnreachable,
    RequestTimeout,
    ResponseTooLarge,
    Session,
    SessionEnded,
    TransportError,
)
from peers.libp2p_address import peer_id_to_multihash, peer_id_to_text
from peers.libp2p_engine import MESHSUB
from peers.libp2p_transport import Libp2pTransport
from protocol.identity import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO = "/test/echo/1"
SIZE = "/test/size/1"


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def zeros(peer: PeerId, payload: bytes) -> bytes:
    """As many bytes as asked for."""
    return bytes(int(payload))


def make(number: int, listen: str = LOOPBACK, key: bytes | None = None) -> Libp2pTransport:
    node = Libp2pTransport(identity(number), listen=[listen], private_network_key=key)
    node.serve(ECHO, echo, max_request_bytes=1024, max_concurrent=8)
    node.serve(SIZE, zeros, max_request_bytes=16, max_concurrent=8)
    return node


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Libp2pTransport]]:
    async with AsyncExitStack() as stack:
        started = [make(number) for number in range(1, count + 1)]
        for node in started:
            await stack.enter_async_context(node.running())
        yield started


async def connect(a: Libp2pTransport, b: Libp2pTransport) -> None:
    assert await a.connect(b.addresses[0], 10) == b.peer_id


async def ask(
    node: Libp2pTransport,
    peer: PeerId,
    payload: bytes = b"hello",
    protocol: str = ECHO,
    timeout_s: float = 10,
) -> bytes:
    return await node.request(peer, protocol, payload, timeout_s=timeout_s, max_response_bytes=2**24)


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    with trio.fail_after(timeout_s):
        while not condition():
            await trio.sleep(0.02)


def port_of(node: Libp2pTransport) -> int:
    return int(node.listening[0].split("/")[4])


async def test_requests_are_answered_both_ways_and_events_tell_of_the_connection():
    async with nodes(2) as (a, b):
        seen = b.events()
        await connect(a, b)
        assert await ask(a, b.peer_id) == b"hello"
        assert await ask(b, a.peer_id, b"") == b""
        assert a.connected_peers() == {b.peer_id}
        assert b.connected_peers() == {a.peer_id}
        await a.disconnect(b.peer_id)
        await until(lambda: not b.connected_peers())
        with trio.fail_after(5):
            assert [await seen.receive(), await seen.receive()] == [
                PeerEvent(a.peer_id, True),
                PeerEvent(a.peer_id, False),
            ]
        with pytest.raises(PeerUnreachable, match="not connected"):
            await ask(a, b.peer_id)


async def test_large_answers_arrive_whole_and_concurrently():
    async with nodes(2) as (a, b):
        await connect(a, b)
        sizes = []

        async def fetch(size: int) -> None:
            sizes.append(len(await ask(a, b.peer_id, b"%d" % size, SIZE)))

        async with trio.open_nursery() as nursery:
            for size in (8 * 2**20, 65_472, 65_468, 65_469, 1):
                nursery.start_soon(fetch, size)
        assert sorted(sizes) == [1, 65_468, 65_469, 65_472, 8 * 2**20]


async def test_what_is_too_large_is_refused_and_the_connection_stays():
    async with nodes(2) as (a, b):
        await connect(a, b)
        with pytest.raises(ResponseTooLarge, match="announced 101 bytes, allowed are 100"):
            await a.request(b.peer_id, SIZE, b"101", timeout_s=5, max_response_bytes=100)
        with pytest.raises(TransportError, match="without an answer"):
            await ask(a, b.peer_id, b"x" * 1025)
        with pytest.raises(TransportError, match="at most 8,192 bytes"):
            await a.publish("news", bytes(8193))
        assert await ask(a, b.peer_id) == b"hello"
        assert b.counters["request_too_large"] == 1


async def test_a_failing_handler_and_an_unserved_protocol_end_one_request_only():
    async def refuse(peer: PeerId, payload: bytes) -> bytes:
        raise ValueError("no")

    async with nodes(2) as (a, b):
        b.serve("/test/refuse/1", refuse, max_request_bytes=10, max_concurrent=1)
        await connect(a, b)
        with pytest.raises(TransportError, match="without an answer"):
            await ask(a, b.peer_id, b"", "/test/refuse/1")
        with pytest.raises(TransportError, match="does not serve"):
            await ask(a, b.peer_id, b"", "/test/nothing/1")
        assert await ask(a, b.peer_id) == b"hello"
        assert b.counters["handler_failed"] == 1


async def test_a_silent_handler_times_the_caller_out_and_nothing_else():
    async def never(peer: PeerId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with nodes(2) as (a, b):
        b.serve("/test/never/1", never, max_request_bytes=10, max_concurrent=1)
        await connect(a, b)
        with pytest.raises(RequestTimeout, match=r"within 0\.2 s"):
            await ask(a, b.peer_id, b"", "/test/never/1", timeout_s=0.2)
        assert await ask(a, b.peer_id) == b"hello"


async def test_transfers_cancelled_at_any_point_leave_the_connection_usable():
    async with nodes(2) as (a, b):
        await connect(a, b)
        for tenth in range(12):
            with trio.move_on_after(tenth * 0.004):
                await ask(a, b.peer_id, b"%d" % (4 * 2**20), SIZE)
        assert await ask(a, b.peer_id) == b"hello"
        muxed = a._engine.connections(b.peer_id)[0].muxed_conn
        # What remains are the two gossip streams: neither streams nor unread bytes are left.
        await until(lambda: len(muxed.streams) <= 2 and muxed.unread_bytes == 0)


async def test_an_address_that_leads_nowhere_or_to_somebody_else_is_unreachable():
    async with nodes(2) as (a, b):
        location = b.listening[0]
        with pytest.raises(PeerUnreachable, match="handshake failed"):
            await a.connect(f"{location}/p2p/{peer_id_to_text(PeerId(identity(9).key))}", 5)
        with pytest.raises(PeerUnreachable, match="port 1: Connection refused"):
            await a.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_to_text(b.peer_id)}", 5)
        with pytest.raises(PeerUnreachable, match=r"'nowhere\.invalid' cannot be resolved"):
            await a.connect(f"/dns4/nowhere.invalid/tcp/1/p2p/{peer_id_to_text(b.peer_id)}", 10)
        with pytest.raises(PeerUnreachable, match="itself"):
            await a.connect(a.addresses[0], 5)
        with pytest.raises(PeerUnreachable, match="not a TCP address"):
            await a.connect(f"/ip4/127.0.0.1/udp/1/p2p/{peer_id_to_text(b.peer_id)}", 5)
        assert not a.connected_peers()


async def test_names_are_resolved_before_dialing():
    async with nodes(2) as (a, b):
        address = f"/dns/localhost/tcp/{port_of(b)}/p2p/{peer_id_to_text(b.peer_id)}"
        assert await a.connect(address, 10) == b.peer_id
        assert await ask(a, b.peer_id) == b"hello"


async def test_a_listener_that_never_answers_times_the_dial_out():
    async with nodes(1) as (a,):
        silent = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        async with silent:
            port = silent.socket.getsockname()[1]
            with pytest.raises(RequestTimeout, match=r"within 0\.3 s"):
                await a.connect(
                    f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id_to_text(PeerId(identity(9).key))}", 0.3
                )


async def test_two_nodes_that_dial_each_other_at_once_can_talk():
    async with nodes(2) as (a, b):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(connect, a, b)
                nursery.start_soon(connect, b, a)
        for _ in range(5):
            assert await ask(a, b.peer_id) == b"hello"
            assert await ask(b, a.peer_id) == b"hello"


async def test_gossip_crosses_a_node_in_the_middle_and_is_not_echoed():
    async with nodes(3) as (a, middle, c):
        heard = [await node.subscribe("news") for node in (a, middle, c)]
        await connect(a, middle)
        await connect(middle, c)
        gossip = middle._engine.gossip
        await until(lambda: len(gossip.mesh["news"]) == 2)
        for number in range(40):
            await a.publish("news", b"%d" % number)
        with trio.fail_after(10):
            received = [await heard[2].receive() for _ in range(40)]
        assert sorted(int(message.data) for message in received) == list(range(40))
        assert {message.relayed_by for message in received} == {middle.peer_id}
        assert heard[0].statistics().current_buffer_used == 0


async def test_garbage_and_silence_on_the_port_disturb_nobody():
    async with nodes(2) as (a, b):
        news = await b.subscribe("news")
        await a.subscribe("news")
        await connect(a, b)
        quiet = []
        for sent in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(3000),
            b"\xff" * 9 + b"\x01",
            b"\x13/multistream/1",
        ):
            for _ in range(5):
                stream = await trio.open_tcp_stream("127.0.0.1", port_of(b))
                await stream.send_all(sent)
                quiet.append(stream)
        for stream in quiet[::2]:
            await stream.aclose()
        # Length prefixes that announce far too much are refused before any memory is taken for them.
        await until(lambda: b.counters["handshake_failed"] >= 13)
        assert await ask(a, b.peer_id) == b"hello"
        await until(lambda: len(a._engine.gossip.mesh["news"]) == 1)
        await a.publish("news", b"still here")
        with trio.fail_after(5):
            assert (await news.receive()).data == b"still here"
        for stream in quiet[1::2]:
            await trio.aclose_forcefully(stream)
        assert b.counters["network_restarts"] == 0


async def test_malformed_gossip_of_one_peer_ends_nothing():
    async with nodes(3) as (a, b, bad):
        news = await b.subscribe("news")
        await a.subscribe("news")
        await connect(a, b)
        await connect(bad, b)
        target = ID(peer_id_to_multihash(b.peer_id))
        forged = rpc_pb2.Message(
            from_id=b"?", seqno=b"1", topicIDs=["news"], data=b"x", key=b"junk", signature=b"s"
        )
        oversized = rpc_pb2.Message(data=bytes(300_000), topicIDs=["news"])
        for sent in (
            b"\xff" * 12,
            encode_varint_prefixed(b"\xff" * 40),
            encode_varint_prefixed(rpc_pb2.RPC(publish=[forged]).SerializeToString()),
            encode_varint_prefixed(rpc_pb2.RPC(publish=[oversized]).SerializeToString()),
        ):
            stream = await bad._engine.host.new_stream(target, [MESHSUB])
            with suppress(IOException):  # it is reset as soon as the length is seen
                await stream.write(sent)
        await until(lambda: len(a._engine.gossip.mesh["news"]) == 1)
        await a.publish("news", b"still here")
        with trio.fail_after(5):
            message = await news.receive()
        assert (message.data, message.relayed_by) == (b"still here", a.peer_id)
        assert b.counters["network_restarts"] == 0


async def test_a_message_over_the_limit_is_not_passed_on():
    async with nodes(2) as (a, b):
        news = await b.subscribe("news")
        await a.subscribe("news")
        await connect(a, b)
        await until(lambda: len(a._engine.gossip.mesh["news"]) == 1)
        a._engine.pubsub.remove_topic_validator("news")
        await a._engine.pubsub.publish("news", bytes(8193))
        await a.publish("news", bytes(8192))
        with trio.fail_after(5):
            assert len((await news.receive()).data) == 8192


async def test_a_sender_that_ignores_flow_control_loses_its_connection(monkeypatch):
    monkeypatch.setattr(libp2p_yamux, "MAX_UNREAD_BYTES", 2**20)

    async def never(peer: PeerId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with nodes(3) as (a, b, bad):
        b.serve("/test/never/1", never, max_request_bytes=10, max_concurrent=1)
        await connect(a, b)
        await connect(bad, b)
        stream = await bad._engine.host.new_stream(
            ID(peer_id_to_multihash(b.peer_id)), [TProtocol("/test/never/1")]
        )
        stream.muxed_stream.send_window = 2**30
        await stream.write(bytes(4))
        with pytest.raises(IOException), trio.fail_after(20):
            for _ in range(200):
                await stream.write(bytes(60_000))
        await until(lambda: b.connected_peers() == {a.peer_id})
        assert await ask(a, b.peer_id) == b"hello"


async def test_streams_beyond_the_bound_of_one_peer_are_reset(monkeypatch):
    monkeypatch.setattr(libp2p_services, "MAX_STREAMS_PER_PEER", 5)
    async with nodes(2) as (a, b):
        await connect(a, b)
        target = ID(peer_id_to_multihash(b.peer_id))
        idle = [await a._engine.host.open_stream(target) for _ in range(8)]
        await until(lambda: b.counters["stream_refused_too_many"] >= 3)
        for stream in idle:
            await libp2p_services.end_stream(stream, ok=False)
        await until(lambda: not b._engine.host._streams_of[ID(peer_id_to_multihash(a.peer_id))] > 1)
        assert await ask(a, b.peer_id) == b"hello"


async def test_a_node_without_a_listening_address_can_dial():
    silent = Libp2pTransport(identity(9), listen=[])
    async with nodes(1) as (a,), silent.running():
        assert silent.addresses == []
        await connect(silent, a)
        assert await ask(silent, a.peer_id) == b"hello"


async def test_cancelling_the_block_closes_everything_within_two_seconds():
    async with nodes(1) as (a,):
        b = make(2)
        began = trio.current_time()
        with trio.move_on_after(60) as scope:
            async with b.running():
                await connect(a, b)
                began = trio.current_time()
                scope.cancel()
                await trio.sleep_forever()
        assert trio.current_time() - began < 2
        await until(lambda: not a.connected_peers())


@pytest.mark.parametrize("other", [None, bytes(range(32))], ids=["no key", "another key"])
async def test_a_private_network_refuses_nodes_without_its_key(other):
    key = bytes(reversed(range(32)))
    inside, also_inside, outside = make(1, key=key), make(2, key=key), make(3, key=other)
    async with inside.running(), also_inside.running(), outside.running():
        await connect(inside, also_inside)
        assert await ask(inside, also_inside.peer_id) == b"hello"
        for a, b in ((outside, inside), (inside, outside)):
            with pytest.raises(PeerUnreachable, match=r"handshake failed.*private"):
                await a.connect(b.addresses[0], 3)
        assert inside.connected_peers() == {also_inside.peer_id}


async def test_a_port_in_use_is_named_with_what_to_do():
    async with nodes(1) as (a,):
        second = make(2, listen=a.listening[0])
        with pytest.raises(TransportError, match=f"127.0.0.1 port {port_of(a)}.*choose another port"):
            async with second.running():
                pass


async def test_a_restarted_peer_on_the_same_port_is_reached_again():
    async with nodes(1) as (a,):
        b = make(2)
        async with b.running():
            await connect(a, b)
            listening = b.listening[0]
            began = trio.current_time()
        assert trio.current_time() - began < 2
        await until(lambda: not a.connected_peers())
        again = make(2, listen=listening)
        async with again.running():
            await connect(a, again)
            assert await ask(a, again.peer_id) == b"hello"
            assert await ask(again, a.peer_id) == b"hello"


@asynccontextmanager
async def child_node(number: int) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """A node in a process of its own, and its address."""
    root = Path(__file__).parents[2]
    code = (
        "import trio, sys\n"
        "from peers.libp2p_transport import Libp2pTransport\n"
        "from protocol.identity import Identity\n"
        "async def zeros(peer, payload):\n"
        "    return bytes(int(payload))\n"
        "async def main():\n"
        f"    node = Libp2pTransport(Identity.from_seed(bytes([{number}]) * 32), listen=['{LOOPBACK}'])\n"
        f"    node.serve('{SIZE}', zeros, max_request_bytes=16, max_concurrent=8)\n"
        "    async with node.running():\n"
        "        await node.subscribe('news')\n"
        "        print(node.addresses[0], flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = (await trio.to_thread.run_sync(process.stdout.readline)).decode().strip()
        yield process, address
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_peer_killed_in_the_middle_of_a_transfer_is_noticed_and_disturbs_nobody():
    async with nodes(2) as (a, b), child_node(7) as (process, address):
        news = await b.subscribe("news")
        await a.subscribe("news")
        await connect(a, b)
        victim = await a.connect(address, 10)
        outcome = []

        async def fetch() -> None:
            try:
                await ask(a, victim, b"%d" % (15 * 2**20), SIZE, timeout_s=30)
                outcome.append("answered")
            except TransportError as error:
                outcome.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            muxed = a._engine.connections(victim)[0].muxed_conn
            await until(lambda: any(stream.received_bytes > 2**16 for stream in muxed.streams.values()))
            os.kill(process.pid, signal.SIGKILL)
        assert "closed" in outcome[0]
        await until(lambda: a.connected_peers() == {b.peer_id})
        with pytest.raises(PeerUnreachable):
            await a.connect(address, 5)
        assert await ask(a, b.peer_id) == b"hello"
        await until(lambda: len(a._engine.gossip.mesh["news"]) == 1)
        await a.publish("news", b"still here")
        with trio.fail_after(5):
            assert (await news.receive()).data == b"still here"
        assert a.counters["network_restarts"] == 0


async def test_a_frozen_peers_connection_is_dropped_after_a_request_to_it_timed_out():
    async with nodes(1) as (a,), child_node(7) as (process, address):
        frozen = await a.connect(address, 10)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(RequestTimeout):
            await ask(a, frozen, b"1", SIZE, timeout_s=0.3)
        await until(lambda: not a.connected_peers(), timeout_s=15)
        os.kill(process.pid, signal.SIGCONT)


async def test_a_peer_that_came_back_elsewhere_replaces_its_frozen_self():
    async with nodes(1) as (a,), child_node(7) as (process, address):
        frozen = await a.connect(address, 10)
        os.kill(process.pid, signal.SIGSTOP)
        again = make(7)
        async with again.running():
            assert await a.connect(again.addresses[0], 3) == frozen
            assert len(a._engine.connections(frozen)) == 1
            assert await ask(a, frozen) == b"hello"


async def test_bulk_in_both_directions_and_small_requests_do_not_wait_for_each_other():
    async with nodes(2) as (a, b):
        await connect(a, b)

        async def fetch(node: Libp2pTransport, peer: PeerId, size: int, times: int) -> None:
            for _ in range(times):
                assert len(await ask(node, peer, b"%d" % size, SIZE, timeout_s=20)) == size

        async with trio.open_nursery() as nursery:
            for node, peer in ((a, b.peer_id), (b, a.peer_id)):
                for _ in range(3):
                    nursery.start_soon(fetch, node, peer, 2**20, 4)
                nursery.start_soon(fetch, node, peer, 1, 40)


async def test_crashed_services_are_rebuilt_on_the_same_port_with_topics_and_handlers():
    async with nodes(2) as (a, b):
        news = await b.subscribe("news")
        await a.subscribe("news")
        await connect(a, b)
        address, engine, events = b.addresses[0], b._engine, b.events()

        async def fail() -> None:
            raise RuntimeError("a service died")

        engine.swarm.manager._manager.run_task(fail)
        await until(lambda: b._engine is not None and b._engine is not engine)
        assert b.counters["network_restarts"] == 1
        assert events.receive_nowait() == PeerEvent(a.peer_id, False)
        assert b.addresses == [address]
        await until(lambda: not a.connected_peers())
        await connect(a, b)
        assert await ask(a, b.peer_id) == b"hello"
        await until(lambda: len(a._engine.gossip.mesh["news"]) == 1)
        await a.publish("news", b"again")
        with trio.fail_after(5):
            assert (await news.receive()).data == b"again"


async def test_a_failing_network_task_is_counted_and_ends_nothing():
    async with nodes(2) as (a, b):
        await connect(a, b)

        async def fail() -> None:
            raise RuntimeError("one task died")

        for service in (b._engine.swarm, b._engine.pubsub, b._engine.gossip):
            service.manager.run_task(fail)
        await until(lambda: b.counters["network_task_failed"] == 3)
        assert await ask(a, b.peer_id) == b"hello"
        assert b.counters["network_restarts"] == 0


# Sessions.

TALK = "/test/talk/1"


async def repeat(session: Session) -> None:
    """Say back whatever comes, as bulk if it is long, until the other side ends the session."""
    try:
        while True:
            message = bytes(await session.receive())
            if message == b"enough":
                return
            if len(message) > 1_000:
                await session.wait_bulk(len(message))
                await session.send_bulk(message[:10], message[10:])
            else:
                await session.send(message)
    except SessionEnded:
        pass


async def test_sessions_carry_whole_messages_both_ways_until_either_side_ends_them():
    async with nodes(2) as (a, b):
        b.serve_sessions(TALK, repeat, max_message_bytes=70_000, max_per_peer=2)
        await connect(a, b)
        session = await a.open_session(b.peer_id, TALK, max_message_bytes=70_000)
        assert session.peer == b.peer_id
        for message in (b"x", b"", os.urandom(65_480), b"y" * 999, os.urandom(4_000)):
            await session.send(message)
            with trio.fail_after(10):
                assert bytes(await session.receive()) == message
        await session.send(b"enough")
        with pytest.raises(SessionEnded), trio.fail_after(10):
            await session.receive()
        await session.aclose()
        with pytest.raises(SessionEnded):
            await session.send(b"more")
        muxed = a._engine.connections(b.peer_id)[0].muxed_conn
        await until(lambda: len(muxed.streams) <= 2)
        assert await ask(a, b.peer_id) == b"hello"


async def test_a_session_ends_with_its_connection_and_with_what_is_too_large_or_not_served():
    async with nodes(2) as (a, b):
        b.serve_sessions(TALK, repeat, max_message_bytes=100, max_per_peer=1)
        with pytest.raises(PeerUnreachable):
            await a.open_session(b.peer_id, TALK, max_message_bytes=100)
        await connect(a, b)
        for protocol, message in (("/test/nothing/1", b"x"), (TALK, bytes(101))):
            session = await a.open_session(b.peer_id, protocol, max_message_bytes=100)
            await session.send(message)
            with pytest.raises(SessionEnded), trio.fail_after(10):
                await session.receive()
            await session.aclose()
        first = await a.open_session(b.peer_id, TALK, max_message_bytes=100)
        await first.send(b"x")
        assert bytes(await first.receive()) == b"x"
        second = await a.open_session(b.peer_id, TALK, max_message_bytes=100)
        with pytest.raises(SessionEnded), trio.fail_after(10):
            await second.receive()
        assert b.counters["session_refused_too_many"] == 1
        await b.disconnect(a.peer_id)
        with pytest.raises(SessionEnded), trio.fail_after(10):
            await first.receive()


async def test_small_messages_overtake_bulk_that_waits_and_bulk_waits_for_its_reader():
    arrived: list[int] = []
    go_on = trio.Event()

    async def read(session: Session) -> None:
        await go_on.wait()
        while True:
            arrived.append(len(await session.receive()))

    async with nodes(2) as (a, b):
        b.serve_sessions(TALK, read, max_message_bytes=70_000, max_per_peer=1)
        await connect(a, b)
        session = await a.open_session(b.peer_id, TALK, max_message_bytes=70_000)
        sent = 0
        with trio.move_on_after(1):
            while True:
                await session.wait_bulk(60_000)
                await session.send_bulk(b"", bytes(60_000))
                sent += 1
        assert 3 <= sent <= 8, "256 KiB are the reader's window"
        await session.send(b"small")
        go_on.set()
        await until(lambda: len(arrived) == sent + 1)
        await session.wait_bulk(60_000)


async def test_a_message_for_a_session_that_nobody_reads_any_more_is_dropped():
    async with nodes(2) as (a, b):
        b.serve_sessions(TALK, repeat, max_message_bytes=70_000, max_per_peer=1)
        await connect(a, b)
        session = await a.open_session(b.peer_id, TALK, max_message_bytes=70_000)
        await session.send(b"enough")
        with pytest.raises(SessionEnded), trio.fail_after(10):
            while True:
                await session.wait_bulk(60_000)
                await session.send_bulk(b"", bytes(60_000))
                await session.receive()
        await session.aclose()
        muxed = b._engine.connections(a.peer_id)[0].muxed_conn
        await until(lambda: muxed.unread_bytes == 0)
