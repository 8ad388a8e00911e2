"""A learner that publishes and nodes that follow it, on virtual time and in memory; their files are real."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.base import PeerId
from peers.chunk_serving import ChunkServer
from peers.memory_transport import MemoryNetwork
from protocol.chunks import chunk_hashes
from protocol.delta import encode_delta
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Delta, Manifest
from protocol.run_spec import RunSpec
from swarmnode.runtime.version_store import DELTA_NAME, StoredVersion, VersionStore, version_directory
from swarmnode.runtime.weight_follower import WeightFollower
from swarmnode.runtime.weight_manifests import serve_manifests
from tests.swarm.small_swarm import SmallNode
from tests.unit.swarmnode.role_parts import make_spec

CHUNK = 1_000


def use_inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time would pass while a thread works, so its work is done here."""

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


def weights(version: int) -> bytes:
    """A safetensors file of one tensor. A version differs from the one before it in a few values."""
    data = bytearray(random.Random("first").randbytes(10 * CHUNK))
    for number in range(1, version + 1):
        for at in random.Random(number).sample(range(0, len(data), 2), 5):
            data[at] ^= 1
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [5 * CHUNK], "data_offsets": [0, len(data)]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


SIZE = len(weights(0))


class WeightNode(SmallNode):
    """A node with versions on disk. It serves them; with `follow` it follows the learner."""

    def __init__(self, network: MemoryNetwork, number: int, path: Path, spec: RunSpec, **node: Any) -> None:
        super().__init__(network, number, run_id=spec.run_id, **node)
        self.spec = spec
        self.policies = path / f"node{number}" / "policies"
        self.versions = VersionStore(self.policies, spec.run_id)
        self.versions.scan()
        self.server = ChunkServer(self.swarm, self.versions.shelf)
        serve_manifests(self.swarm, self.versions)
        self.loaded: list[int] = []
        """Versions handed over with their snapshot."""
        self.patched: list[int] = []
        """Versions handed over with their delta only."""
        self.withdrawn: list[int] = []
        self.events: list[str] = []
        self.serving: list[SmallNode] = []

    def follow(self, policy: bytes) -> WeightFollower:
        self.follower = WeightFollower(
            policy=policy,
            spec=self.spec,
            swarm=self.swarm,
            versions=self.versions,
            policies_path=self.policies,
            holders=self._holders,
            providers=lambda: self._holders(None),
            on_version=self._on_version,
            on_withdrawn=self._on_withdrawn,
            on_event=lambda level, text: self.events.append(text),
            on_refusal=lambda peer, reason, detail: self.refusals.append((PeerId(peer), reason)),
        )
        self.services.append(self.follower.run)
        return self.follower

    def _on_version(self, stored: StoredVersion) -> None:
        (self.patched if stored.weights_path is None else self.loaded).append(stored.version)

    def _on_withdrawn(self, versions: Sequence[int]) -> None:
        self.withdrawn += versions

    def _holders(self, version: int | None) -> list[PeerId]:
        connected = self.transport.connected_peers()
        return [node.peer for node in self.serving if node.peer in connected]

    def publish(
        self,
        version: int,
        content: bytes | None = None,
        *,
        parent: int | None = None,
        parent_state: bytes | None = None,
        delta: bytes | None = None,
        signer: Identity | None = None,
        **changes: Any,
    ) -> StoredVersion:
        """Put a version on disk with a manifest signed by `signer` (this node), `changes` made to it. With
        `parent` it has a delta, whose bytes and whose parent's state may be given."""
        content = weights(version) if content is None else content
        path = self.file(self.key, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        delta_path = None
        described = None
        if parent is not None:
            before = self.versions.get(self.key, parent)
            assert before is not None
            delta_path = path.with_name(DELTA_NAME)
            delta_path.write_bytes(
                delta or b"".join(encode_delta(weights(parent), content, CHUNK, threads=1))
            )
            described = Delta(
                parent=parent,
                parent_state=parent_state or before.state,
                size_bytes=delta_path.stat().st_size,
                chunk_size=100,
                chunks=chunk_hashes(delta_path.read_bytes(), 100),
            )
        fields: dict[str, Any] = {
            "policy": self.key,
            "version": version,
            "size_bytes": len(content),
            "chunk_size": CHUNK,
            "chunks": chunk_hashes(content, CHUNK),
            "delta": described,
        }
        manifest = Manifest(**{**fields, **changes})
        stored = self.versions.add(manifest, self._sign(manifest, signer or self.identity), path, delta_path)
        self.versions.save_manifest(stored)
        return stored

    def hold(self, stored: StoredVersion) -> StoredVersion:
        """Take over what another node has, files included."""
        return self.versions.add(stored.manifest, stored.envelope, stored.weights_path, stored.delta_path)

    def forget(self, version: int) -> None:
        """A learner has deleted one of its versions."""
        stored = self.versions.get(self.key, version)
        assert stored is not None and stored.weights_path is not None
        self.versions.discard_weights(stored)
        stored.weights_path.unlink()
        rest = self.versions.get(self.key, version)
        if rest is not None and rest.delta_path is not None:
            self.versions.discard_delta(rest)
            rest.delta_path.unlink()

    def _sign(self, manifest: Manifest, signer: Identity) -> Envelope:
        encoded = seal(signer, self.spec.run_id, "manifest", manifest.version, manifest.encode())
        return open_envelope(encoded, run_id=self.spec.run_id)

    def file(self, policy: bytes, version: int) -> Path:
        return version_directory(self.policies, policy, version) / "model.safetensors"

    @property
    def served_bytes(self) -> int:
        return sum(self.server.bytes_served.values())


class Scene:
    """A learner and a follower that knows it."""

    def __init__(self, path: Path, **spec: Any) -> None:
        self.network = MemoryNetwork()
        self.path = path
        learner = Identity.from_seed((1).to_bytes(32, "big"))
        self.spec = make_spec(learners=[learner.key], **spec)
        self.learner = self.node(1)
        self.node_a = self.node(2)
        self.node_a.serving = [self.learner]
        self.follower = self.node_a.follow(self.learner.key)

    def node(self, number: int, **settings: Any) -> WeightNode:
        return WeightNode(self.network, number, self.path, self.spec, **settings)
