"""This project's part of the broadcast benchmark: a process with a node's own transport and exchange.

Real: the libp2p transport, signed requests, the chunk server, the download that a node uses, files on disk.
Not there: everything of a node that moves no chunks (roles, ledger, page).
"""

import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import trio

from benchmarks.broadcast_system import Task, answer_check
from benchmarks.lab_process import Channel
from peers.base import PeerId
from peers.chunk_serving import ChunkServer
from peers.chunk_shelf import ChunkFile, ChunkShelf
from peers.file_assembly import StoredFile
from peers.libp2p_transport import Libp2pTransport
from peers.swarm import Swarm
from protocol.identity import Identity
from protocol.refusals import RefusalReason
from swarmnode.runtime.download import download_file

RUN = b"broadcast benchmark".ljust(32, b"\0")
PORT = 4001
CONNECT_TIMEOUT_S = 60.0


class CorruptFile:
    """Says the truth about what it has and gives something else."""

    def __init__(self, file: ChunkFile) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes | bytearray:
        data = bytearray(await self._file.read(index, offset, size_bytes))
        data[len(data) // 2] ^= 0xFF
        return bytes(data)


class StallingFile(CorruptFile):
    """Serves its first chunks well, then begins answers and never ends them."""

    good_reads = 3

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes | bytearray:
        self.good_reads -= 1
        if self.good_reads < 0:
            await trio.sleep_forever()
        return await self._file.read(index, offset, size_bytes)


class FaultyShelf(ChunkShelf):
    """Serves files as the given kind of them."""

    def __init__(self, kind: type[CorruptFile]) -> None:
        super().__init__()
        self._kind = kind
        self._faulty: dict[int, ChunkFile] = {}

    def get(self, name: bytes) -> ChunkFile | None:
        file = super().get(name)
        if file is None:
            return None
        return self._faulty.setdefault(id(file), self._kind(file))


FAULTY = {"corrupt": CorruptFile, "stalling": StallingFile}


class ExchangeNode:
    """A node's transport, swarm and chunk exchange on one address of the laboratory."""

    def __init__(self, task: Task) -> None:
        self.task = task
        identity = Identity.from_seed(task.number.to_bytes(32, "big"))
        self.transport = Libp2pTransport(identity, listen=[f"/ip4/{task.address}/tcp/{PORT}"])
        self.refusals: Counter[str] = Counter()
        numbers = itertools.count()
        self.swarm = Swarm(
            self.transport,
            identity,
            RUN,
            next_sequence=lambda: next(numbers),
            on_refusal=self._count_refusal,
        )
        self.path = task.directory / "model.safetensors"
        self._shelf = FaultyShelf(FAULTY[task.fault]) if task.fault in FAULTY else ChunkShelf()
        if task.is_source:
            self._offer(task.file.path)
        ChunkServer(self.swarm, self._shelf)

    def _count_refusal(self, peer: PeerId | None, reason: RefusalReason, detail: str) -> None:
        self.refusals[reason.value] += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.transport.running():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.swarm.run)
                with trio.fail_after(CONNECT_TIMEOUT_S):
                    await self.swarm.listening.wait()
                yield
                nursery.cancel_scope.cancel()

    async def connect(self, addresses: Sequence[str]) -> None:
        """Dial those with a higher number and wait until everybody is connected."""
        with trio.fail_after(CONNECT_TIMEOUT_S):
            events = self.transport.events()
            for address in addresses[self.task.number + 1 :]:
                await self.transport.connect(address, CONNECT_TIMEOUT_S)
            while len(self.transport.connected_peers()) < len(addresses) - 1:
                await events.receive()

    async def fetch(self) -> float:
        """Bring the file here and go on serving it; when it was complete, by the monotonic clock."""
        file = self.task.file
        await download_file(
            self.swarm,
            self._shelf,
            self.path,
            size_bytes=file.size_bytes,
            chunk_size=file.chunk_size,
            chunks=file.chunks,
            providers=lambda: list(self.transport.connected_peers()),
        )
        finished = monotonic()
        self._offer(self.path)
        return finished

    def _offer(self, path: Path) -> None:
        file = self.task.file
        self._shelf.add(StoredFile(path, file.size_bytes, file.chunk_size, file.chunks))


def run_node(channel: Channel, task: Task) -> None:
    """Work of a lab process: the source or one peer."""
    logging.basicConfig(level=logging.INFO)
    trio.run(_take_part, channel, task)


async def _take_part(channel: Channel, task: Task) -> None:
    node = ExchangeNode(task)
    async with node.running():
        channel.send(address=node.transport.addresses[0])
        await node.connect((await told(channel))["connect"])
        channel.send(connected=True)
        await told(channel)
        if not task.is_source:
            channel.send(at=await node.fetch(), refusals=node.refusals)
        # The check comes when all are done: until then others may fetch from here.
        await trio.to_thread.run_sync(answer_check, channel, node.path, abandon_on_cancel=True)  # type: ignore[call-arg]


async def told(channel: Channel) -> dict[str, Any]:
    """The next message of the benchmark."""
    return await trio.to_thread.run_sync(channel.receive, abandon_on_cancel=True)  # type: ignore[call-arg]
