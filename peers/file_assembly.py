"""Files in chunks on disk: one that is whole, and one that is being put together and served onward meanwhile.

A download lies in `NAME.part` at its full size and gets its name when every chunk is verified and flushed.
After a kill the chunks of the part file are hashed again: that is the only record that cannot be wrong.
"""

import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from peers.base import PeerId
from peers.chunk_frames import Mask
from peers.chunk_layout import FileLayout
from peers.signal import Signal

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Linux: read only what needs no waiting for the disk."""


class StoredFile:
    """A complete file as a `ChunkFile`. Opened anew for every read: the file may be deleted at any time."""

    def __init__(self, path: Path, size_bytes: int, chunk_size: int, chunks: Sequence[bytes]) -> None:
        self.path = path
        self.layout = FileLayout(size_bytes, chunk_size, chunks)
        self.held_by: dict[PeerId, Mask] = {}

    @property
    def arrived(self) -> Sequence[int]:
        return range(self.layout.count)

    def has(self, index: int) -> bool:
        return 0 <= index < self.layout.count

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes | bytearray:
        """At most `size_bytes` of a chunk. Raises `KeyError`, `OSError`."""
        if not self.has(index):
            raise KeyError(index)
        start, end = _span(self.layout, index, offset, size_bytes)
        with self.path.open("rb") as file:
            return await _read(file.fileno(), start, end)

    def watch(self, changed: Signal | None) -> None:
        """Nothing comes any more."""


class FileAssembly:
    """A file that arrives chunk by chunk, and a `ChunkFile` of what is here. Made by `open_assembly`."""

    def __init__(
        self, path: Path, descriptor: int, layout: FileLayout, verified: set[int], named: bool
    ) -> None:
        self.path = path
        self.part_path = part_path(path)
        self.layout = layout
        self.verified = verified
        """Indices of the chunks that are on disk and have been hashed. Read only."""
        self.arrived = sorted(verified)
        """The same in the order in which they came."""
        self.held_by: dict[PeerId, Mask] = {}
        self._descriptor = descriptor
        self._named = named
        self._open = True
        self._users = 0
        self._changed: Signal | None = None

    @property
    def wanted(self) -> list[tuple[bytes, int]]:
        """(hash, size in bytes) of every chunk."""
        return [(name, self.layout.length(index)) for index, name in enumerate(self.layout.chunks)]

    @property
    def complete(self) -> bool:
        """Whether every chunk is verified."""
        return len(self.verified) == self.layout.count

    def has(self, index: int) -> bool:
        return self._open and index in self.verified

    async def read(self, index: int, offset: int, size_bytes: int) -> bytes | bytearray:
        """At most `size_bytes` of a verified chunk. Raises `KeyError`, `OSError`."""
        if not self.has(index):
            raise KeyError(index)
        start, end = _span(self.layout, index, offset, size_bytes)
        with self._using():
            return await _read(self._descriptor, start, end)

    def watch(self, changed: Signal | None) -> None:
        self._changed = changed

    async def write(self, index: int, data: bytes | bytearray) -> None:
        """Put a chunk in its place. Raises `ValueError` if it is another, `OSError` if it cannot be kept."""
        if len(data) != self.layout.length(index):
            raise ValueError(f"chunk {index} has {self.layout.length(index)} bytes, not {len(data)}")
        digest = await trio.to_thread.run_sync(lambda: hashlib.sha256(data).digest())
        if digest != self.layout.chunks[index]:
            raise ValueError(f"chunk {index} has another hash")
        await self.keep(index, data)

    async def keep(self, index: int, data: bytes | bytearray) -> None:
        """`write` for a chunk whose hash has been checked already."""
        with self._using():
            await trio.to_thread.run_sync(self._write, index, data)
        if index not in self.verified:
            self.verified.add(index)
            self.arrived.append(index)
        if self._changed is not None:
            self._changed.set()

    async def finish(self) -> Path:
        """Flush, give the file its name, and return that. Raises `ValueError` if chunks are missing."""
        if not self.complete:
            missing = self.layout.count - len(self.verified)
            raise ValueError(f"{self.part_path} lacks {missing} of {self.layout.count} chunks")
        if not self._named:
            with self._using():
                await trio.to_thread.run_sync(self._finish)
            self._named = True
        return self.path

    def close(self) -> None:
        """Stop reading and writing. What is in the part file stays for the next time."""
        if self._open:
            self._open = False
            if self._users == 0:
                os.close(self._descriptor)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptor open: its number may belong to another file the moment after it is closed."""
        if not self._open:
            raise OSError(errno.EBADF, "the file is closed", str(self.part_path))
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0 and not self._open:
                os.close(self._descriptor)

    def _write(self, index: int, data: bytes | bytearray) -> None:
        position = self.layout.start(index)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, position)
            position += written
            view = view[written:]

    def _finish(self) -> None:
        os.fsync(self._descriptor)
        self.part_path.replace(self.path)
        _sync_directory(self.path.parent)


