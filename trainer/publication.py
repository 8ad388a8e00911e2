"""What a learner publishes: one version's weights in bfloat16, the delta from the version before, and what a
manifest says of them.

    <folder>/v<n>/model.safetensors     the snapshot: all weights, tied tensors once
    <folder>/v<n>/delta.bin             what turns the parent's snapshot into this one, if that is worth it
    <folder>/v<n>/publication.json      hashes, sizes, probe

A version's directory appears complete or not at all. Its bytes may not have reached the disk then:
`flush_publication` sees to that, outside the time that workers wait for.
"""

import logging
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from protocol import limits
from protocol.chunks import chunk_hashes, state_hash
from protocol.delta import encode_delta
from trainer.files import (
    flush_directory,
    keep_newest,
    new_directory,
    read_json,
    version_directories,
    write_json,
)
from trainer.snapshot_file import write_snapshot

log = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
DELTA_NAME = "delta.bin"
RECORD_NAME = "publication.json"

THREADS = 2
"""For comparing and hashing, which wait for no one else's work."""
LARGEST_DELTA = 1 / 3
"""Of the snapshot's size. Beyond it a late joiner's one snapshot beats a delta or two."""
DELTA_CHUNKS = 32
"""A delta is cut into about this many chunks, so that each peer can pass parts of it on while others come."""
SMALLEST_DELTA_CHUNK = 64 * 1024


class PublicationError(Exception):
    """A published version on disk is incomplete or damaged."""


