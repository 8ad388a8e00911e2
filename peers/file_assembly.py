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

from peers.chunk_serving import bit_map
from protocol.chunks import chunk_ranges


class _Layout:
    """Where each chunk of a file lies."""

    def __init__(self, size_bytes: int, chunk_size: int, chunks: Sequence[bytes]) -> None:
        self.size_bytes = size_bytes
        self.ranges = list(chunk_ranges(size_bytes, chunk_size))
        if len(self.ranges) != len(chunks):
            raise ValueError(
                f"{len(chunks)} chunk hashes for {len(self.ranges)} chunks of {chunk_size} bytes"
            )
        self.chunks = list(chunks)
        self.indices: dict[bytes, list[int]] = {}
        for index, name in enumerate(chunks):
            self.indices.setdefault(name, []).append(index)

    def length(self, index: int) -> int:
        start, end = self.ranges[index]
        return end - start


class StoredFile:
    """A complete file as a `ChunkStore`. Opened anew for every read: the file may be deleted at any time."""

    def __init__(self, path: Path, size_bytes: int, chunk_size: int, chunks: Sequence[bytes]) -> None:
        self.path = path
        self._layout = _Layout(size_bytes, chunk_size, chunks)

    def has(self, chunk: bytes) -> bool:
        return chunk in self._layout.indices

    async def read(self, chunk: bytes, offset: int) -> bytes:
        """The chunk from `offset` on. Raises `KeyError`, `OSError`."""
        start, end = self._layout.ranges[self._layout.indices[chunk][0]]
        return await trio.to_thread.run_sync(self._read, start + offset, end)

    def holdings(self, chunk: bytes) -> bytes | None:
        count = len(self._layout.chunks)
        return bit_map(count, range(count)) if chunk in self._layout.indices else None

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            return _pread(file.fileno(), start, end)


class FileAssembly:
    """A file that arrives chunk by chunk, and a `ChunkStore` of what is here. Made by `open_assembly`."""

    def __init__(self, path: Path, descriptor: int, layout: _Layout, verified: set[int], named: bool) -> None:
        self.path = path
        self.part_path = part_path(path)
        self.verified = verified
        """Indices of the chunks that are on disk and have been hashed. Read only."""
        self._descriptor = descriptor
        self._layout = layout
        self._named = named
        self._open = True
        self._users = 0

    @property
    def wanted(self) -> list[tuple[bytes, int]]:
        """(hash, size in bytes) of every chunk: what `fetch_chunks` takes."""
        return [(name, self._layout.length(index)) for index, name in enumerate(self._layout.chunks)]

    @property
    def complete(self) -> bool:
        """Whether every chunk is verified."""
        return len(self.verified) == len(self._layout.chunks)

    def has(self, chunk: bytes) -> bool:
        return self._index(chunk) is not None

    async def read(self, chunk: bytes, offset: int) -> bytes:
        """A verified chunk from `offset` on. Raises `KeyError`, `OSError`."""
        index = self._index(chunk)
        if index is None:
            raise KeyError(chunk)
        start, end = self._layout.ranges[index]
        with self._using():
            return await trio.to_thread.run_sync(_pread, self._descriptor, start + offset, end)

    def holdings(self, chunk: bytes) -> bytes | None:
        if chunk not in self._layout.indices:
            return None
        return bit_map(len(self._layout.chunks), self.verified if self._open else ())

    async def write(self, index: int, data: bytes) -> None:
        """Put a chunk in its place. Raises `ValueError` if it is another, `OSError` if it cannot be kept."""
        if len(data) != self._layout.length(index):
            raise ValueError(f"chunk {index} has {self._layout.length(index)} bytes, not {len(data)}")
        with self._using():
            await trio.to_thread.run_sync(self._write, index, data)
        self.verified.add(index)

    async def finish(self) -> Path:
        """Flush, give the file its name, and return that. Raises `ValueError` if chunks are missing."""
        if not self.complete:
            missing = len(self._layout.chunks) - len(self.verified)
            raise ValueError(f"{self.part_path} lacks {missing} of {len(self._layout.chunks)} chunks")
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

    def _index(self, chunk: bytes) -> int | None:
        if not self._open:
            return None
        indices = self._layout.indices.get(chunk, [])
        return next((index for index in indices if index in self.verified), None)

    def _write(self, index: int, data: bytes) -> None:
        if hashlib.sha256(data).digest() != self._layout.chunks[index]:
            raise ValueError(f"chunk {index} has another hash")
        position = self._layout.ranges[index][0]
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
    layout = _Layout(size_bytes, chunk_size, chunks)
    descriptor, verified, named = await trio.to_thread.run_sync(_prepare, path, layout)
    assembly = FileAssembly(path, descriptor, layout, verified, named)
    try:
        yield assembly
    finally:
        assembly.close()


def _prepare(path: Path, layout: _Layout) -> tuple[int, set[int], bool]:
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


def _verified(descriptor: int, layout: _Layout) -> set[int]:
    size = os.fstat(descriptor).st_size
    return {
        index
        for index, (start, end) in enumerate(layout.ranges)
        if end <= size and hashlib.sha256(_pread(descriptor, start, end)).digest() == layout.chunks[index]
    }


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
