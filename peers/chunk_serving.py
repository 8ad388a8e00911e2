"""Giving chunks to others: where chunks come from, and the service that reads, paces and sends them.

A request is a signed `chunk_request` envelope, checked like any call. The reply is one status byte and
then, for 0, bytes of the chunk from the asked offset on (perhaps not all: the asker goes on from there),
or, for 1, a signed `refusal`. The bytes need no signature: the chunk's hash is their proof.
"""

from collections import Counter
from typing import Protocol

import trio

from peers.base import PeerId
from peers.swarm import Swarm
from protocol import limits
from protocol.messages import ChunkRequest
from protocol.refusals import RefusalReason, Refused

CHUNK_PROTOCOL = "/swarmnode/chunk/1"
DATA, REFUSAL = b"\x00", b"\x01"

MAX_REQUEST_BYTES = 4 * 1024
MAX_CONCURRENT_READS = 8
"""Chunks read and handed to the transport at once: 32 MiB at the largest chunk size."""

MAX_PACING_DELAY_S = 10.0
"""With an upload cap: a request that would wait longer is refused as `busy`, so the asker tries elsewhere."""


class ChunkStore(Protocol):
    """Somewhere that chunks lie."""

    def has(self, chunk: bytes) -> bool:
        """Whether the chunk of this hash can be read now. Must be quick."""
        ...

    async def read(self, chunk: bytes, offset: int) -> bytes:
        """The chunk from `offset` on. Raises `KeyError` if it is not here, `OSError` if it cannot be read."""
        ...


class ChunkShelf:
    """Several stores as one: whole files, files still arriving."""

    def __init__(self) -> None:
        self._stores: list[ChunkStore] = []

    def add(self, store: ChunkStore) -> None:
        if store not in self._stores:
            self._stores.append(store)

    def remove(self, store: ChunkStore) -> None:
        if store in self._stores:
            self._stores.remove(store)

    def has(self, chunk: bytes) -> bool:
        return any(store.has(chunk) for store in self._stores)

    async def read(self, chunk: bytes, offset: int) -> bytes:
        for store in self._stores:
            if store.has(chunk):
                return await store.read(chunk, offset)
        raise KeyError(chunk)


class ChunkServer:
    """Serves a store to the swarm from its construction on.

    `piece_bytes` cuts replies (a slow uplink wants small ones, so that control traffic is not stuck behind
    them); `upload_bytes_per_s` spreads them over time.
    """

    def __init__(
        self,
        swarm: Swarm,
        store: ChunkStore,
        *,
        piece_bytes: int = limits.MAX_CHUNK_BYTES,
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self._swarm = swarm
        self._store = store
        self._piece_bytes = piece_bytes
        self._upload_bytes_per_s = upload_bytes_per_s
        self._free_at_s = 0.0
        self.bytes_served: Counter[PeerId] = Counter()
        swarm.transport.serve(
            CHUNK_PROTOCOL,
            self._answer,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_concurrent=MAX_CONCURRENT_READS,
        )

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        try:
            piece = await self._read(peer, data)
        except Refused as refused:
            self._swarm.refuse(peer, refused.reason, refused.detail)
            return REFUSAL + self._swarm.seal_refusal(refused)
        self.bytes_served[peer] += len(piece)
        return DATA + piece

    async def _read(self, peer: PeerId, data: bytes) -> bytes:
        envelope = await self._swarm.admit(peer, data, MAX_REQUEST_BYTES)
        if envelope.kind != "chunk_request":
            raise Refused(RefusalReason.WRONG_KIND, f"expected chunk_request, got {envelope.kind!r}")
        request = ChunkRequest.decode(envelope.body)
        name = request.chunk.hex()[:12]
        if not self._store.has(request.chunk):
            raise Refused(RefusalReason.NOT_FOUND, f"chunk {name} is not here")
        try:
            piece = (await self._store.read(request.chunk, request.offset))[: self._piece_bytes]
        except (KeyError, OSError) as error:
            raise Refused(RefusalReason.NOT_FOUND, f"chunk {name} is not here any more") from error
        if not piece:
            raise Refused(RefusalReason.MALFORMED, f"chunk {name} ends before offset {request.offset}")
        await self._pace(len(piece))
        return piece

    async def _pace(self, size_bytes: int) -> None:
        """Wait until the upload cap allows so many bytes more. Raises `Refused(busy)` if that is too long."""
        if self._upload_bytes_per_s is None:
            return
        now_s = trio.current_time()
        start_s = max(now_s, self._free_at_s)
        if start_s - now_s > MAX_PACING_DELAY_S:
            raise Refused(RefusalReason.BUSY, "the upload cap is reached")
        self._free_at_s = start_s + size_bytes / self._upload_bytes_per_s
        await trio.sleep_until(start_s)
