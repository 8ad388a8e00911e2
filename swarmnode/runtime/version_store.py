"""The weight versions and model files that this node has on disk, findable by manifest and by chunk hash."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from peers.chunk_shelf import ChunkShelf
from peers.file_assembly import StoredFile
from protocol.chunks import chunk_hash, chunk_ranges
from protocol.envelope import Envelope, open_envelope
from protocol.messages import Manifest, Probe
from protocol.refusals import Refused
from protocol.run_spec import Asset, BaseModelRef, WeightsFile
from swarmnode.data_directory import atomic_write

log = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
DELTA_NAME = "delta.bin"
MANIFEST_NAME = "manifest.msgpack"


@dataclass(frozen=True)
class StoredVersion:
    """What is on disk of a version, with the learner's signed manifest: its snapshot, its delta, or both."""

    manifest: Manifest
    envelope: Envelope
    state: bytes
    """`manifest.state_hash`, which costs a pass over all chunk hashes."""
    weights_path: Path | None
    """None until the snapshot is complete and verified."""
    delta_path: Path | None

    @property
    def version(self) -> int:
        return self.manifest.version


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
        self._files: dict[Path, StoredFile] = {}
        self._kept: Counter[tuple[bytes, int]] = Counter()

    def scan(self) -> None:
        """Find what earlier starts completed; what is not complete is left to be resumed."""
        for path in sorted(self._policies_path.glob(f"*/v*/{MANIFEST_NAME}")):
            try:
                envelope = open_envelope(path.read_bytes(), run_id=self._run_id)
                manifest = Manifest.decode(envelope.body)
            except (OSError, Refused) as error:
                log.warning("%s: ignored, not a manifest of this run (%s)", path, error)
                continue
            weights, delta = path.with_name(WEIGHTS_NAME), path.with_name(DELTA_NAME)
            has_weights = _has_size(weights, manifest.size_bytes)
            has_delta = manifest.delta is not None and _has_size(delta, manifest.delta.size_bytes)
            if has_weights or has_delta:
                self.add(manifest, envelope, weights if has_weights else None, delta if has_delta else None)

    def add(
        self,
        manifest: Manifest,
        envelope: Envelope,
        weights_path: Path | None,
        delta_path: Path | None = None,
    ) -> StoredVersion:
        """Register verified files of a version; what was known of it before stays."""
        key = (manifest.policy, manifest.version)
        state = manifest.state_hash
        former = self._versions.get(key)
        if former is not None and former.state == state:
            weights_path = weights_path or former.weights_path
        elif former is not None:
            self._hide(former.weights_path)
        if former is not None and former.manifest.delta == manifest.delta:
            delta_path = delta_path or former.delta_path
        elif former is not None:
            self._hide(former.delta_path)
        stored = StoredVersion(manifest, envelope, state, weights_path, delta_path)
        self._versions[key] = stored
        if weights_path is not None:
            self._serve(StoredFile(weights_path, manifest.size_bytes, manifest.chunk_size, manifest.chunks))
        if delta_path is not None:
            delta = manifest.delta
            assert delta is not None, "a version without a delta has no file of one"
            self._serve(StoredFile(delta_path, delta.size_bytes, delta.chunk_size, delta.chunks))
        return stored

    def _serve(self, file: StoredFile) -> None:
        if file.path not in self._files:
            self._files[file.path] = file
            self.shelf.add(file)

    def _hide(self, path: Path | None) -> None:
        file = None if path is None else self._files.pop(path, None)
        if file is not None:
            self.shelf.remove(file)

    def save_manifest(self, stored: StoredVersion) -> None:
        """Write the manifest beside the version's files, so that they are found after a restart."""
        directory = version_directory(self._policies_path, stored.manifest.policy, stored.version)
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(directory / MANIFEST_NAME, stored.envelope.encoded)

    def add_model(self, model_path: Path, model: BaseModelRef) -> None:
        """Serve the base model's files."""
        for file in model.files:
            if file.chunks:
                self.add_file(model_path / file.path, file, model.chunk_size)

    def add_file(self, path: Path, file: Asset | WeightsFile, chunk_size: int) -> None:
        """Serve one of them."""
        self._serve(StoredFile(path, file.size_bytes, chunk_size, file.chunks))

    def get(self, policy: bytes, version: int | None) -> StoredVersion | None:
        """One version of a policy, or the newest of which anything is held."""
        if version is not None:
            return self._versions.get((policy, version))
        held = self.versions(policy)
        return self._versions[policy, held[-1]] if held else None

    def versions(self, policy: bytes) -> list[int]:
        """Versions of a policy of which anything is held, ascending."""
        return sorted(version for owner, version in self._versions if owner == policy)

    def complete(self, policy: bytes) -> list[StoredVersion]:
        """Versions of a policy whose snapshot is held, ascending."""
        stored = (self._versions[policy, version] for version in self.versions(policy))
        return [one for one in stored if one.weights_path is not None]

    def discard_weights(self, stored: StoredVersion) -> None:
        """Forget a snapshot that turned out to be damaged. Its file stays, for what is right of it."""
        self._put(replace(stored, weights_path=None))
        self._hide(stored.weights_path)

    def discard_delta(self, stored: StoredVersion) -> None:
        """Forget a delta that turned out to be damaged or wrong. Its file stays."""
        self._put(replace(stored, delta_path=None))
        self._hide(stored.delta_path)

    def _put(self, stored: StoredVersion) -> None:
        key = (stored.manifest.policy, stored.version)
        if stored.weights_path is None and stored.delta_path is None:
            self._versions.pop(key, None)
        else:
            self._versions[key] = stored

    def _forget(self, stored: StoredVersion) -> None:
        self._versions.pop((stored.manifest.policy, stored.version), None)
        self._hide(stored.weights_path)
        self._hide(stored.delta_path)

    @contextmanager
    def keep(self, policy: bytes, version: int) -> Iterator[StoredVersion | None]:
        """The version if it is held, which then is not deleted before the block ends."""
        key = (policy, version)
        self._kept[key] += 1
        try:
            yield self._versions.get(key)
        finally:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]

    async def retain(self, policy: bytes, count: int) -> None:
        """Delete old versions of a policy, and older downloads that were given up.

        The newest `count` stay, those in use by `keep`, and what deltas that are not rebuilt yet need.
        """
        held = self.versions(policy)
        complete = self.complete(policy)
        needed = complete[-1].version if complete else None
        for version in held[:-count]:
            is_needed = needed is not None and version >= needed
            if not is_needed and not self._kept[policy, version]:
                self._forget(self._versions[policy, version])
        kept = self.versions(policy)
        if kept:
            folder = version_directory(self._policies_path, policy, 0).parent
            in_use = {version for owner, version in self._kept if owner == policy}
            await trio.to_thread.run_sync(_delete_older, folder, max(kept), {*kept, *in_use})


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def _delete_older(folder: Path, newest: int, kept: set[int]) -> None:
    """Delete the directories of versions below `newest` that are not in `kept`."""
    for directory in folder.glob("v*"):
        number = directory.name[1:]
        if number.isdecimal() and int(number) < newest and int(number) not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def is_intact(path: Path, size_bytes: int, chunk_size: int, chunks: list[bytes]) -> bool:
    """Whether a file has exactly these chunks; it is read one chunk at a time."""
    try:
        with path.open("rb", buffering=0) as file:
            if path.stat().st_size != size_bytes:
                return False
            return all(
                chunk_hash(file.read(end - start)) == expected
                for (start, end), expected in zip(chunk_ranges(size_bytes, chunk_size), chunks, strict=True)
            )
    except OSError as error:
        log.warning("%s: %s", path, error)
        return False


def probe_message(probe: Probe | None) -> dict[str, list[float] | list[int]] | None:
    """A manifest's probe as the rollout process wants it."""
    return None if probe is None else {"tokens": list(probe.tokens), "logprobs": list(probe.logprobs)}
