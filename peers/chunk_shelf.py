"""The files whose chunks this node serves: whole ones, and ones still arriving."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from peers.base import PeerId
from peers.chunk_frames import Mask
from peers.chunk_layout import FileLayout
from peers.signal import Signal


class ChunkFile(Protocol):
    """A file of which some or all chunks can be read."""

    @property
    def layout(self) -> FileLayout: ...

    @property
    def arrived(self) -> Sequence[int]:
        """The chunks that are here, in the order in which they came; only ever longer."""
        ...

    @property
    def held_by(self) -> Mapping[PeerId, Mask]:
        """What peers said they have of it, for those of whom it is known."""
        ...

    def has(self, index: int) -> bool:
        """Whether the chunk can be read now. Must be quick."""
        ...

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes | bytearray:
        """At most `size_bytes` of a chunk that is here. Raises `KeyError` if it is not, `OSError`."""
        ...

    def watch(self, changed: Signal | None) -> None:
        """Set `changed` whenever a chunk comes."""
        ...


class ChunkShelf:
    """Files by name. Of several with one name, the one with most of its chunks is served."""

    def __init__(self) -> None:
        self.changed = Signal()
        """A file came or went, or a chunk of one came."""
        self._files: dict[bytes, list[ChunkFile]] = {}
        self._provisional: dict[bytes, ChunkFile] = {}

    def add(self, file: ChunkFile, *, provisional: bool = False) -> None:
        """Serve a file; `provisional`: only until another of the same name comes."""
        name = file.layout.name
        former = self._provisional.pop(name, None)
        if provisional:
            self._provisional[name] = file
        files = self._files.setdefault(name, [])
        if file not in files:
            files.append(file)
            file.watch(self.changed)
            self.changed.set()
        if former is not None and former is not file:
            self.remove(former)

    def remove(self, file: ChunkFile) -> None:
        files = self._files.get(file.layout.name, [])
        if file in files:
            files.remove(file)
            file.watch(None)
            if not files:
                del self._files[file.layout.name]
            self.changed.set()

    def files(self) -> list[ChunkFile]:
        """All that is served."""
        return [file for files in self._files.values() for file in files]

    def get(self, name: bytes) -> ChunkFile | None:
        """The file of this name, if any of its chunks are served."""
        return max(self._files.get(name, []), key=lambda file: len(file.arrived), default=None)
