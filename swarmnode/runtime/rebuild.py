"""A version's snapshot from its parent's and a delta: one pass over the file, chunks in parallel, every chunk
verified."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.chunks import chunk_hash
from protocol.delta import DeltaError, DeltaFile
from protocol.messages import Manifest

TEMPORARY_SUFFIX = ".rebuild"


class RebuildFailed(Exception):
    """The parent and the delta do not give the snapshot that the manifest names; the message says why."""


class RebuildStopped(Exception):
    """Somebody asked for an end."""


def rebuild_snapshot(
    parent: Path,
    delta: Path,
    target: Path,
    manifest: Manifest,
    threads: int = 2,
    *,
    flush: bool = True,
    stop: threading.Event | None = None,
) -> None:
    """Write at `target` the snapshot that `manifest` names. Holds `threads` chunks and records in memory.

    `target` is then the whole file, or still what it was. Without `flush` that holds only until the machine
    stops: the version must not be recorded as held before `flush_file` has returned. Raises `RebuildFailed`
    when the files do not give that snapshot, `OSError` when they cannot be read or written, `RebuildStopped`
    soon after `stop` is set.
    """
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    try:
        with parent.open("rb") as source, delta.open("rb") as changes, temporary.open("wb") as result:
            opened = _open_delta(_FileBytes(changes.fileno()), delta, manifest)
            work = _Rebuild(source.fileno(), opened, result.fileno(), manifest, stop or threading.Event())
            work.run(threads)
            if flush:
                os.fsync(result.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if flush:
        _sync(target.parent)


def flush_file(path: Path) -> None:
    """Return when the file, and its name, will be there after the machine stops."""
    _sync(path)
    _sync(path.parent)


class _FileBytes:
    """A file to slice, read as it is sliced: a mapped one would count as this process's memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, item: slice, /) -> bytes:
        start, end, _ = item.indices(self._size)
        return os.pread(self._descriptor, end - start, start)


def _open_delta(data: _FileBytes, path: Path, manifest: Manifest) -> DeltaFile:
    try:
        delta = DeltaFile(data)
    except DeltaError as error:
        raise RebuildFailed(f"{path}: {error}") from error
    if (delta.snapshot_size, delta.chunk_size) != (manifest.size_bytes, manifest.chunk_size):
        raise RebuildFailed(
            f"{path} is for {delta.snapshot_size} bytes in chunks of {delta.chunk_size}, version "
            f"{manifest.version} has {manifest.size_bytes} in chunks of {manifest.chunk_size}"
        )
    return delta


class _Rebuild:
    """The pass over the chunks, which any thread takes in turn."""

    def __init__(
        self, source: int, delta: DeltaFile, result: int, manifest: Manifest, stop: threading.Event
    ) -> None:
        size = os.fstat(source).st_size
        if size != manifest.size_bytes:
            raise RebuildFailed(
                f"the parent has {size} bytes, version {manifest.version} {manifest.size_bytes}"
            )
        _reserve(result, size)
        self._source, self._delta, self._result, self._manifest = source, delta, result, manifest
        self._indices = iter(range(len(manifest.chunks)))
        self._next = threading.Lock()
        # A file takes one write at a time, and threads that wait for that in the kernel lose more.
        self._write = threading.Lock()
        self._stop = stop
        self._failed = threading.Event()

    def run(self, threads: int) -> None:
        with ThreadPoolExecutor(threads, "rebuild") as pool:
            for done in [pool.submit(self._work) for _ in range(threads)]:
                done.result()
        if self._stop.is_set():
            raise RebuildStopped

    def _work(self) -> None:
        manifest = self._manifest
        buffer = memoryview(bytearray(min(manifest.chunk_size, manifest.size_bytes)))
        try:
            while (index := self._take()) is not None:
                start = index * manifest.chunk_size
                self._rebuild(index, start, buffer[: min(manifest.chunk_size, manifest.size_bytes - start)])
        except BaseException:
            self._failed.set()
            raise

    def _take(self) -> int | None:
        with self._next:
            ends = self._stop.is_set() or self._failed.is_set()
            return None if ends else next(self._indices, None)

    def _rebuild(self, index: int, start: int, chunk: memoryview) -> None:
        version = self._manifest.version
        read = 0
        while read < len(chunk):
            count = os.preadv(self._source, [chunk[read:]], start + read)
            if count == 0:
                raise RebuildFailed(f"the parent ends at byte {start + read}")
            read += count
        try:
            self._delta.apply(index, chunk)
        except DeltaError as error:
            raise RebuildFailed(f"the delta of version {version} is damaged: {error}") from error
        if chunk_hash(chunk) != self._manifest.chunks[index]:
            raise RebuildFailed(
                f"chunk {index} of version {version} has another hash: the parent is not the one that the "
                "delta was made for, or one of the two is damaged"
            )
        with self._write:
            written = 0
            while written < len(chunk):
                written += os.pwrite(self._result, chunk[written:], start + written)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Take the disk space now: a full disk is an error before the work and not after."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Some file systems cannot reserve; on them a full disk shows at a write.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
