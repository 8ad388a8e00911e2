"""How much a node process grows while whole snapshots and deltas pass through it.

    python -m benchmarks.node_memory --json build/node-memory.json [--quick]

Three processes with a node's own transport, chunk exchange and follower on loopback: a learner with a
synthetic snapshot of bfloat16 weights (400 MB; 64 MB with --quick), a delta of it in which 1 % of the values
differ and one in which half do; a worker that fetches all three and rebuilds; a late node that fetches the
newest snapshot from the worker. Growth is the highest resident size while each lasts, mapped files included,
over the size before the first.
"""

import argparse
import itertools
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.lab_process import Channel, LabProcess
from benchmarks.report import table, write_report
from peers.base import PeerId
from peers.chunk_serving import ChunkServer
from peers.libp2p_transport import Libp2pTransport
from peers.swarm import Swarm
from protocol.delta import encode_delta
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.limits import DEFAULT_CHUNK_BYTES
from protocol.messages import Delta, Manifest, SamplingContract
from protocol.run_spec import BaseModelRef, RunSpec
from protocol.tasks import TaskSpec
from swarmnode.runtime.model_files import hash_chunks
from swarmnode.runtime.version_store import DELTA_NAME, WEIGHTS_NAME, VersionStore, version_directory
from swarmnode.runtime.weight_follower import WeightFollower
from swarmnode.runtime.weight_manifests import serve_manifests

LIMIT_MB = 64
TIMEOUT_S = 300.0
CHANGED = (0.01, 0.5)
"""Shares of the values that differ in version 1 and 2."""
STEPS = ("a snapshot comes", "a delta of 1 % comes and is rebuilt", "one of 50 % comes and is rebuilt")
TENSOR_VALUES = 8 * 1024 * 1024
LEARNER, WORKER, LATE = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
SPEC = RunSpec(
    name="node memory",
    nonce=bytes(16),
    preset="fleet",
    model=BaseModelRef(name="synthetic", assets=[]),
    tasks=[TaskSpec(environment="e", name="t")],
    sampling=SamplingContract(),
    learners=[LEARNER.key],
)


def main() -> None:
    arguments = _arguments()
    size_mb = 64 if arguments.quick else 400
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        results = {"snapshot_mb": size_mb, "limit_mb": LIMIT_MB, **_measure(Path(name), size_mb)}
    if arguments.json:
        write_report(arguments.json, "node_memory", results)
    rows = [
        [what, f"{grown['worker']:.1f} MB", f"{grown['other']:.1f} MB"]
        for what, grown in results["growth"].items()
    ]
    print(table(["while", "worker grew", "the other end grew"], rows))
    worst = max(max(grown.values()) for grown in results["growth"].values())
    print(f"largest growth {worst:.1f} MB, limit {LIMIT_MB} MB; before, {results['worker_before_mb']:.0f} MB")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, help="where the files go meanwhile")
    return parser.parse_args()


# What the learner has