def part_path(path: Path) -> Path:
    """Where the unfinished `path` lies."""
    return path.with_name(path.name + ".part")


@asynccontextmanager
async def open_assembly(
    path: Path, size_bytes: int, chunk_size: int, chunks: Sequence[bytes]
) -> AsyncIterator[FileAssembly]:
    """Begin or resume the download of `path`, whose chunks have the hashes `chunks`.

    What the part file (or a file of that name) holds is hashed and kept as far as it is right. Raises
    `OSError` when the disk has no room for the file.
    """
    layout = FileLayout(size_bytes, chunk_size, chunks)
    descriptor, verified, named = await trio.to_thread.run_sync(_prepare, path, layout)
    assembly = FileAssembly(path, descriptor, layout, verified, named)
    try:
        yield assembly
    finally:
        assembly.close()


def _prepare(path: Path, layout: FileLayout) -> tuple[int, set[int], bool]:
    part = part_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        descriptor = os.open(path, os.O_RDWR)
        if os.fstat(descriptor).st_size == layout.size_bytes:
            verified = _verified(descriptor, layout)
            if len(verified) == len(layout.chunks):
                return descriptor, verified, True
        os.close(descriptor)
        # Damaged, or another file's: keep what is right of it and mend the rest.
        if not part.exists():
            path.replace(part)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        verified = _verified(descriptor, layout)
        os.ftruncate(descriptor, layout.size_bytes)
        _reserve(descriptor, layout.size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, verified, False


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Take the disk space now: a full disk is an error before hours of download and not after."""
    if size_bytes == 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Some file systems cannot reserve; on them a full disk shows at a write.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _verified(descriptor: int, layout: FileLayout) -> set[int]:
    size = os.fstat(descriptor).st_size
    found: set[int] = set()
    for index, digest in enumerate(layout.chunks):
        start = layout.start(index)
        end = start + layout.length(index)
        if end <= size and hashlib.sha256(_pread(descriptor, start, end)).digest() == digest:
            found.add(index)
    return found


def _span(layout: FileLayout, index: int, offset: int, size_bytes: int) -> tuple[int, int]:
    """Where in the file the asked part of a chunk lies."""
    start = layout.start(index) + offset
    return start, min(start + size_bytes, layout.start(index) + layout.length(index))


async def _read(descriptor: int, start: int, end: int) -> bytes | bytearray:
    """Bytes [start, end) of a file: at once if the system has them in memory, else in a thread."""
    await trio.lowlevel.checkpoint()
    if _NOWAIT:
        data = bytearray(end - start)
        try:
            if os.preadv(descriptor, [data], start, _NOWAIT) == len(data):
                return data
        except (BlockingIOError, NotImplementedError):
            pass  # it has to come from the disk
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    return await trio.to_thread.run_sync(_pread, descriptor, start, end)


def _pread(descriptor: int, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file; fewer where it ends."""
    pieces: list[bytes] = []
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
