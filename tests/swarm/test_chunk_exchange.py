"""Chunks from several peers: loss, corruption, peers that stall, leave, lack or come late; serving onward."""

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from peers.base import Session, SessionEnded
from peers.chunk_exchange import TransferFailed, TransferProgress, TransferReport, fetch_chunks
from peers.chunk_frames import (
    ANY,
    CANCEL,
    MAX_MESSAGE_BYTES,
    OPENING,
    REFUSAL,
    SPARE,
    WANT,
    Sealed,
    decode,
    encode_have,
    encode_holdings,
    encode_indices,
    encode_sealed,
    piece_head,
)
from peers.chunk_serving import CHUNK_PROTOCOL, MAX_WANTS, ChunkServer
from peers.chunk_shelf import ChunkShelf
from peers.file_assembly import StoredFile, open_assembly, part_path
from peers.memory_transport import MemoryNetwork
from protocol.envelope import open_envelope, seal
from protocol.messages import ChunkSession, Refusal
from protocol.refusals import RefusalReason
from tests.swarm.chunk_holders import Content, Holder, MemoryFile
from tests.swarm.small_swarm import SmallNode, connect, running, until

CHUNK = 1_000
COUNT = 40
CONTENT = Content(CHUNK, COUNT, short_by=700)
SIZE = len(CONTENT.data)


def whole(network: MemoryNetwork, number: int, **links: float) -> Holder:
    return Holder(network, number, CONTENT, **links)


def empty(network: MemoryNetwork, number: int, **links: float) -> Holder:
    return Holder(network, number, CONTENT, [], **links)


