"""Which nodes a demo has and how each is set up: data directories, keys, ports, the run, the invite."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.base import PeerId
from peers.libp2p_address import peer_id_to_text
from protocol.invite import Invite, format_invite
from swarmnode.config import NodeConfig, parse_config, to_toml
from swarmnode.data_directory import DataDirectory, atomic_write
from swarmnode.presets import demo_run_section
from swarmnode.runtime.run_setup import build_spec, save_spec


@dataclass(frozen=True)
class DemoNode:
    """One node of the demo, ready to be started with `swarmnode run --data DIRECTORY`."""

    name: str
    role: str
    directory: DataDirectory
    api_port: int


@dataclass(frozen=True)
class DemoSwarm:
    """The nodes in the order of their start; the first trains and shows the page."""

    nodes: list[DemoNode]
    invite: str


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def lay_out(
    root: Path,
    *,
    preset: str,
    mode: str,
    model: str,
    seed: int,
    page_port: int,
    run_overrides: dict[str, Any],
    learner_overrides: dict[str, Any] | None = None,
) -> DemoSwarm:
    """Create the data directories of a demo below `root`. Raises `ConfigError`, `DataError`."""
    section = {**demo_run_section(preset, model=model, mode=mode), **run_overrides}
    roles = (
        [("learner", "learner"), ("relay", "relay"), ("worker-1", "worker"), ("worker-2", "worker")]
        if preset == "fleet"
        else [(f"peer-{number}", "peer") for number in (1, 2, 3)]
    )
    ports = free_ports(2 * len(roles))
    api_ports = [page_port, *ports[1 : len(roles)]]
    listen_ports = ports[len(roles) :]
    directories = [DataDirectory(root / name) for name, _ in roles]
    identities = []
    for directory in directories:
        directory.create()
        identities.append(directory.load_or_create_identity())
    addresses = [
        f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id_to_text(PeerId(identity.key))}"
        for port, identity in zip(listen_ports, identities, strict=True)
    ]
    # In a fleet others come in through the relay, so that the learner may fail; in a swarm by the first peer.
    seed_address = addresses[1] if preset == "fleet" else addresses[0]
    nodes = []
    for index, (name, role) in enumerate(roles):
        config = _config(
            name,
            role,
            listen_ports[index],
            api_ports[index],
            [address for address in (seed_address, addresses[0]) if address != addresses[index]],
            {
                "seed": seed + index,
                "eval_prompts": 128 if model == "tiny" else 32,
                **(learner_overrides or {}),
            },
            section if index == 0 else None,
            model if index == 0 or model != "tiny" else None,
        )
        atomic_write(directories[index].config_path, to_toml(config).encode())
        nodes.append(DemoNode(name, role, directories[index], api_ports[index]))
    run = parse_config({"run": section}, f"demo {preset}").run
    assert run is not None
    spec = build_spec(run, identities[0])
    save_spec(directories[0], spec, identities[0])
    if preset == "fleet":
        # The relay is the seed of all others, so it must know the run before it has anybody to ask.
        atomic_write(directories[1].spec_path, directories[0].spec_path.read_bytes())
    invite = Invite(run_id=spec.run_id, seeds=[seed_address])
    return DemoSwarm(nodes, format_invite(invite))


def _config(
    name: str,
    role: str,
    listen_port: int,
    api_port: int,
    seeds: list[str],
    learner: dict[str, Any],
    section: dict[str, Any] | None,
    model: str | None,
) -> NodeConfig:
    values: dict[str, Any] = {
        "role": role,
        "name": name,
        "network": {
            "listen": [f"/ip4/127.0.0.1/tcp/{listen_port}"],
            "seeds": list(dict.fromkeys(seeds)),
        },
        "api": {"port": api_port},
        "learner": learner,
    }
    if section is not None:
        values["run"] = section
    elif model is not None:
        values["model"] = model
    return parse_config(values, f"demo {name}")
