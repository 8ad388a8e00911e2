"""A few nodes in one process on the in-memory network, for tests on virtual time."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from peers.base import PeerId
from peers.memory_transport import MemoryNetwork, MemoryTransport
from peers.swarm import Swarm
from protocol.identity import Identity
from protocol.refusals import RefusalReason

RUN = b"r" * 32


class SmallNode:
    """A transport and a `Swarm` on it, and what was refused there."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        *,
        run_id: bytes = RUN,
        first_sequence: int = 0,
        **links: float,
    ) -> None:
        """`links`: what `MemoryNetwork.transport` takes."""
        self.identity = Identity.from_seed(number.to_bytes(32, "big"))
        self.key = self.identity.key
        self.peer = PeerId(self.key)
        self.transport: MemoryTransport = network.transport(self.identity, **links)
        self.refusals: list[tuple[PeerId | None, RefusalReason]] = []
        counter = itertools.count(first_sequence)
        self.swarm = Swarm(
            self.transport,
            self.identity,
            run_id,
            next_sequence=lambda: next(counter),
            on_refusal=lambda peer, reason, detail: self.refusals.append((peer, reason)),
        )
        self.services: list[Callable[[], Awaitable[None]]] = [self.swarm.run]
        self.address = self.transport.addresses[0]
        self._stop = trio.Event()
        self.stopped = trio.Event()

    async def run(self, started: trio.Event) -> None:
        try:
            async with self.transport.running():
                async with trio.open_nursery() as nursery:
                    for service in self.services:
                        nursery.start_soon(service)
                    await self.swarm.listening.wait()
                    started.set()
                    await self._stop.wait()
                    nursery.cancel_scope.cancel()
        finally:
            self.stopped.set()

    async def stop(self) -> None:
        """Leave the network in good order."""
        self._stop.set()
        await self.stopped.wait()

    async def crash(self) -> None:
        """Vanish without a word."""
        self.transport.crash()
        await self.stopped.wait()


async def start(nursery: trio.Nursery, *nodes: SmallNode) -> None:
    """Run nodes in the nursery and wait until all listen."""
    for node in nodes:
        started = trio.Event()
        nursery.start_soon(node.run, started)
        with trio.fail_after(60):
            await started.wait()


@asynccontextmanager
async def running(*nodes: SmallNode) -> AsyncIterator[trio.Nursery]:
    """Run nodes for the block; its nursery takes more of them."""
    async with trio.open_nursery() as nursery:
        await start(nursery, *nodes)
        yield nursery
        nursery.cancel_scope.cancel()


async def connect(a: SmallNode, *others: SmallNode) -> None:
    """Connect `a` to each of the others."""
    for other in others:
        await a.transport.connect(other.address, 10)


async def until(condition: Callable[[], bool], *, within_s: float = 120) -> None:
    """Wait (in virtual time) for something that no event tells."""
    with trio.fail_after(within_s):
        while not condition():
            await trio.sleep(0.1)
