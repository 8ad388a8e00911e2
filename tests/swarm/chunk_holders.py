"""Nodes that hold and fetch the chunks of one file in memory, for tests on virtual time."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

import trio

from peers.base import PeerId
from peers.chunk_exchange import TransferReport, fetch_chunks
from peers.chunk_frames import Mask
from peers.chunk_layout import FileLayout
from peers.chunk_serving import ChunkServer
from peers.chunk_shelf import ChunkShelf
from peers.memory_transport import MemoryNetwork
from peers.signal import Signal
from tests.swarm.small_swarm import SmallNode


class Content:
    """A file's bytes and how they are cut."""

    def __init__(self, chunk_size: int, count: int, *, short_by: int = 0, seed: int = 7) -> None:
        size = chunk_size * count - short_by
        self.data = random.Random(seed).randbytes(size)
        self.chunks = [self.data[start : start + chunk_size] for start in range(0, size, chunk_size)]
        names = [hashlib.sha256(chunk).digest() for chunk in self.chunks]
        self.layout = FileLayout(size, chunk_size, names)


class MemoryFile:
    """A `ChunkFile` in memory. `late_s` is how long a read takes."""

    def __init__(self, layout: FileLayout, chunks: Mapping[int, bytes], late_s: float = 0.0) -> None:
        self.layout = layout
        self.chunks = dict(chunks)
        self.arrived = list(self.chunks)
        self.held_by: dict[PeerId, Mask] = {}
        self.late_s = late_s
        self.spoils = False
        self.stalls_after: int | None = None
        """Reads that are answered before one never is."""
        self._changed: Signal | None = None

    def has(self, index: int) -> bool:
        return index in self.chunks

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes:
        await trio.sleep(self.late_s)
        if self.stalls_after is not None:
            self.stalls_after -= 1
            if self.stalls_after < 0:
                await trio.sleep_forever()
        data = self.chunks[index][offset : offset + size_bytes]
        return data[:-1] + bytes([data[-1] ^ 1]) if self.spoils else data

    def watch(self, changed: Signal | None) -> None:
        self._changed = changed

    async def keep(self, index: int, data: bytes | bytearray) -> None:
        self.chunks[index] = bytes(data)
        self.arrived.append(index)
        if self._changed is not None:
            self._changed.set()


class Holder(SmallNode):
    """Serves its file; `fetch` puts what it gets there too."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        content: Content,
        held: Sequence[int] | None = None,
        *,
        late_s: float = 0.0,
        **links: float,
    ) -> None:
        """`held`: all if None. `links`: what `MemoryNetwork.transport` takes."""
        super().__init__(network, number, **links)
        self.content = content
        indices = range(content.layout.count) if held is None else held
        self.file = MemoryFile(content.layout, {index: content.chunks[index] for index in indices}, late_s)
        self.shelf = ChunkShelf()
        self.shelf.add(self.file)
        self.server = ChunkServer(self.swarm, self.shelf, rng=random.Random(number))

    async def fetch(self, *providers: SmallNode, **settings: object) -> TransferReport:
        """Download from those of the providers that are connected."""
        peers = [provider.peer for provider in providers if provider is not self]
        return await self.fetch_from(lambda: peers, **settings)

    async def fetch_from(
        self, providers: Callable[[], Sequence[PeerId]], **settings: object
    ) -> TransferReport:
        had = len(self.file.arrived)
        report = await fetch_chunks(
            self.swarm,
            self.content.layout,
            providers,
            self.file.keep,
            already=set(self.file.chunks),
            held_by=self.file.held_by,
            rng=random.Random(self.key),
            **settings,  # type: ignore[arg-type]
        )
        count = self.content.layout.count
        assert sorted(self.file.arrived) == list(range(count)), "each chunk once"
        assert [self.file.chunks[index] for index in range(count)] == self.content.chunks
        assert report.bytes_by_peer.total() == sum(
            self.content.layout.length(index) for index in self.file.arrived[had:]
        )
        return report