def _publish(root: Path, size_mb: int) -> list[bytes]:
    """Versions 0, 1 and 2 on disk; their manifests' envelopes."""
    generator = np.random.default_rng(0)
    count = max(1, size_mb * 1_000_000 // (2 * TENSOR_VALUES))
    entries = {
        f"layer{i}": {
            "dtype": "BF16",
            "shape": [TENSOR_VALUES],
            "data_offsets": [2 * i * TENSOR_VALUES, 2 * (i + 1) * TENSOR_VALUES],
        }
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    paths = [version_directory(root, LEARNER.key, version) / WEIGHTS_NAME for version in (0, 1, 2)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    for _ in range(count):
        values = (generator.standard_normal(TENSOR_VALUES, np.float32).view(np.uint32) >> 16).astype("<u2")
        for path, share in zip(paths, (0.0, *CHANGED), strict=True):
            values = np.where(generator.random(TENSOR_VALUES, np.float32) < share, values ^ 1, values)
            with path.open("ab") as file:
                file.write(values.tobytes())
    manifests = [_manifest(paths[0], 0, None)]
    for version in (1, 2):
        manifests.append(_with_delta(paths[version - 1], paths[version], manifests[-1]))
    return [seal(LEARNER, SPEC.run_id, "manifest", each.version, each.encode()) for each in manifests]


def _with_delta(old: Path, new: Path, parent: Manifest) -> Manifest:
    delta = new.with_name(DELTA_NAME)
    contents = [np.memmap(path, np.uint8, "r").data for path in (old, new)]
    with delta.open("wb") as file:
        for piece in encode_delta(contents[0], contents[1], DEFAULT_CHUNK_BYTES):
            file.write(piece)
    described = Delta(
        parent=parent.version,
        parent_state=parent.state_hash,
        size_bytes=delta.stat().st_size,
        chunk_size=DEFAULT_CHUNK_BYTES,
        chunks=hash_chunks(delta, DEFAULT_CHUNK_BYTES),
    )
    print(
        f"the delta of version {parent.version + 1} has {described.size_bytes / 1e6:.1f} MB", file=sys.stderr
    )
    return _manifest(new, parent.version + 1, described)


def _manifest(path: Path, version: int, delta: Delta | None) -> Manifest:
    return Manifest(
        policy=LEARNER.key,
        version=version,
        size_bytes=path.stat().st_size,
        chunk_size=DEFAULT_CHUNK_BYTES,
        chunks=hash_chunks(path, DEFAULT_CHUNK_BYTES),
        delta=delta,
    )


# The processes


def _measure(folder: Path, size_mb: int) -> dict[str, Any]:
    # Forked before this process has used memory that they would find free.
    learner = LabProcess("learner", None, folder / "learner.log", _be_learner, folder / "learner")
    worker = LabProcess("worker", None, folder / "worker.log", _follow, WORKER, folder / "worker")
    late = LabProcess("late", None, folder / "late.log", _follow, LATE, folder / "late")
    growth: dict[str, dict[str, float]] = {}
    try:
        print(f"making a snapshot of {size_mb} MB and its delta", file=sys.stderr)
        manifests = _publish(folder / "learner", size_mb)
        worker.send(address=learner.receive(TIMEOUT_S)["address"])
        own_address = worker.receive(TIMEOUT_S)["address"]
        for what, manifest in zip(STEPS, manifests, strict=True):
            print(f"measuring: {what}", file=sys.stderr)
            learner.send(publish=manifest.hex())
            growth[what] = {"worker": worker.receive(TIMEOUT_S)["grown_mb"]}
            learner.send(measure=True)
            growth[what]["other"] = learner.receive(TIMEOUT_S)["grown_mb"]
        what = "a late node fetches the snapshot from the worker"
        print(f"measuring: {what}", file=sys.stderr)
        worker.send(measure=True)
        before = worker.receive(TIMEOUT_S)["before_mb"]
        late.send(address=own_address)
        late.receive(TIMEOUT_S)
        growth[what] = {"other": late.receive(TIMEOUT_S)["grown_mb"]}
        worker.send(measure=True)
        growth[what]["worker"] = worker.receive(TIMEOUT_S)["grown_mb"]
    finally:
        for process in (late, worker, learner):
            process.kill()
    return {"growth": growth, "worker_before_mb": before}


class _Memory:
    """The highest resident size since the last look, over that at the start."""

    def __init__(self) -> None:
        self.before_mb = self._read("VmRSS")
        self._forget_peak()

    def grown_mb(self) -> float:
        grown = self._read("VmHWM") - self.before_mb
        self._forget_peak()
        return grown

    def _forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _read(self, field: str) -> float:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024 / 1e6


class _Parts:
    """A node's transport and stores, without what moves no weights."""

    def __init__(self, identity: Identity, root: Path) -> None:
        self.transport = Libp2pTransport(identity, listen=["/ip4/127.0.0.1/tcp/0"])
        numbers = itertools.count()
        self.swarm = Swarm(
            self.transport,
            identity,
            SPEC.run_id,
            next_sequence=lambda: next(numbers),
            on_refusal=lambda peer, reason, detail: print("refused", reason, detail),
        )
        self.root = root
        self.versions = VersionStore(root, SPEC.run_id)
        ChunkServer(self.swarm, self.versions.shelf)
        serve_manifests(self.swarm, self.versions)

    async def run(self, work: Callable[[], Any]) -> None:
        async with self.transport.running(), trio.open_nursery() as nursery:
            nursery.start_soon(self.swarm.run)
            await self.swarm.listening.wait()
            await work()
            nursery.cancel_scope.cancel()


def _be_learner(channel: Channel, root: Path) -> None:
    async def work() -> None:
        channel.send(address=parts.transport.addresses[0])
        memory = _Memory()
        while True:
            message = await trio.to_thread.run_sync(channel.receive)
            if "publish" in message:
                envelope = open_envelope(bytes.fromhex(message["publish"]), run_id=SPEC.run_id)
                manifest = Manifest.decode(envelope.body)
                folder = version_directory(root, LEARNER.key, manifest.version)
                delta = folder / DELTA_NAME if manifest.delta is not None else None
                parts.versions.add(manifest, envelope, folder / WEIGHTS_NAME, delta)
            else:
                channel.send(grown_mb=memory.grown_mb())

    parts = _Parts(LEARNER, root)
    trio.run(parts.run, work)


def _follow(channel: Channel, identity: Identity, root: Path) -> None:
    async def work() -> None:
        address = (await trio.to_thread.run_sync(channel.receive))["address"]
        source = await parts.transport.connect(address, 30)
        channel.send(address=parts.transport.addresses[0])
        memory = _Memory()
        follower = _follower(parts, source, lambda: channel.send(grown_mb=memory.grown_mb()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            while True:
                await trio.to_thread.run_sync(channel.receive)
                channel.send(before_mb=memory.before_mb, grown_mb=memory.grown_mb())

    parts = _Parts(identity, root)
    trio.run(parts.run, work)


def _follower(parts: _Parts, source: PeerId, on_complete: Callable[[], None]) -> WeightFollower:
    return WeightFollower(
        policy=LEARNER.key,
        spec=SPEC,
        swarm=parts.swarm,
        versions=parts.versions,
        policies_path=parts.root,
        holders=lambda version: [source],
        providers=lambda: [source],
        on_version=lambda stored: None if stored.weights_path is None else on_complete(),
        on_withdrawn=lambda versions: print("withdrawn", versions),
        on_event=lambda level, text: print(level, text),
        on_refusal=lambda peer, reason, detail: print("refused", reason, detail),
    )


if __name__ == "__main__":
    main()