async def test_several_providers_share_the_work(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    providers = [whole(network, number, uplink_bytes_per_s=5_000) for number in range(1, 5)]
    node = empty(network, 9)
    seen: list[TransferProgress] = []
    async with running(node, *providers):
        await connect(node, *providers)
        report = await node.fetch(*providers, progress=seen.append)
    assert min(report.bytes_by_peer[provider.peer] for provider in providers) >= 6 * CHUNK
    assert report.seconds < 1.3 * SIZE / (4 * 5_000)
    assert report.wasted_bytes <= 2 * CHUNK
    assert seen[0] == TransferProgress(0, COUNT, 0, SIZE)
    assert seen[-1] == TransferProgress(COUNT, COUNT, SIZE, SIZE)
    assert [progress.done_chunks for progress in seen] == list(range(COUNT + 1))


async def test_the_faster_provider_gives_more(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    slow, fast = (
        whole(network, number, uplink_bytes_per_s=rate) for number, rate in ((1, 1_000), (2, 10_000))
    )
    node = empty(network, 9)
    async with running(node, slow, fast):
        await connect(node, slow, fast)
        report = await node.fetch(slow, fast)
    assert report.bytes_by_peer[fast.peer] > 4 * report.bytes_by_peer[slow.peer]
    assert report.seconds < 1.2 * SIZE / 11_000, "the slow one is left out at the end"


async def test_what_is_there_already_is_not_fetched_again(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = whole(network, 1), Holder(network, 9, CONTENT, range(30))
    async with running(node, provider):
        await connect(node, provider)
        report = await node.fetch(provider)
        assert report.bytes_by_peer.total() == sum(len(chunk) for chunk in CONTENT.chunks[30:])
        assert (await node.fetch()).seconds == 0, "nothing to do needs nobody"


async def test_messages_that_come_late_or_cost_the_session_are_survived(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    providers = [whole(network, number) for number in range(1, 4)]
    node = empty(network, 9)
    async with running(node, *providers):
        await connect(node, *providers)
        network.set_default(loss=0.1, corrupt=0.05)
        await node.fetch(*providers)
    assert node.refusals == [], "nobody is to blame"


async def test_a_corrupting_peer_is_dropped_counted_and_others_do_the_work(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    honest, liar, node = whole(network, 1), whole(network, 2), empty(network, 9)
    for index, chunk in liar.file.chunks.items():
        liar.file.chunks[index] = chunk[:-1] + bytes([chunk[-1] ^ 1])
    async with running(node, honest, liar):
        await connect(node, honest, liar)
        report = await node.fetch(honest, liar)
        assert node.swarm.reputation.score(liar.peer, trio.current_time()) < 0.6
        assert node.swarm.reputation.score(honest.peer, trio.current_time()) == 1
    assert report.bytes_by_peer == {honest.peer: SIZE}
    assert report.wrong_hash == {liar.peer: 1}, "and never asked again"
    assert node.refusals == [(liar.peer, RefusalReason.WRONG_HASH)]


async def test_a_stalling_peer_delays_only_its_own_chunks_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    honest = whole(network, 1, uplink_bytes_per_s=10_000)
    stalling = Holder(network, 2, CONTENT, late_s=1e6)
    node = empty(network, 9)
    async with running(node, honest, stalling):
        await connect(node, honest, stalling)
        report = await node.fetch(honest, stalling)
    assert report.bytes_by_peer == {honest.peer: SIZE}
    assert report.seconds < 1.2 * SIZE / 10_000, "what waited there was asked of the other"


async def test_a_provider_that_leaves_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(dead_after_s=15)
    leaver, dier, stayer = (whole(network, number, uplink_bytes_per_s=2_000) for number in (1, 2, 3))
    node = empty(network, 9)
    async with running(node, leaver, dier, stayer) as nursery:
        await connect(node, leaver, dier, stayer)

        async def go() -> None:
            await trio.sleep(1.7)
            await leaver.stop()
            await trio.sleep(1)
            await dier.crash()

        nursery.start_soon(go)
        report = await node.fetch(leaver, dier, stayer)
    assert all(report.bytes_by_peer[peer.peer] for peer in (leaver, dier, stayer))
    assert report.seconds < SIZE / 2_000, "faster than one alone, and nobody waited for the dead"


async def test_a_provider_that_comes_late_ends_the_waiting(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    poor, late, node = empty(network, 1), whole(network, 2), empty(network, 9)
    async with running(node, poor, late) as nursery:
        await connect(node, poor)

        async def come() -> None:
            await trio.sleep(60)
            await connect(node, late)

        nursery.start_soon(come)
        report = await node.fetch(poor, late)
    assert 60 <= report.seconds < 62
    assert node.transport.bytes_sent[CHUNK_PROTOCOL] < 2_000, "a peer that has nothing is not asked"


async def test_a_peer_gets_the_file_while_others_already_wait_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    provider, node = SmallNode(network, 1), empty(network, 9)
    shelf = ChunkShelf()
    ChunkServer(provider.swarm, shelf)
    file = MemoryFile(CONTENT.layout, {})
    async with running(node, provider) as nursery:
        await connect(node, provider)

        async def grow() -> None:
            await trio.sleep(5)
            shelf.add(file)
            for index, chunk in enumerate(CONTENT.chunks):
                await trio.sleep(0.1)
                await file.keep(index, chunk)

        nursery.start_soon(grow)
        report = await node.fetch(provider)
    assert 9 <= report.seconds < 9.2


async def test_giving_up_tells_what_each_peer_s_trouble_was(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    poor, node, absent = Holder(network, 1, CONTENT, range(5)), empty(network, 9), SmallNode(network, 8)
    async with running(node, poor):
        await connect(node, poor)
        began_s = trio.current_time()
        with pytest.raises(TransferFailed) as failed:
            await node.fetch(poor, absent, give_up_s=90)
        assert 90 <= trio.current_time() - began_s < 100
    text = str(failed.value)
    assert text.startswith("35 of 40 chunks are missing and none came for 90 s; ")
    assert f"{poor.identity.name}: lacks what is missing here" in text
    assert f"{absent.identity.name}: no answer yet (not connected)" in text
    assert sorted(node.file.arrived) == [0, 1, 2, 3, 4]


async def test_a_full_disk_ends_the_transfer_with_its_own_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    provider, node = whole(network, 1), empty(network, 9)

    async def full(index: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with running(node, provider):
        await connect(node, provider)
        with pytest.raises(OSError, match="No space left"):
            await fetch_chunks(node.swarm, CONTENT.layout, lambda: [provider.peer], full)


async def test_bytes_in_flight_and_in_the_sink_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    providers = [whole(network, number) for number in range(1, 6)]
    node = empty(network, 9)
    held = most = 0

    async def slow_disk(index: int, data: bytes) -> None:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await trio.sleep(0.5)
        held -= 1

    async with running(node, *providers):
        await connect(node, *providers)
        await fetch_chunks(
            node.swarm,
            CONTENT.layout,
            lambda: [provider.peer for provider in providers],
            slow_disk,
            max_in_flight_bytes=4 * CHUNK,
        )
    assert most == 4


async def test_a_cancelled_transfer_stops_asking(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = whole(network, 1, uplink_bytes_per_s=1_000), empty(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        with trio.move_on_after(10) as scope:
            await node.fetch(provider)
        assert scope.cancelled_caught
        await trio.sleep(2)
        got, served = len(node.file.arrived), provider.server.bytes_served.total()
        await trio.sleep(60)
        assert 0 < len(node.file.arrived) == got < COUNT
        assert provider.server.bytes_served.total() == served


@pytest.mark.parametrize("cap", ["max_upload_bytes_per_s", "max_download_bytes_per_s"])
async def test_a_cap_holds_over_all_transfers_of_a_node(
    autojump_clock: trio.testing.MockClock, cap: str
) -> None:
    network = MemoryNetwork()
    one, two = Content(CHUNK, COUNT), Content(CHUNK, COUNT, seed=8)
    if cap == "max_upload_bytes_per_s":
        provider, nodes = Holder(network, 1, one, **{cap: 2_000.0}), [Holder(network, 9, one, [])]
        provider.shelf.add(MemoryFile(two.layout, dict(enumerate(two.chunks))))
        nodes.append(Holder(network, 8, two, []))
        others = [provider]
    else:
        nodes = [Holder(network, 9, one, [], **{cap: 2_000.0})]
        others = [Holder(network, 1, one), Holder(network, 2, two)]
    began_s = trio.current_time()
    async with running(*nodes, *others):
        for node in nodes:
            await connect(node, *others)
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.fetch, *others)
            if len(nodes) == 1:
                second = MemoryFile(two.layout, {})
                peers = [other.peer for other in others]
                nursery.start_soon(fetch_chunks, nodes[0].swarm, two.layout, lambda: peers, second.keep)
        took_s = trio.current_time() - began_s
    assert took_s == pytest.approx(2 * CHUNK * COUNT / 2_000, rel=0.05)


async def test_calls_stay_quick_while_chunks_fill_the_uplink(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    content = Content(100_000, 60)
    provider = Holder(network, 1, content, uplink_bytes_per_s=1_000_000)
    node = Holder(network, 9, content, [])
    slowest = 0.0

    async def answer(peer: object, data: bytes) -> bytes:
        return data

    provider.transport.serve("/test/echo/1", answer, max_request_bytes=10, max_concurrent=1)
    async with running(node, provider) as nursery:
        await connect(node, provider)

        async def ping() -> None:
            nonlocal slowest
            while True:
                began_s = trio.current_time()
                await node.transport.request(
                    provider.peer, "/test/echo/1", b"hello", timeout_s=10, max_response_bytes=10
                )
                slowest = max(slowest, trio.current_time() - began_s)
                await trio.sleep(0.05)

        nursery.start_soon(ping)
        await node.fetch(provider)
    assert 0 < slowest < 0.2


# What a downloader may not do, and what a server may not.


Talk = Callable[[Session], Awaitable[None]]


async def answers_to(talk: Talk, name: bytes = CONTENT.layout.name) -> list[RefusalReason]:
    """What a server refuses of a session in which `talk` does the talking after an honest opening."""
    network = MemoryNetwork()
    provider, node = whole(network, 1, uplink_bytes_per_s=1_000), SmallNode(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        session = await node.transport.open_session(
            provider.peer, CHUNK_PROTOCOL, max_message_bytes=MAX_MESSAGE_BYTES
        )
        await session.send(encode_sealed(OPENING, node.swarm.seal(ChunkSession(file=name))))
        await session.receive()
        await talk(session)
        with pytest.raises(SessionEnded), trio.fail_after(60):
            while True:
                frame = decode(await session.receive(), COUNT)
                if isinstance(frame, Sealed) and frame.kind == REFUSAL:
                    told = Refusal.decode(open_envelope(frame.envelope, run_id=None).body)
        assert [(node.peer, RefusalReason(told.reason))] == provider.refusals
    return [reason for _, reason in provider.refusals]


def saying(*messages: bytes) -> Talk:
    async def talk(session: Session) -> None:
        for message in messages:
            await session.send(message)

    return talk


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b""], RefusalReason.MALFORMED),
        ([b"\x63rubbish"], RefusalReason.MALFORMED),
        ([encode_indices(WANT, [COUNT])], RefusalReason.MALFORMED),
        ([encode_indices(SPARE, [ANY])], RefusalReason.MALFORMED),
        ([encode_indices(WANT, [0])[:-1]], RefusalReason.MALFORMED),
        ([piece_head(0, 0, 0) + b"data"], RefusalReason.MALFORMED),
        ([encode_have([1, 2], 0)] * 3_000, RefusalReason.MALFORMED),
        ([encode_indices(WANT, [ANY] * (MAX_WANTS + 1))], RefusalReason.OVERSIZED),
    ],
    ids=["empty", "rubbish", "index", "spare any", "cut", "piece", "flood of news", "flood of wants"],
)
async def test_a_downloader_that_does_not_keep_to_the_protocol_is_refused(
    autojump_clock: trio.testing.MockClock, messages: list[bytes], reason: RefusalReason
) -> None:
    assert await answers_to(saying(*messages)) == [reason]


async def test_an_opening_is_checked_like_a_call(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node, other = whole(network, 1), SmallNode(network, 9), SmallNode(network, 8)
    body = ChunkSession(file=CONTENT.layout.name).encode()
    cases = [
        (b"rubbish", RefusalReason.MALFORMED),
        (bytes(5_000), RefusalReason.OVERSIZED),
        (other.swarm.seal(ChunkSession(file=CONTENT.layout.name)), RefusalReason.WRONG_SENDER),
        (seal(node.identity, b"x" * 32, "chunk_session", 1, body), RefusalReason.WRONG_RUN),
        (seal(node.identity, node.swarm.run_id, "hello", 2, body), RefusalReason.WRONG_KIND),
        (seal(node.identity, node.swarm.run_id, "chunk_session", 3, b"\x80"), RefusalReason.MALFORMED),
        (seal(node.identity, node.swarm.run_id, "chunk_session", 3, body), RefusalReason.REPLAYED),
    ]
    async with running(node, provider):
        await connect(node, provider)
        for data, reason in cases:
            session = await node.transport.open_session(
                provider.peer, CHUNK_PROTOCOL, max_message_bytes=MAX_MESSAGE_BYTES
            )
            await session.send(encode_sealed(OPENING, data))
            frame = decode(await session.receive(), 0)
            assert isinstance(frame, Sealed) and frame.kind == REFUSAL
            assert provider.refusals[-1] == (node.peer, reason)
            await session.aclose()
    assert provider.server.bytes_served.total() == 0


async def test_what_is_withdrawn_does_not_come(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = whole(network, 1, uplink_bytes_per_s=1_000), SmallNode(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        session = await node.transport.open_session(
            provider.peer, CHUNK_PROTOCOL, max_message_bytes=MAX_MESSAGE_BYTES
        )
        await session.send(encode_sealed(OPENING, node.swarm.seal(ChunkSession(file=CONTENT.layout.name))))
        await session.receive()
        await session.send(encode_indices(WANT, [1, 2, 3]))
        await session.send(encode_indices(CANCEL, [2, 3]))
        await trio.sleep(10)
    assert provider.server.bytes_served.total() == CHUNK


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x63rubbish",
        encode_indices(WANT, [0]),
        encode_sealed(REFUSAL, b"no envelope"),
        piece_head(0, 0, 0) + bytes(CHUNK + 1),
        piece_head(0, 500, 0) + bytes(10),
        piece_head(COUNT, 0, 0) + bytes(10),
    ],
    ids=["empty", "rubbish", "want", "refusal", "too long", "middle", "index"],
)
async def test_a_server_that_does_not_keep_to_the_protocol_is_survived(
    autojump_clock: trio.testing.MockClock, answer: bytes
) -> None:
    network = MemoryNetwork()
    honest, liar, node = whole(network, 1, uplink_bytes_per_s=5_000), SmallNode(network, 2), empty(network, 9)

    async def lie(session: Session) -> None:
        await session.receive()
        await session.send(encode_holdings(np.ones(COUNT, dtype=np.bool_), False, 0))
        await session.receive()
        await session.send(answer)
        await trio.sleep_forever()

    liar.transport.serve_sessions(CHUNK_PROTOCOL, lie, max_message_bytes=MAX_MESSAGE_BYTES, max_per_peer=4)
    async with running(node, honest, liar):
        await connect(node, honest, liar)
        report = await node.fetch(honest, liar)
    assert report.bytes_by_peer == {honest.peer: SIZE}
    assert report.seconds < 2 * SIZE / 5_000


# Passing on.


async def test_a_chain_of_nodes_serves_onward_while_it_downloads(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork(delay_s=0.02, jitter_s=0.02)
    source = whole(network, 1, uplink_bytes_per_s=5_000)
    chain = [source, *(empty(network, number, uplink_bytes_per_s=5_000) for number in range(2, 16))]
    reports: dict[int, TransferReport] = {}

    async def follow(position: int) -> None:
        reports[position] = await chain[position].fetch(chain[position - 1])

    async with running(*chain):
        for left, right in itertools.pairwise(chain):
            await connect(right, left)
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for position in range(1, len(chain)):
                nursery.start_soon(follow, position)
        whole_s = trio.current_time() - began_s
    hop_s = SIZE / 5_000
    assert whole_s < 2 * hop_s, f"14 hops one after the other would take {14 * hop_s:.0f} s"
    assert source.server.bytes_served.total() == SIZE


# To a file.


def stored(path: Path) -> StoredFile:
    layout = CONTENT.layout
    return StoredFile(path, layout.size_bytes, layout.chunk_size, layout.chunks)


async def download(
    node: SmallNode, provider: SmallNode, path: Path, *, stop_after: int | None = None
) -> TransferReport | None:
    """Download to `path`; None if cut off after some chunks, as by a kill."""
    layout = CONTENT.layout
    async with open_assembly(path, layout.size_bytes, layout.chunk_size, layout.chunks) as assembly:
        with trio.CancelScope() as scope:

            def watch(progress: TransferProgress) -> None:
                if stop_after is not None and progress.done_chunks >= stop_after:
                    scope.cancel()

            report = await fetch_chunks(
                node.swarm,
                layout,
                lambda: [provider.peer],
                assembly.write,
                already=set(assembly.verified),
                progress=watch,
            )
            await assembly.finish()
            return report
    return None


async def test_a_download_cut_off_resumes_where_it_was(tmp_path: Path) -> None:
    # Real time: the disk works in threads, which a clock that jumps would not wait for.
    network = MemoryNetwork(delay_s=0.0)
    provider, node = SmallNode(network, 1), SmallNode(network, 9)
    source, target = tmp_path / "source", tmp_path / "sub" / "model.safetensors"
    source.write_bytes(CONTENT.data)
    shelf = ChunkShelf()
    shelf.add(stored(source))
    ChunkServer(provider.swarm, shelf)
    async with running(node, provider):
        await connect(node, provider)
        assert await download(node, provider, target, stop_after=25) is None
        assert part_path(target).exists() and not target.exists()
        report = await download(node, provider, target)
    assert report is not None and report.bytes_by_peer.total() <= SIZE - 24 * CHUNK
    assert target.read_bytes() == CONTENT.data
    assert [file.name for file in target.parent.iterdir()] == ["model.safetensors"]


async def test_a_part_file_is_served_onward(tmp_path: Path) -> None:
    network = MemoryNetwork(delay_s=0.0)
    first, second = SmallNode(network, 1), SmallNode(network, 2)
    third = Holder(network, 3, CONTENT, [])
    source = tmp_path / "source"
    source.write_bytes(CONTENT.data)
    offered, growing = ChunkShelf(), ChunkShelf()
    offered.add(stored(source))
    ChunkServer(first.swarm, offered)
    ChunkServer(second.swarm, growing)
    halfway, go_on = trio.Event(), trio.Event()
    layout = CONTENT.layout

    async with running(first, second, third) as nursery:
        await connect(second, first, third)
        async with open_assembly(
            tmp_path / "copy", layout.size_bytes, layout.chunk_size, layout.chunks
        ) as assembly:
            growing.add(assembly)

            async def with_a_pause(index: int, data: bytes) -> None:
                await assembly.write(index, data)
                if len(assembly.verified) >= 20:
                    halfway.set()
                    await go_on.wait()

            async def pull() -> None:
                await fetch_chunks(second.swarm, layout, lambda: [first.peer], with_a_pause)
                await assembly.finish()

            nursery.start_soon(pull)
            await halfway.wait()

            def note(progress: TransferProgress) -> None:
                if progress.done_chunks:
                    go_on.set()

            with trio.fail_after(30):
                await third.fetch(second, progress=note)
            await until(lambda: (tmp_path / "copy").exists(), within_s=10)
    assert (tmp_path / "copy").read_bytes() == CONTENT.data
