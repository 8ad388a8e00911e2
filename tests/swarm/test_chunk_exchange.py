"""Chunks from several peers: loss, corruption, peers that stall, leave, lack or come late; serving onward."""

import hashlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from peers.base import PeerId
from peers.chunk_exchange import TransferFailed, TransferProgress, TransferReport, fetch_chunks
from peers.chunk_serving import CHUNK_PROTOCOL, DATA, ChunkServer, ChunkShelf, bit_map
from peers.file_assembly import StoredFile, open_assembly, part_path
from peers.memory_transport import MemoryNetwork
from protocol.envelope import seal
from protocol.messages import ChunkRequest
from protocol.refusals import RefusalReason
from tests.swarm.small_swarm import SmallNode, connect, running, until

CHUNK = 1_000
COUNT = 40
CONTENT = random.Random(7).randbytes(CHUNK * (COUNT - 1) + 300)
CHUNKS = [CONTENT[start : start + CHUNK] for start in range(0, len(CONTENT), CHUNK)]
NAMES = [hashlib.sha256(chunk).digest() for chunk in CHUNKS]
WANTED = [(name, len(chunk)) for name, chunk in zip(NAMES, CHUNKS, strict=True)]


class Memory:
    """A store in memory: a dict of chunks by hash. `late_s` is how long a read takes."""

    def __init__(self, chunks: Sequence[bytes] = (), late_s: float = 0.0) -> None:
        self.chunks = {hashlib.sha256(chunk).digest(): chunk for chunk in chunks}
        self.late_s = late_s

    def has(self, chunk: bytes) -> bool:
        return chunk in self.chunks

    def holdings(self, chunk: bytes) -> bytes | None:
        if chunk not in NAMES:
            return None
        return bit_map(COUNT, [index for index, name in enumerate(NAMES) if name in self.chunks])

    async def read(self, chunk: bytes, offset: int) -> bytes:
        await trio.sleep(self.late_s)
        return self.chunks[chunk][offset:]