@dataclass(frozen=True)
class ProbeResult:
    """Log-prob of each of `tokens` after the first, under the published weights at temperature 1."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class PublishedDelta:
    """The file that turns the snapshot of version `parent`, of state hash `parent_state`, into another."""

    parent: int
    parent_state: bytes
    path: Path
    size_bytes: int
    chunk_size: int
    chunks: list[bytes]


@dataclass(frozen=True)
class Publication:
    """One published version; size and chunks are those of the snapshot at `path`."""

    version: int
    path: Path
    size_bytes: int
    chunk_size: int
    chunks: list[bytes]
    delta: PublishedDelta | None
    probe: ProbeResult

    @property
    def state_hash(self) -> bytes:
        """The name of the snapshot."""
        return state_hash(self.size_bytes, self.chunk_size, self.chunks)


def publish(
    folder: Path,
    version: int,
    tensors: Mapping[str, Tensor],
    probe: Callable[[], ProbeResult],
    *,
    chunk_size: int,
    keep: int,
    parent: Publication | None = None,
) -> Publication:
    """Write the weights `tensors` as `version`, with the delta from `parent` unless it would be too large.

    Then delete all but the `keep` newest versions.
    """
    final = folder / f"v{version}"
    with new_directory(final, flush=False) as temporary:
        weights = temporary / WEIGHTS_NAME
        size_bytes = write_snapshot(weights, tensors)
        with ThreadPoolExecutor(1, "publish") as pool:
            described = pool.submit(_describe, weights, temporary / DELTA_NAME, parent, chunk_size)
            # The model computes meanwhile.
            measured = probe()
            chunks, delta = described.result()
        publication = Publication(
            version=version,
            path=weights,
            size_bytes=size_bytes,
            chunk_size=chunk_size,
            chunks=chunks,
            delta=delta,
            probe=measured,
        )
        write_json(temporary / RECORD_NAME, _record(publication))
    keep_newest(folder, keep)
    return _at(publication, final)


def flush_publication(publication: Publication) -> None:
    """Return when the version is on disk to stay."""
    flush_directory(publication.path.parent)


def read_publication(directory: Path) -> Publication:
    """The version in `directory`, its files checked against its hashes. Raises `PublicationError`."""
    try:
        publication = _at(_from_record(read_json(directory / RECORD_NAME)), directory)
        delta = publication.delta
        files = [(publication.path, publication.size_bytes, publication.chunk_size, publication.chunks)]
        if delta is not None:
            files.append((delta.path, delta.size_bytes, delta.chunk_size, delta.chunks))
        for path, size_bytes, chunk_size, chunks in files:
            if (
                path.stat().st_size != size_bytes
                or chunk_hashes(_mapped(path), chunk_size, THREADS) != chunks
            ):
                raise PublicationError(f"{path} does not have the bytes that were published")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublicationError(f"the version in {directory} cannot be read: {error}") from error
    return publication


def published_versions(folder: Path) -> dict[int, Path]:
    """Directories of published versions, ascending; their content is not looked at."""
    return version_directories(folder)


def _describe(
    weights: Path, delta: Path, parent: Publication | None, chunk_size: int
) -> tuple[list[bytes], PublishedDelta | None]:
    """The chunks of a snapshot, and the delta from its parent, written to `delta`."""
    data = _mapped(weights)
    chunks = chunk_hashes(data, chunk_size, THREADS)
    return chunks, None if parent is None else _write_delta(delta, parent, data, chunk_size)


def _write_delta(path: Path, parent: Publication, new: memoryview, chunk_size: int) -> PublishedDelta | None:
    """Write the delta from `parent` to the snapshot `new`; None when it is not worth it, or not possible."""
    try:
        old = _mapped(parent.path)
        pieces = encode_delta(old, new, chunk_size, THREADS)
        header = next(pieces)
    except (OSError, ValueError) as error:
        log.warning("no delta from version %d, the whole snapshot is sent: %s", parent.version, error)
        return None
    most_bytes = int(len(new) * LARGEST_DELTA)
    size_bytes = 0
    with closing(pieces), path.open("wb") as file:
        for piece in chain([header], pieces):
            size_bytes += len(piece)
            if size_bytes > most_bytes:
                break
            file.write(piece)
    delta_chunk = delta_chunk_size(size_bytes, chunk_size)
    named_chunks = -(-len(new) // chunk_size) + -(-size_bytes // delta_chunk)
    if size_bytes > most_bytes or named_chunks > limits.MAX_CHUNKS:
        path.unlink()
        return None
    chunks = chunk_hashes(_mapped(path), delta_chunk)
    return PublishedDelta(parent.version, parent.state_hash, path, size_bytes, delta_chunk, chunks)


def delta_chunk_size(size_bytes: int, largest: int) -> int:
    """The chunk size of a delta file: a power of two where the snapshot's, `largest`, does not bound it."""
    wanted = 1 << max(0, -(-size_bytes // DELTA_CHUNKS) - 1).bit_length()
    return min(largest, max(SMALLEST_DELTA_CHUNK, wanted))


def _mapped(path: Path) -> memoryview:
    """The bytes of a file that is not empty, in no memory of this process; unmapped when nothing refers to
    them."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _at(publication: Publication, directory: Path) -> Publication:
    """The same publication, its files in `directory`."""
    delta = publication.delta
    if delta is not None:
        delta = replace(delta, path=directory / DELTA_NAME)
    return replace(publication, path=directory / WEIGHTS_NAME, delta=delta)


def _record(publication: Publication) -> dict[str, Any]:
    delta = publication.delta
    return {
        "version": publication.version,
        "size_bytes": publication.size_bytes,
        "chunk_size": publication.chunk_size,
        "chunks": [chunk.hex() for chunk in publication.chunks],
        "delta": None
        if delta is None
        else {
            "parent": delta.parent,
            "parent_state": delta.parent_state.hex(),
            "size_bytes": delta.size_bytes,
            "chunk_size": delta.chunk_size,
            "chunks": [chunk.hex() for chunk in delta.chunks],
        },
        "probe": {"tokens": publication.probe.tokens, "logprobs": publication.probe.logprobs},
    }


def _from_record(record: dict[str, Any]) -> Publication:
    delta = record["delta"]
    return Publication(
        version=int(record["version"]),
        path=Path(),
        size_bytes=int(record["size_bytes"]),
        chunk_size=int(record["chunk_size"]),
        chunks=[bytes.fromhex(chunk) for chunk in record["chunks"]],
        delta=None
        if delta is None
        else PublishedDelta(
            parent=int(delta["parent"]),
            parent_state=bytes.fromhex(delta["parent_state"]),
            path=Path(),
            size_bytes=int(delta["size_bytes"]),
            chunk_size=int(delta["chunk_size"]),
            chunks=[bytes.fromhex(chunk) for chunk in delta["chunks"]],
        ),
        probe=ProbeResult(record["probe"]["tokens"], record["probe"]["logprobs"]),
    )
