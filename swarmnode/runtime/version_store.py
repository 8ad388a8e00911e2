"""The weight versions and model files that this node has on disk, findable by manifest and by chunk hash."""

import logging
import mmap
import shutil
from dataclasses import dataclass
from pathlib import Path

import trio

from peers.chunk_serving import ChunkShelf
from peers.file_assembly import StoredFile
from protocol.chunks import chunk_hashes
from protocol.envelope import Envelope, open_envelope
from protocol.messages import Manifest, Probe
from protocol.refusals import Refused
from protocol.run_spec import Asset
from swarmnode.data_directory import atomic_write

log = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.msgpack"


@dataclass(frozen=True)
class StoredVersion:
    """A complete version on disk, with the learner's signed manifest."""

    manifest: Manifest
    envelope: Envelope
    weights_path: Path
    file: StoredFile


def version_directory(policies_path: Path, policy: bytes, version: int) -> Path:
    """Where a version of a policy lives."""
    return policies_path / policy.hex()[:16] / f"v{version}"


class VersionStore:
    """What can be served: `shelf` has the chunks, `get` the manifests. Versions come from the learner
    process or from peers."""

    def __init__(self, policies_path: Path, run_id: bytes) -> None:
        self.shelf = ChunkShelf()
        self._policies_path = policies_path
        self._run_id = run_id
        self._versions: dict[tuple[bytes, int], StoredVersion] = {}

    def scan(self) -> None:
        """Find the complete versions of an earlier start; what is not complete is left to be resumed."""
        for path in sorted(self._policies_path.glob(f"*/v*/{MANIFEST_NAME}")):
            weights = path.with_name(WEIGHTS_NAME)
            try:
                envelope = open_envelope(path.read_bytes(), run_id=self._run_id)
                manifest = Manifest.decode(envelope.body)
            except (OSError, Refused) as error:
                log.warning("%s: ignored, not a manifest of this run (%s)", path, error)
                continue
            if weights.exists() and weights.stat().st_size == manifest.size_bytes:
                self.add(manifest, envelope, weights)

    def add(self, manifest: Manifest, envelope: Envelope, weights_path: Path) -> StoredVersion:
        """Register a verified version whose weights are at `weights_path`."""
        file = StoredFile(weights_path, manifest.size_bytes, manifest.chunk_size, manifest.chunks)
        stored = StoredVersion(manifest, envelope, weights_path, file)
        former = self._versions.get((manifest.policy, manifest.version))
        if former is not None:
            self.shelf.remove(former.file)
        self._versions[manifest.policy, manifest.version] = stored
        self.shelf.add(file)
        return stored

    def save_manifest(self, stored: StoredVersion) -> None:
        """Write the manifest beside the weights, so that the version is found after a restart."""
        atomic_write(stored.weights_path.with_name(MANIFEST_NAME), stored.envelope.encoded)

    def add_assets(self, model_path: Path, assets: list[Asset], chunk_size: int) -> None:
        """Serve the base model's small files."""
        for asset in assets:
            if asset.chunks:
                self.shelf.add(
                    StoredFile(model_path / asset.path, asset.size_bytes, chunk_size, asset.chunks)
                )

    def get(self, policy: bytes, version: int | None) -> StoredVersion | None:
        """One version of a policy, or the newest held."""
        if version is not None:
            return self._versions.get((policy, version))
        held = self.versions(policy)
        return self._versions[policy, held[-1]] if held else None

    def versions(self, policy: bytes) -> list[int]:
        """Versions held of a policy, ascending."""
        return sorted(version for owner, version in self._versions if owner == policy)

    def discard(self, stored: StoredVersion) -> None:
        """Forget a version that turned out to be damaged; its files stay."""
        del self._versions[stored.manifest.policy, stored.manifest.version]
        self.shelf.remove(stored.file)

    async def retain(self, policy: bytes, keep: int) -> None:
        """Delete all but the newest `keep` versions of a policy, and older downloads that were given up."""
        for version in self.versions(policy)[:-keep]:
            self.shelf.remove(self._versions.pop((policy, version)).file)
        kept = self.versions(policy)
        if kept:
            folder = version_directory(self._policies_path, policy, 0).parent
            await trio.to_thread.run_sync(_delete_older, folder, set(kept))


def _delete_older(folder: Path, kept: set[int]) -> None:
    """Delete the directories of versions below the newest of `kept` that are not in it."""
    for directory in folder.glob("v*"):
        number = directory.name[1:]
        if number.isdecimal() and int(number) < max(kept) and int(number) not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def file_chunk_hashes(path: Path, chunk_size: int) -> list[bytes]:
    """SHA-256 of each chunk of a file."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return chunk_hashes(view, chunk_size)


def probe_message(probe: Probe | None) -> dict[str, list[float] | list[int]] | None:
    """A manifest's probe as the rollout process wants it."""
    return None if probe is None else {"tokens": list(probe.tokens), "logprobs": list(probe.logprobs)}


def file_assets(model_path: Path, chunk_size: int) -> list[Asset]:
    """The files beside the weights that a node needs to run the model: configuration, tokenizer, template."""
    wanted = sorted(
        path
        for path in model_path.iterdir()
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and path.is_file()
    )
    assets = []
    for path in wanted:
        if path.name.endswith(".index.json") or path.name == "README.txt":
            continue
        with open(path, "rb") as file:
            size = path.stat().st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            assets.append(Asset(path=path.name, size_bytes=size, chunks=chunk_hashes(data, chunk_size)))
    return assets


def assets_match(model_path: Path, assets: list[Asset], chunk_size: int) -> bool:
    """Whether a folder holds exactly these files."""
    for asset in assets:
        path = model_path / asset.path
        if not path.is_file() or path.stat().st_size != asset.size_bytes:
            return False
        if chunk_hashes(path.read_bytes(), chunk_size) != asset.chunks:
            return False
    return True
