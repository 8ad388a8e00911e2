"""Weights from peers: only what the learner signed and what has its hashes is handed over, versions only move
forward, and no liar or loss stops it. Virtual time, in memory; files are real."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peers.base import PeerId
from peers.chunk_serving import ChunkServer
from peers.memory_transport import MemoryNetwork
from protocol.chunks import chunk_hashes
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Manifest
from protocol.refusals import RefusalReason
from protocol.run_spec import RunSpec
from swarmnode.runtime.version_store import StoredVersion, VersionStore, version_directory
from swarmnode.runtime.weight_follower import WeightFollower, serve_manifests
from tests.swarm.small_swarm import SmallNode, connect, running, until
from tests.unit.swarmnode.role_parts import make_spec

CHUNK = 1_000


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time would pass while a thread works, so its work is done here."""

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


def weights(version: int) -> bytes:
    """A safetensors file of one tensor."""
    data = random.Random(version).randbytes(10 * CHUNK)
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [5 * CHUNK], "data_offsets": [0, len(data)]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + data


class WeightNode(SmallNode):
    """A node with versions on disk. It serves them; with `follow` it follows the learner."""

    def __init__(self, network: MemoryNetwork, number: int, path: Path, spec: RunSpec, **node: Any) -> None:
        super().__init__(network, number, run_id=spec.run_id, **node)
        self.spec = spec
        self.policies = path / f"node{number}" / "policies"
        self.versions = VersionStore(self.policies, spec.run_id)
        self.versions.scan()
        ChunkServer(self.swarm, self.versions.shelf)
        serve_manifests(self.swarm, self.versions)
        self.loaded: list[int] = []
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
            on_version=lambda stored: self.loaded.append(stored.manifest.version),
            on_event=lambda level, text: self.events.append(text),
            on_refusal=lambda peer, reason, detail: self.refusals.append((PeerId(peer), reason)),
        )
        self.services.append(self.follower.run)
        return self.follower

    def _holders(self, version: int | None) -> list[PeerId]:
        connected = self.transport.connected_peers()
        return [node.peer for node in self.serving if node.peer in connected]

    def publish(
        self, version: int, content: bytes | None = None, signer: Identity | None = None, **changes: Any
    ) -> StoredVersion:
        """Put a version on disk with a manifest signed by `signer` (this node), `changes` made to it."""
        path = version_directory(self.policies, self.key, version) / "model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(weights(version) if content is None else content)
        fields: dict[str, Any] = {
            "policy": self.key,
            "version": version,
            "size_bytes": path.stat().st_size,
            "chunk_size": CHUNK,
            "chunks": chunk_hashes(path.read_bytes(), CHUNK),
        }
        manifest = Manifest(**{**fields, **changes})
        stored = self.versions.add(manifest, self._sign(manifest, signer or self.identity), path)
        self.versions.save_manifest(stored)
        return stored

    def _sign(self, manifest: Manifest, signer: Identity) -> Envelope:
        encoded = seal(signer, self.spec.run_id, "manifest", manifest.version, manifest.encode())
        return open_envelope(encoded, run_id=self.spec.run_id)

    def file(self, policy: bytes, version: int) -> Path:
        return version_directory(self.policies, policy, version) / "model.safetensors"


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


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_new_version_is_fetched_and_only_newer_ones_after_it(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(3)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [3])
        assert node.file(learner.key, 3).read_bytes() == weights(3)
        learner.publish(5)
        scene.follower.heard_of(5)
        await until(lambda: node.loaded == [3, 5], within_s=1)
        learner.versions.discard(learner.versions.get(learner.key, 5))  # type: ignore[arg-type]
        await trio.sleep(30)
    assert node.loaded == [3, 5]
    assert node.refusals == []


