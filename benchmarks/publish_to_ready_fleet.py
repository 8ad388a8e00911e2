"""A real fleet in the network laboratory: `swarmnode run` and `swarmnode join`, watched from inside.

Each node is the process that the command line starts, with its own learner, verifier or rollout process.
Watching is all that is added: the moment at which a learner's node hears of an update, and at which a rollout
process says that it has loaded a version.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab_process import Channel
from peers.base import PeerId
from peers.libp2p_address import peer_id_to_text
from protocol.invite import Invite, format_invite
from swarmnode.cli.main import main as swarmnode_main
from swarmnode.config import parse_config, to_toml
from swarmnode.data_directory import DataDirectory, atomic_write
from swarmnode.runtime import roles
from swarmnode.runtime.children import ChildProcess
from swarmnode.runtime.learner_role import LearnerRole
from swarmnode.runtime.run_setup import build_spec, save_spec
from swarmnode.runtime.worker_role import WorkerRole

PORT = 4001
SNAPSHOTS_ONLY = "benchmarks.publish_to_ready_snapshots"


@dataclass(frozen=True)
class Fleet:
    """Data directories, the learner's first, and the invite of its run."""

    directories: list[Path]
    invite: str


def lay_out(root: Path, model: Path, run: dict[str, Any], addresses: list[str], updates: int) -> Fleet:
    """Make the data directories of a learner and its workers, one for each address."""
    directories = [DataDirectory(root / f"node-{number}") for number in range(len(addresses))]
    section = {**run, "model": str(model)}
    for number, (directory, address) in enumerate(zip(directories, addresses, strict=True)):
        directory.create()
        values: dict[str, Any] = {
            "role": "worker" if number else "learner",
            "name": f"worker-{number}" if number else "learner",
            "model": str(model),
            "network": {"listen": [f"/ip4/{address}/tcp/{PORT}"]},
            "api": {"enabled": False},
            "engine": {"dtype": "bfloat16", "groups_in_hand": 1},
            "learner": {"eval_every": 1000, "eval_prompts": 1, "max_updates": updates},
        }
        if number == 0:
            values["run"] = section
        atomic_write(directory.config_path, to_toml(parse_config(values, "the fleet")).encode())
    identity = directories[0].load_or_create_identity()
    config = parse_config({"run": section}, "the fleet").run
    assert config is not None
    spec = build_spec(config, identity)
    save_spec(directories[0], spec, identity)
    seed = f"/ip4/{addresses[0]}/tcp/{PORT}/p2p/{peer_id_to_text(PeerId(identity.key))}"
    invite = format_invite(Invite(run_id=spec.run_id, seeds=[seed]))
    return Fleet([directory.root for directory in directories], invite)


def run_learner(channel: Channel, directory: Path, deltas: bool) -> None:
    """Work of a lab process: the learner's node, which tells of every update."""

    def watch(message: dict[str, Any]) -> None:
        if message["type"] == "update" and message["publication"] is not None:
            now = time.monotonic()
            publication, delta = message["publication"], message["publication"]["delta"]
            channel.send(
                version=message["version"],
                step_done=now - message["metrics"]["publish_seconds"],
                told=now,
                snapshot_bytes=publication["size"],
                delta_bytes=None if delta is None else delta["size"],
            )

    _watch(LearnerRole, "on_learner_message", watch)
    if not deltas:
        roles.ChildProcess = _without_deltas  # type: ignore[assignment, misc]
    _swarmnode("run", "--data", str(directory))


def run_worker(channel: Channel, directory: Path, invite: str) -> None:
    """Work of a lab process: a worker's node, which tells of every version that its engine has loaded."""

    def watch(message: dict[str, Any]) -> None:
        if message["type"] == "loaded":
            channel.send(version=message["version"], at=time.monotonic(), way=message.get("way"))

    _watch(WorkerRole, "on_message", watch)
    _swarmnode("join", invite, "--data", str(directory))


def _watch(role: type, method: str, look: Callable[[dict[str, Any]], None]) -> None:
    """Have `look` called with each message that a role gets from its child process, before the role."""
    original = getattr(role, method)

    async def watched(self: Any, message: dict[str, Any]) -> None:
        look(message)
        await original(self, message)

    setattr(role, method, watched)


def _without_deltas(name: str, module: str, **rest: Any) -> ChildProcess:
    return ChildProcess(name, SNAPSHOTS_ONLY if name == "learner" else module, **rest)


def _swarmnode(*arguments: str) -> None:
    sys.argv = ["swarmnode", *arguments]
    swarmnode_main()