class Holder(SmallNode):
    """Serves what is in its store; `fetch` puts what it gets there too."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        chunks: Sequence[bytes] = (),
        *,
        late_s: float = 0.0,
        uplink_bytes_per_s: float | None = None,
        **serving: float,
    ) -> None:
        super().__init__(network, number, uplink_bytes_per_s=uplink_bytes_per_s)
        self.store = Memory(chunks, late_s)
        self.server = ChunkServer(self.swarm, self.store, **serving)  # type: ignore[arg-type]
        self.got: list[int] = []

    async def sink(self, index: int, data: bytes) -> None:
        self.got.append(index)
        self.store.chunks[NAMES[index]] = data

    async def fetch(self, *providers: SmallNode, **settings: object) -> TransferReport:
        report = await fetch_chunks(
            self.swarm,
            WANTED,
            lambda: [provider.peer for provider in providers],
            self.sink,
            rng=random.Random(self.key),
            **settings,  # type: ignore[arg-type]
        )
        assert sorted(self.got) == list(range(COUNT)), "each chunk once"
        assert self.store.chunks == dict(zip(NAMES, CHUNKS, strict=True))
        return report


async def test_several_providers_share_the_work(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    providers = [Holder(network, number, CHUNKS, uplink_bytes_per_s=5_000) for number in range(1, 5)]
    node = Holder(network, 9)
    seen: list[TransferProgress] = []
    async with running(node, *providers):
        await connect(node, *providers)
        report = await node.fetch(*providers, progress=seen.append)
    assert report.bytes_by_peer.total() == len(CONTENT)
    assert min(report.bytes_by_peer[provider.peer] for provider in providers) >= 5 * CHUNK
    assert report.seconds < 1.5 * len(CONTENT) / (4 * 5_000)
    assert report.wasted_bytes == 0
    assert seen[0] == TransferProgress(0, COUNT, 0, len(CONTENT))
    assert seen[-1] == TransferProgress(COUNT, COUNT, len(CONTENT), len(CONTENT))
    assert [progress.done_chunks for progress in seen] == list(range(COUNT + 1))


async def test_the_faster_provider_gives_more(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    slow = Holder(network, 1, CHUNKS, uplink_bytes_per_s=1_000)
    fast = Holder(network, 2, CHUNKS, uplink_bytes_per_s=10_000)
    node = Holder(network, 9)
    async with running(node, slow, fast):
        await connect(node, slow, fast)
        report = await node.fetch(slow, fast)
    assert report.bytes_by_peer[fast.peer] > 4 * report.bytes_by_peer[slow.peer]


async def test_what_is_there_already_is_not_fetched_again(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = Holder(network, 1, CHUNKS), Holder(network, 9, CHUNKS[:30])
    node.got = list(range(30))
    async with running(node, provider):
        await connect(node, provider)
        report = await node.fetch(provider, already=set(range(30)))
        assert report.bytes_by_peer.total() == sum(len(chunk) for chunk in CHUNKS[30:])
        node.got = []
        report = await node.fetch(provider, already=set())
        node.got = list(range(COUNT))
        assert (await node.fetch(already=set(range(COUNT)))).seconds == 0, "nothing to do needs nobody"


async def test_lost_messages_are_asked_for_again(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    providers = [Holder(network, number, CHUNKS) for number in range(1, 4)]
    node = Holder(network, 9)
    async with running(node, *providers):
        await connect(node, *providers)
        network.set_default(loss=0.2)
        report = await node.fetch(*providers, chunk_timeout_s=2)
    assert report.failures.total() > 0


async def test_a_corrupting_peer_is_dropped_counted_and_others_do_the_work(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    honest, liar = Holder(network, 1, CHUNKS), Holder(network, 2, CHUNKS)
    for name, chunk in liar.store.chunks.items():
        liar.store.chunks[name] = chunk[:-1] + bytes([chunk[-1] ^ 1])
    node = Holder(network, 9)
    async with running(node, honest, liar):
        await connect(node, honest, liar)
        report = await node.fetch(honest, liar)
        assert node.swarm.reputation.score(liar.peer, trio.current_time()) < 0.6
        assert node.swarm.reputation.score(honest.peer, trio.current_time()) == 1
    assert report.bytes_by_peer[honest.peer] == len(CONTENT)
    assert report.bytes_by_peer[liar.peer] == 0
    assert 1 <= report.wrong_hash[liar.peer] <= 2, "what was in flight, then never asked again"
    assert node.refusals == [(liar.peer, RefusalReason.WRONG_HASH)] * report.wrong_hash[liar.peer]


@pytest.mark.parametrize(
    "answer", [b"", DATA, b"\x07rubbish", DATA + bytes(CHUNK + 1), b"\x01no envelope", DATA + bytes(10_000)]
)
async def test_rubbish_instead_of_a_chunk_is_survived(
    autojump_clock: trio.testing.MockClock, answer: bytes
) -> None:
    network = MemoryNetwork()
    honest, liar, node = Holder(network, 1, CHUNKS), SmallNode(network, 2), Holder(network, 9)

    async def rubbish(peer: PeerId, data: bytes) -> bytes:
        return answer

    liar.transport.serve(CHUNK_PROTOCOL, rubbish, max_request_bytes=10_000, max_concurrent=4)
    async with running(node, honest, liar):
        await connect(node, honest, liar)
        await node.fetch(honest, liar)
    assert node.refusals and {peer for peer, _ in node.refusals} == {liar.peer}


async def test_a_stalling_peer_delays_only_its_own_chunks_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    honest = Holder(network, 1, CHUNKS, uplink_bytes_per_s=10_000)
    stalling = Holder(network, 2, CHUNKS, late_s=1e6)
    node = Holder(network, 9)
    async with running(node, honest, stalling):
        await connect(node, honest, stalling)
        report = await node.fetch(honest, stalling, chunk_timeout_s=20)
    assert report.bytes_by_peer[honest.peer] == len(CONTENT)
    assert report.seconds < 20, "the last chunks were raced, not waited for"


async def test_a_provider_that_leaves_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(dead_after_s=15)
    leaver = Holder(network, 1, CHUNKS, uplink_bytes_per_s=2_000)
    dier = Holder(network, 2, CHUNKS, uplink_bytes_per_s=2_000)
    stayer = Holder(network, 3, CHUNKS, uplink_bytes_per_s=2_000)
    node = Holder(network, 9)
    async with running(node, leaver, dier, stayer) as nursery:
        await connect(node, leaver, dier, stayer)

        async def go() -> None:
            await trio.sleep(1.7)
            await leaver.stop()
            await trio.sleep(1)
            await dier.crash()

        nursery.start_soon(go)
        report = await node.fetch(leaver, dier, stayer, chunk_timeout_s=5)
    assert all(report.bytes_by_peer[peer.peer] for peer in (leaver, dier, stayer))


async def test_a_provider_that_comes_late_ends_the_waiting(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    empty, late, node = Holder(network, 1), Holder(network, 2, CHUNKS), Holder(network, 9)
    async with running(node, empty, late) as nursery:
        await connect(node, empty)

        async def come() -> None:
            await trio.sleep(60)
            await connect(node, late)

        nursery.start_soon(come)
        report = await node.fetch(empty, late)
    assert 60 <= report.seconds < 70
    asked = empty.transport.bytes_sent[CHUNK_PROTOCOL] / (1 + COUNT / 8)
    assert 20 < asked < 80, "an empty peer is asked now and then"
    assert empty.refusals == [], "lacking a chunk is no refusal"


async def test_giving_up_tells_what_each_peer_s_trouble_was(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    empty, node, absent = Holder(network, 1, CHUNKS[:5]), Holder(network, 9), SmallNode(network, 8)
    async with running(node, empty):
        await connect(node, empty)
        began_s = trio.current_time()
        with pytest.raises(TransferFailed) as failed:
            await node.fetch(empty, absent, give_up_s=90)
        assert 90 <= trio.current_time() - began_s < 100
    text = str(failed.value)
    assert text.startswith("35 of 40 chunks are missing and none came for 90 s; ")
    assert f"{empty.identity.name}: lacks what is missing here" in text
    assert f"{absent.identity.name}: no answer yet (not connected)" in text
    assert sorted(node.got) == [0, 1, 2, 3, 4]


async def test_a_full_disk_ends_the_transfer_with_its_own_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    provider, node = Holder(network, 1, CHUNKS), Holder(network, 9)

    async def full(index: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with running(node, provider):
        await connect(node, provider)
        with pytest.raises(OSError, match="No space left"):
            await fetch_chunks(node.swarm, WANTED, lambda: [provider.peer], full)


async def test_bytes_in_flight_and_in_the_sink_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    providers = [Holder(network, number, CHUNKS) for number in range(1, 6)]
    node = Holder(network, 9)
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
            WANTED,
            lambda: [provider.peer for provider in providers],
            slow_disk,
            max_in_flight_bytes=4 * CHUNK,
        )
    assert most == 4


async def test_a_cancelled_transfer_stops_asking(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = Holder(network, 1, CHUNKS, uplink_bytes_per_s=1_000), Holder(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        with trio.move_on_after(10) as scope:
            await node.fetch(provider)
        assert scope.cancelled_caught
        got, served = len(node.got), provider.server.bytes_served.total()
        await trio.sleep(60)
        assert 0 < len(node.got) == got < COUNT
        assert provider.server.bytes_served.total() == served


async def test_replies_cut_into_pieces_are_put_together(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = Holder(network, 1, CHUNKS, piece_bytes=256), Holder(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        await node.fetch(provider)


async def test_an_upload_cap_holds(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node = Holder(network, 1, CHUNKS, upload_bytes_per_s=2_000.0), Holder(network, 9)
    async with running(node, provider):
        await connect(node, provider)
        report = await node.fetch(provider)
    assert report.seconds == pytest.approx(len(CONTENT) / 2_000, rel=0.1)


async def test_calls_stay_quick_while_chunks_fill_the_uplink(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    chunks = [random.Random(number).randbytes(100_000) for number in range(60)]
    provider = SmallNode(network, 1, uplink_bytes_per_s=1_000_000)
    ChunkServer(provider.swarm, Memory(chunks))
    node = SmallNode(network, 9)
    slowest = 0.0

    async def drop(index: int, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async with running(node, provider) as nursery:
        await connect(node, provider)

        async def ping() -> None:
            nonlocal slowest
            while True:
                began_s = trio.current_time()
                request = node.swarm.seal(ChunkRequest(chunk=bytes(32)))
                await node.transport.request(
                    provider.peer, CHUNK_PROTOCOL, request, timeout_s=10, max_response_bytes=4_096
                )
                slowest = max(slowest, trio.current_time() - began_s)
                await trio.sleep(0.05)

        nursery.start_soon(ping)
        await fetch_chunks(
            node.swarm,
            [(hashlib.sha256(chunk).digest(), len(chunk)) for chunk in chunks],
            lambda: [provider.peer],
            drop,
        )
    assert 0 < slowest < 0.3


async def test_requests_that_are_not_honest_are_refused(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    provider, node, other = Holder(network, 1, CHUNKS), SmallNode(network, 9), SmallNode(network, 8)
    body = ChunkRequest(chunk=NAMES[0]).encode()
    cases = [
        (b"rubbish", RefusalReason.MALFORMED),
        (bytes(5_000), RefusalReason.OVERSIZED),
        (other.swarm.seal(ChunkRequest(chunk=NAMES[0])), RefusalReason.WRONG_SENDER),
        (seal(node.identity, b"x" * 32, "chunk_request", 1, body), RefusalReason.WRONG_RUN),
        (seal(node.identity, node.swarm.run_id, "hello", 2, body), RefusalReason.WRONG_KIND),
        (seal(node.identity, node.swarm.run_id, "chunk_request", 3, b"\x80"), RefusalReason.MALFORMED),
        (seal(node.identity, node.swarm.run_id, "chunk_request", 3, body), RefusalReason.REPLAYED),
        (node.swarm.seal(ChunkRequest(chunk=NAMES[0], offset=CHUNK)), RefusalReason.REPLAYED),
        (
            seal(
                node.identity,
                node.swarm.run_id,
                "chunk_request",
                4,
                ChunkRequest(chunk=NAMES[0], offset=CHUNK).encode(),
            ),
            RefusalReason.MALFORMED,
        ),
    ]
    async with running(node, provider):
        await connect(node, provider)
        node.swarm.seal(ChunkRequest(chunk=NAMES[0]))
        for data, reason in cases[:7] + cases[8:]:
            answer = await node.transport.request(
                provider.peer, CHUNK_PROTOCOL, data, timeout_s=10, max_response_bytes=4_096
            )
            assert answer[:1] == b"\x01"
            assert provider.refusals[-1] == (node.peer, reason)
    assert provider.server.bytes_served.total() == 0


async def test_a_chain_of_nodes_serves_onward_while_it_downloads(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork(delay_s=0.02, jitter_s=0.02, duplicate=0.1)
    source = Holder(network, 1, CHUNKS, uplink_bytes_per_s=5_000)
    chain = [source, *(Holder(network, number, uplink_bytes_per_s=5_000) for number in range(2, 16))]
    reports: dict[int, TransferReport] = {}

    async def follow(position: int) -> None:
        before, node = chain[position - 1], chain[position]
        reports[position] = await node.fetch(before, chunk_timeout_s=5)

    async with running(*chain):
        for left, right in itertools.pairwise(chain):
            await connect(right, left)
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for position in range(1, len(chain)):
                nursery.start_soon(follow, position)
        whole_s = trio.current_time() - began_s
    hop_s = len(CONTENT) / 5_000
    assert whole_s < 8 * hop_s, f"14 hops one after the other would take {14 * hop_s:.0f} s"
    assert source.transport.bytes_sent[CHUNK_PROTOCOL] < 1.3 * len(CONTENT)


async def test_a_crowd_takes_most_from_one_another(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    source = Holder(network, 1, CHUNKS, uplink_bytes_per_s=5_000)
    crowd = [Holder(network, number, uplink_bytes_per_s=5_000) for number in range(2, 10)]
    nodes = [source, *crowd]

    async def take(node: Holder) -> None:
        await node.fetch(*(other for other in nodes if other is not node))

    async with running(*nodes):
        for node in crowd:
            await connect(node, *(other for other in nodes if other.key < node.key), source)
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for node in crowd:
                nursery.start_soon(take, node)
        whole_s = trio.current_time() - began_s
    from_source_alone_s = len(crowd) * len(CONTENT) / 5_000
    assert whole_s < from_source_alone_s / 3
    assert source.server.bytes_served.total() < len(crowd) * len(CONTENT) / 2


# To a file.


def stored(path: Path) -> StoredFile:
    return StoredFile(path, len(CONTENT), CHUNK, NAMES)


async def download(
    node: SmallNode, provider: SmallNode, path: Path, *, stop_after: int | None = None
) -> TransferReport | None:
    """Download to `path`; None if cut off after some chunks, as by a kill."""
    async with open_assembly(path, len(CONTENT), CHUNK, NAMES) as assembly:
        with trio.CancelScope() as scope:

            def watch(progress: TransferProgress) -> None:
                if stop_after is not None and progress.done_chunks >= stop_after:
                    scope.cancel()

            report = await fetch_chunks(
                node.swarm,
                assembly.wanted,
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
    source.write_bytes(CONTENT)
    shelf = ChunkShelf()
    shelf.add(stored(source))
    ChunkServer(provider.swarm, shelf)
    async with running(node, provider):
        await connect(node, provider)
        assert await download(node, provider, target, stop_after=25) is None
        assert part_path(target).exists() and not target.exists()
        report = await download(node, provider, target)
    assert report is not None and report.bytes_by_peer.total() <= len(CONTENT) - 24 * CHUNK
    assert target.read_bytes() == CONTENT
    assert [file.name for file in target.parent.iterdir()] == ["model.safetensors"]


async def test_a_part_file_is_served_onward(tmp_path: Path) -> None:
    network = MemoryNetwork(delay_s=0.0)
    first, second, third = (SmallNode(network, number) for number in (1, 2, 3))
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    ChunkServer(first.swarm, stored(source))
    shelf = ChunkShelf()
    ChunkServer(second.swarm, shelf)
    halfway, go_on = trio.Event(), trio.Event()

    async with running(first, second, third) as nursery:
        await connect(second, first, third)
        async with open_assembly(tmp_path / "copy", len(CONTENT), CHUNK, NAMES) as assembly:
            shelf.add(assembly)

            async def with_a_pause(index: int, data: bytes) -> None:
                await assembly.write(index, data)
                if len(assembly.verified) >= 20:
                    halfway.set()
                    await go_on.wait()

            async def pull() -> None:
                await fetch_chunks(second.swarm, assembly.wanted, lambda: [first.peer], with_a_pause)
                await assembly.finish()

            nursery.start_soon(pull)
            await halfway.wait()
            got: list[int] = []

            async def note(index: int, data: bytes) -> None:
                got.append(index)
                go_on.set()

            with trio.fail_after(30):
                await fetch_chunks(third.swarm, WANTED, lambda: [second.peer], note)
            await until(lambda: (tmp_path / "copy").exists(), within_s=10)
    assert sorted(got) == list(range(COUNT))
    assert (tmp_path / "copy").read_bytes() == CONTENT
