"""Giving chunks to others: where chunks come from, and the service that reads, paces and sends them.

A request is a signed `chunk_request` envelope, checked like any call. The reply is one status byte and then,
for 0, bytes of the chunk from the asked offset on (perhaps not all: the asker goes on from there); for 1, a
signed `refusal`; for 2 (the chunk is not here), a bit map of which chunks are: those of the file that the
asked one is part of, in their order, chunk i at bit i % 8 (least first) of byte i // 8; empty if no such file
is known. Neither bytes nor bit map need a signature: a chunk's hash is its proof, and the map is only a hint.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import trio

from peers.base import PeerId
from peers.swarm import Swarm
from protocol import limits
from protocol.messages import ChunkRequest
from protocol.refusals import RefusalReason, Refused

log = logging.getLogger(__name__)

CHUNK_PROTOCOL = "/swarmnode/chunk/1"
DATA, REFUSAL, LACKING = b"\x00", b"\x01", b"\x02"

MAX_REQUEST_BYTES = 4 * 1024
OVERSIZE_SLACK_BYTES = 60 * 1024
"""Requests a little too large are read, so that the sender can be told; larger ones end with their stream."""

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

    def holdings(self, chunk: bytes) -> bytes | None:
        """Bit map of what is here of the file that `chunk` is part of; None if no such file is known."""
        ...


def bit_map(count: int, held: Iterable[int]) -> bytes:
    """`count` bits of which those at the indices `held` are set."""
    bits = bytearray(-(-count // 8))
    for index in held:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


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

    def holdings(self, chunk: bytes) -> bytes | None:
        maps = (store.holdings(chunk) for store in self._stores)
        return next((found for found in maps if found is not None), None)


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
            max_request_bytes=MAX_REQUEST_BYTES + OVERSIZE_SLACK_BYTES,
            max_concurrent=MAX_CONCURRENT_READS,
        )

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        try:
            return await self._serve(peer, data)
        except Refused as refused:
            self._swarm.refuse(peer, refused.reason, refused.detail)
            return REFUSAL + self._swarm.seal_refusal(refused)

    async def _serve(self, peer: PeerId, data: bytes) -> bytes:
        envelope = await self._swarm.admit(peer, data, MAX_REQUEST_BYTES)
        if envelope.kind != "chunk_request":
            raise Refused(RefusalReason.WRONG_KIND, f"expected chunk_request, got {envelope.kind!r}")
        request = ChunkRequest.decode(envelope.body)
        if not self._store.has(request.chunk):
            return LACKING + (self._store.holdings(request.chunk) or b"")
        try:
            piece = (await self._store.read(request.chunk, request.offset))[: self._piece_bytes]
        except (KeyError, OSError) as error:
            # Deleted or closed meanwhile: an old version's time is over.
            log.info("chunk %s could not be read: %s", request.chunk.hex()[:12], error)
            return LACKING
        if not piece:
            raise Refused(RefusalReason.MALFORMED, f"the chunk ends before offset {request.offset}")
        await self._pace(len(piece))
        self.bytes_served[peer] += len(piece)
        return DATA + piece

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
