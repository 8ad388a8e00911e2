"""Versions on disk, as far as those look at them who do not read their files."""

from pathlib import Path

from protocol.chunks import state_hash
from protocol.envelope import open_envelope, seal
from protocol.messages import Delta, Manifest
from swarmnode.runtime.version_store import StoredVersion
from tests.unit.swarmnode.role_parts import LEARNER


def stored(version: int, parent: int | None = None, has_file: bool = True) -> StoredVersion:
    """A version on disk; with `parent` there is its delta too."""
    chunks = [b"%032d" % version]
    delta = None
    if parent is not None:
        state = state_hash(1000, 1024, [b"%032d" % parent])
        delta = Delta(parent=parent, parent_state=state, size_bytes=10, chunk_size=10, chunks=chunks)
    manifest = Manifest(
        policy=LEARNER.key, version=version, size_bytes=1000, chunk_size=1024, chunks=chunks, delta=delta
    )
    return StoredVersion(
        manifest=manifest,
        envelope=open_envelope(seal(LEARNER, bytes(32), "manifest", 1, b""), run_id=bytes(32)),
        state=manifest.state_hash,
        weights_path=Path(f"/v{version}/weights") if has_file else None,
        delta_path=Path(f"/v{version}/delta") if parent is not None else None,
    )
