"""What a learner publishes: one version's weights rounded to bfloat16, cut into chunks, with hashes and a
probe.

    <folder>/v<n>/model.safetensors     the weights, tied tensors once
    <folder>/v<n>/publication.json      what a manifest needs: hashes, size, probe

A version's directory appears complete or not at all. A version number never stands for two sets of weights.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from protocol.chunks import chunk_hashes, state_hash
from trainer.files import keep_newest, new_directory, read_json, version_directories, write_json

WEIGHTS_NAME = "model.safetensors"
RECORD_NAME = "publication.json"


class PublicationError(Exception):
    """A published version on disk is incomplete or damaged."""


@dataclass(frozen=True)
class ProbeResult:
    """Log-prob of each of `tokens` after the first, under the published weights at temperature 1."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Publication:
    """One published version."""

    version: int
    path: Path
    size_bytes: int
    chunk_size: int
    chunks: list[bytes]
    probe: ProbeResult

    @property
    def state_hash(self) -> bytes:
        """The name of the snapshot."""
        return state_hash(self.size_bytes, self.chunk_size, self.chunks)


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in bfloat16 on the CPU of what is floating point, as it is of the rest."""
    return {
        name: tensor.detach()
        .to(device="cpu", dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype, copy=True)
        .contiguous()
        for name, tensor in tensors.items()
    }


def hash_of(tensors: Mapping[str, Tensor], chunk_size: int) -> bytes:
    """The state hash that the snapshot `tensors` would be published under."""
    data = save(dict(tensors), metadata={"format": "pt"})
    return state_hash(len(data), chunk_size, chunk_hashes(data, chunk_size))


def publish(
    folder: Path,
    version: int,
    tensors: Mapping[str, Tensor],
    probe: Callable[[], ProbeResult],
    *,
    chunk_size: int,
    keep: int,
) -> Publication:
    """Write the snapshot `tensors` as `version`; then delete all but the `keep` newest versions."""
    final = folder / f"v{version}"
    with new_directory(final) as temporary:
        weights = temporary / WEIGHTS_NAME
        save_file(dict(tensors), weights, metadata={"format": "pt"})
        publication = Publication(
            version=version,
            path=final / WEIGHTS_NAME,
            size_bytes=weights.stat().st_size,
            chunk_size=chunk_size,
            chunks=_file_chunks(weights, chunk_size),
            probe=probe(),
        )
        write_json(temporary / RECORD_NAME, _record(publication))
    keep_newest(folder, keep)
    return publication


def read_publication(directory: Path) -> Publication:
    """The version in `directory`, its file checked against its hashes. Raises `PublicationError`."""
    path = directory / WEIGHTS_NAME
    try:
        record = read_json(directory / RECORD_NAME)
        publication = Publication(
            version=int(record["version"]),
            path=path,
            size_bytes=int(record["size_bytes"]),
            chunk_size=int(record["chunk_size"]),
            chunks=[bytes.fromhex(chunk) for chunk in record["chunks"]],
            probe=ProbeResult(record["probe"]["tokens"], record["probe"]["logprobs"]),
        )
        intact = (
            path.stat().st_size == publication.size_bytes
            and _file_chunks(path, publication.chunk_size) == publication.chunks
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublicationError(f"the version in {directory} cannot be read: {error}") from error
    if not intact:
        raise PublicationError(f"{path} does not have the bytes that were published")
    return publication


def published_versions(folder: Path) -> dict[int, Path]:
    """Directories of published versions, ascending; their content is not looked at."""
    return version_directories(folder)


def _file_chunks(path: Path, chunk_size: int) -> list[bytes]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view:
            return chunk_hashes(view, chunk_size)


def _record(publication: Publication) -> dict[str, Any]:
    return {
        "version": publication.version,
        "size_bytes": publication.size_bytes,
        "chunk_size": publication.chunk_size,
        "chunks": [chunk.hex() for chunk in publication.chunks],
        "probe": {"tokens": publication.probe.tokens, "logprobs": publication.probe.logprobs},
    }
