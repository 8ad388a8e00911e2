"""This project's part of the broadcast benchmark: a process with a node's own transport and exchange.

Real: the libp2p transport, signed requests, the chunk server, the download that a node uses, files on disk.
Not there: everything of a node that moves no chunks (roles, ledger, page).
"""

import itertools
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

import trio

from benchmarks.broadcast_system import Task, answer_check
from benchmarks.lab_process import Channel
from peers.base import PeerId
from peers.chunk_serving import ChunkServer, ChunkShelf
from peers.file_assembly import StoredFile
from peers.libp2p_transport import Libp2pTransport
from peers.swarm import Swarm
from protocol.identity import Identity
from protocol.refusals import RefusalReason
from swarmnode.runtime.download import download_file

RUN = b"broadcast benchmark".ljust(32, b"\0")
PORT = 4001
CONNECT_TIMEOUT_S = 60.0


class CorruptShelf(ChunkShelf):
    """Says the truth about what it has and gives something else."""

    async def read(self, chunk: bytes, offset: int) -> bytes:
        data = bytearray(await super().read(chunk, offset))
        data[len(data) // 2] ^= 0xFF
        return bytes(data)


class StallingShelf(ChunkShelf):
    """Serves its first chunks well, then begins answers and never ends them."""

    good_reads = 3

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    async def read(self, chunk: bytes, offset: int) -> bytes:
        self._reads += 1
        if self._reads > self.good_reads:
            await trio.sleep_forever()
        return await super().read(chunk, offset)


SHELVES: dict[str | None, type[ChunkShelf]] = {"corrupt": CorruptShelf, "stalling": StallingShelf}


def run_node(channel: Channel, task: Task) -> None:
    """Work of a lab process: the source or one peer."""
    logging.basicConfig(level=logging.INFO)
    trio.run(_Node(channel, task).run)


class _Node:
    def __init__(self, channel: Channel, task: Task) -> None:
        self._channel = channel
        self._task = task
        identity = Identity.from_seed(task.number.to_bytes(32, "big"))
        self._transport = Libp2pTransport(identity, listen=[f"/ip4/{task.address}/tcp/{PORT}"])
        self._refusals: dict[str, int] = {}
        numbers = itertools.count()
        self._swarm = Swarm(
            self._transport,
            identity,
            RUN,
            next_sequence=lambda: next(numbers),
            on_refusal=self._count_refusal,
        )
        self._shelf = SHELVES.get(task.fault, ChunkShelf)()
        self._path = task.directory / "model.safetensors"

    def _count_refusal(self, peer: PeerId | None, reason: RefusalReason, detail: str) -> None:
        self._refusals[reason.value] = self._refusals.get(reason.value, 0) + 1

    async def run(self) -> None:
        file = self._task.file
        ChunkServer(self._swarm, self._shelf)
        if self._task.is_source:
            self._shelf.add(StoredFile(file.path, file.size_bytes, file.chunk_size, file.chunks))
        async with self._transport.running():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._swarm.run)
                with trio.fail_after(CONNECT_TIMEOUT_S):
                    await self._swarm.listening.wait()
                await self._take_part()
                nursery.cancel_scope.cancel()

    async def _take_part(self) -> None:
        self._channel.send(address=self._transport.addresses[0])
        addresses: list[str] = (await self._told())["connect"]
        await self._connect(addresses)
        self._channel.send(connected=len(self._transport.connected_peers()))
        await self._told()
        if not self._task.is_source:
            await self._fetch()
        # The check comes when all are done: until then others may fetch from here.
        await trio.to_thread.run_sync(answer_check, self._channel, self._path, abandon_on_cancel=True)

    async def _connect(self, addresses: Sequence[str]) -> None:
        """Dial those with a higher number and wait until everybody is connected."""
        with trio.fail_after(CONNECT_TIMEOUT_S):
            events = self._transport.events()
            for address in addresses[self._task.number + 1 :]:
                await self._transport.connect(address, CONNECT_TIMEOUT_S)
            while len(self._transport.connected_peers()) < len(addresses) - 1:
                await events.receive()

    async def _fetch(self) -> None:
        file = self._task.file
        await download_file(
            self._swarm,
            self._shelf,
            self._path,
            size_bytes=file.size_bytes,
            chunk_size=file.chunk_size,
            chunks=file.chunks,
            providers=partial(list, self._transport.connected_peers()),
        )
        finished = monotonic()
        self._shelf.add(StoredFile(self._path, file.size_bytes, file.chunk_size, file.chunks))
        self._channel.send(at=finished, refusals=self._refusals)

    async def _told(self) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self._channel.receive, abandon_on_cancel=True)