async def test_forged_manifests_are_refused_and_the_learner_is_heard(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    node, learner = scene.node_a, scene.learner
    forger, honest = scene.node(7), scene.node(8)
    # Signed by the forger as the learner's policy; and the learner's own words with another's policy.
    forger.publish(9, policy=learner.key)
    forger.versions._versions[learner.key, 9] = forger.versions._versions.pop((learner.key, 9))
    honest_version = learner.publish(2)
    honest.versions.add(honest_version.manifest, honest_version.envelope, honest_version.weights_path)
    node.serving = [forger, honest]
    async with running(node, forger, honest):
        await connect(node, forger, honest)
        scene.follower.heard_of(9)
        await until(lambda: node.loaded == [2])
        await trio.sleep(60)
    assert (forger.peer, RefusalReason.NOT_A_LEARNER) in node.refusals
    assert {peer for peer, _ in node.refusals} == {forger.peer}


async def test_three_liars_cannot_keep_the_one_honest_peer_from_being_asked(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    node, learner = scene.node_a, scene.learner
    liars = [scene.node(number) for number in (11, 12, 13, 14)]
    for liar in liars:
        liar.publish(9, policy=learner.key)
    version = learner.publish(2)
    honest = scene.node(15)
    honest.versions.add(version.manifest, version.envelope, version.weights_path)
    node.serving = [*liars, honest]
    async with running(node, honest, *liars):
        await connect(node, honest, *liars)
        await until(lambda: node.loaded == [2])


async def test_a_download_goes_on_at_another_provider_when_one_dies(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    version = learner.publish(4)
    slow = scene.node(21, uplink_bytes_per_s=1_000)
    second = scene.node(22, uplink_bytes_per_s=2_000)
    for holder in (slow, second):
        holder.versions.add(version.manifest, version.envelope, version.weights_path)
    node.serving = [slow, second]
    async with running(node, slow, second):
        await connect(node, slow, second)
        await trio.sleep(3)
        assert node.loaded == []
        await slow.crash()
        await until(lambda: node.loaded == [4])
    assert node.file(learner.key, 4).read_bytes() == weights(4)


async def test_what_is_too_old_to_be_of_use_is_given_up_for_the_newest_and_cleaned_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    scene = Scene(tmp_path)
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        with trio.fail_after(60):
            while not (tmp_path / "node2").exists():
                await trio.sleep(0.01)
        # The learner moves on and forgets version 1 before it has been fetched.
        stored = learner.versions.get(learner.key, 1)
        assert stored is not None
        learner.versions.discard(stored)
        stored.weights_path.unlink()
        for version in range(2, 5):
            learner.publish(version)
            scene.follower.heard_of(version)
        await until(lambda: node.loaded == [4], within_s=20)
        assert {path.name for path in node.file(learner.key, 4).parents[1].glob("v*")} == {"v4"}


async def test_after_a_restart_the_held_version_is_there_at_once_unless_it_is_damaged(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    for damaged in (False, True):
        scene = Scene(tmp_path / str(damaged))
        learner, node = scene.learner, scene.node_a
        learner.publish(4)
        async with running(learner, node):
            await connect(node, learner)
            await until(lambda node=node: node.loaded == [4])
        if damaged:
            content = bytearray(node.file(learner.key, 4).read_bytes())
            content[-1] ^= 1
            node.file(learner.key, 4).write_bytes(content)
        again, source = scene.node(2), scene.node(1)
        again.serving = [source]
        again.follow(learner.key)
        async with running(again, source):
            await trio.sleep(1)
            assert again.loaded == ([] if damaged else [4])
            await connect(again, source)
            await until(lambda again=again: again.loaded == [4])
        assert again.file(learner.key, 4).read_bytes() == weights(4)
        assert bool(again.events) == damaged


async def test_a_damaged_manifest_costs_no_second_download(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    learner, node = scene.learner, scene.node_a
    learner.publish(4)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: node.loaded == [4])
    node.file(learner.key, 4).with_name("manifest.msgpack").write_bytes(b"torn")
    again, source = scene.node(2), scene.node(1)
    source.versions.shelf._stores.clear()
    again.serving = [source]
    again.follow(learner.key)
    async with running(again, source):
        await connect(again, source)
        await until(lambda: again.loaded == [4], within_s=20)


async def test_a_full_disk_is_said_and_tried_again(
    scene: Scene, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peers import file_assembly

    full = [True]
    reserve = file_assembly._reserve

    def maybe(descriptor: int, size_bytes: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        reserve(descriptor, size_bytes)

    monkeypatch.setattr(file_assembly, "_reserve", maybe)
    learner, node = scene.learner, scene.node_a
    learner.publish(1)
    async with running(learner, node):
        await connect(node, learner)
        await until(lambda: any("No space left" in text for text in node.events))
        full[0] = False
        await until(lambda: node.loaded == [1])
