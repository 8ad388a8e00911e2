"""A downloader's session as the chunk server sees it: what is wanted, and a chunk on its way out."""

import logging

import trio

from peers.base import PeerId, Session
from peers.chunk_giving import Giving
from peers.chunk_shelf import ChunkFile
from peers.signal import Signal
from protocol.identity import node_name

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Read from disk at once, for each chunk that is going out."""


class ServedFile:
    """One file as it is served here."""

    def __init__(self, count: int, giving: Giving | None) -> None:
        self.count = count
        self.giving = giving
        self.sent = [0] * count
        """How often each chunk has gone out."""
        self.sessions = 0

    @property
    def gives(self) -> bool:
        return self.giving is not None and self.giving.active


class Client:
    """One downloader's session: what it waits for."""

    def __init__(self, session: Session, name: bytes) -> None:
        self.session = session
        self.name = name
        self.served: ServedFile | None = None
        self.wants: dict[int, None] = {}
        self.spares: dict[int, None] = {}
        """Wanted if this node has nothing else to send."""
        self.any_wants = 0
        self.sending: int | None = None
        self.cancelled = False
        self.changed = Signal()
        """Something is wanted, or no longer."""
        self.served_s = 0.0
        self.asked_s = trio.current_time()
        """When it last wanted something."""
        self.news_left = 0
        """Chunks that it may still say it has."""
        self.scope = trio.CancelScope()

    @property
    def peer(self) -> PeerId:
        return self.session.peer

    @property
    def count(self) -> int:
        """How many chunks the file has; 0 as long as that is not known."""
        return 0 if self.served is None else self.served.count

    @property
    def is_waiting(self) -> bool:
        """Whether it wants something."""
        return bool(self.wants or self.any_wants or self.spares)


class Sending:
    """A chunk on its way out, read from disk as it goes."""

    def __init__(self, client: Client, index: int, file: ChunkFile | None) -> None:
        self.client = client
        self.index = index
        self.offset = 0
        self.failed = file is None
        self._file = file
        self._size = 0 if file is None else file.layout.length(index)
        self._read = memoryview(b"")

    @property
    def unfinished(self) -> bool:
        return not self.failed and not self.client.cancelled and self.offset < self._size

    async def fill(self) -> None:
        """Have something to take, unless it is finished or fails."""
        if self._read or not self.unfinished or self._file is None:
            return
        try:
            data = await self._file.read(self.index, self.offset, READ_BYTES)
        except (KeyError, OSError) as error:
            # Deleted or closed meanwhile: an old version's time is over.
            log.info("a chunk for %s could not be read: %s", node_name(self.client.peer), error)
            self.failed = True
            return
        self._read = memoryview(data)
        self.failed = not data

    def take(self, size_bytes: int) -> memoryview:
        piece = self._read[:size_bytes]
        self._read = self._read[size_bytes:]
        self.offset += len(piece)
        return piece
