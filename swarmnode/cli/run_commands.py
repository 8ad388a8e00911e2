"""`init`, `run` and `join`: make a run, take part in one."""

import os
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protocol.invite import Invite, parse_invite
from swarmnode.cli.errors import UserError
from swarmnode.cli.options import DEFAULT_DATA, Data
from swarmnode.config import ConfigError, NodeConfig, load_config, parse_config, to_toml, with_overrides
from swarmnode.data_directory import DataDirectory, atomic_write

console = Console(highlight=False, soft_wrap=True)

Preset = Annotated[
    str, typer.Option(help="fleet: one learner, many workers; swarm: every node trains its own policy.")
]
Model = Annotated[str, typer.Option(help="'tiny' (shipped), a Hugging Face folder, or a hub id.")]
Mode = Annotated[str, typer.Option(help="async, or sequential (no staleness).")]
Name = Annotated[str | None, typer.Option(help="What others see this node as.")]
Listen = Annotated[
    list[str] | None, typer.Option(help="Multiaddress to listen on, such as /ip4/0.0.0.0/tcp/4001.")
]
Announce = Annotated[list[str] | None, typer.Option(help="Multiaddress that others should dial instead.")]
Seed = Annotated[
    list[str] | None, typer.Option(help="Multiaddress of a node to dial first, ending in /p2p/ID.")
]
ApiHost = Annotated[
    str | None, typer.Option(help="Where the page listens; beyond loopback it needs SWARMNODE_API_TOKEN.")
]
ApiPort = Annotated[int | None, typer.Option(help="The page's port; 0 takes a free one.")]
InviteFile = Annotated[Path | None, typer.Option(help="Write the invite here once the node is up.")]


def init(
    data: Data = DEFAULT_DATA,
    preset: Preset = "fleet",
    model: Model = "tiny",
    mode: Mode = "async",
    name: Name = None,
    listen: Listen = None,
    announce: Announce = None,
    private: Annotated[
        bool, typer.Option(help="Make a private network: only who has the invite can connect.")
    ] = False,
) -> None:
    """Make a new run in a data directory: key, configuration, signed run. Start it with 'swarmnode run'."""
    directory = DataDirectory(data)
    _create(directory, _new_run_config(preset, model, mode, name, listen, announce))
    if private:
        directory.save_network_key(secrets.token_bytes(32))
    console.print(
        f"Edit {directory.config_path} before the first start if you like; then: swarmnode run --data {data}"
    )


def run(
    data: Data = DEFAULT_DATA,
    config: Annotated[
        Path | None, typer.Option(help="Another configuration file than the directory's run.toml.")
    ] = None,
    create: Annotated[bool, typer.Option(help="Make a new run first if the directory has none.")] = False,
    preset: Preset = "fleet",
    model: Model = "tiny",
    mode: Mode = "async",
    name: Name = None,
    listen: Listen = None,
    announce: Announce = None,
    seed: Seed = None,
    api_host: ApiHost = None,
    api_port: ApiPort = None,
    invite_file: InviteFile = None,
) -> None:
    """Run the node of a data directory until Ctrl-C."""
    directory = DataDirectory(data)
    if create and not directory.spec_path.exists():
        if config is not None:
            _create(directory, load_config(config))
        else:
            _create(directory, _new_run_config(preset, model, mode, name, listen, announce))
    settings = load_config(config or directory.config_path)
    _start(
        directory, settings, _overrides(name, listen, announce, seed, api_host, api_port), None, invite_file
    )


def join(
    invite: Annotated[str, typer.Argument(help="The invite, or a file that holds it.")],
    data: Data = DEFAULT_DATA,
    role: Annotated[
        str | None, typer.Option(help="worker, relay or peer; by default what the run wants.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the invite file to appear.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The run's model on this machine; else it is fetched from peers.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to look for a node of the run at first.")] = 60.0,
    name: Name = None,
    listen: Listen = None,
    announce: Announce = None,
    api_host: ApiHost = None,
    api_port: ApiPort = None,
    invite_file: InviteFile = None,
) -> None:
    """Join a run with an invite and work for it until Ctrl-C."""
    parsed = parse_invite(_read_invite(invite, wait))
    directory = DataDirectory(data)
    directory.create()
    if directory.config_path.exists():
        settings = load_config(directory.config_path)
    else:
        port = 0 if _port_taken(8642) else 8642
        settings = parse_config({"api": {"port": port}}, "join")
        lasting = _overrides(name, listen, announce, None, api_host, api_port)
        del lasting["api.token"]  # It stays where it came from.
        settings = with_overrides(settings, lasting)
        settings = with_overrides(
            settings, {"role": role, "model": model, "network.seeds": list(parsed.seeds)}
        )
        directory.load_or_create_identity()
        atomic_write(directory.config_path, to_toml(settings).encode())
        console.print(
            f"New identity in {directory.identity_path}; back it up with 'swarmnode key export FILE'"
        )
    overrides = _overrides(name, listen, announce, None, api_host, api_port)
    overrides["role"] = role
    overrides["model"] = model
    _start(directory, settings, overrides, parsed, invite_file, timeout=timeout)


def _overrides(
    name: str | None,
    listen: list[str] | None,
    announce: list[str] | None,
    seed: list[str] | None,
    api_host: str | None,
    api_port: int | None,
) -> dict[str, Any]:
    return {
        "name": name,
        "network.listen": listen or None,
        "network.announce": announce or None,
        "network.seeds": seed or None,
        "api.host": api_host,
        "api.port": api_port,
        "api.token": os.environ.get("SWARMNODE_API_TOKEN") or None,
    }


def _new_run_config(
    preset: str, model: str, mode: str, name: str | None, listen: list[str] | None, announce: list[str] | None
) -> NodeConfig:
    from swarmnode.presets import demo_run_section

    section = demo_run_section(preset, model=model, mode=mode)
    values: dict[str, Any] = {"role": "learner" if preset == "fleet" else "peer", "run": section}
    return with_overrides(
        parse_config(values, "command line"),
        {"name": name, "network.listen": listen or None, "network.announce": announce or None},
    )


def _create(directory: DataDirectory, config: NodeConfig) -> None:
    from swarmnode.runtime.run_setup import build_spec, save_spec

    if config.run is None:
        raise ConfigError("a new run needs a [run] section in its configuration; 'swarmnode init' writes one")
    directory.create()
    identity = directory.load_or_create_identity()
    spec = build_spec(config.run, identity)
    save_spec(directory, spec, identity)
    atomic_write(directory.config_path, to_toml(config).encode())
    console.print(
        f"New run '{spec.name}' ({spec.run_id.hex()[:12]}) in {directory.root}, owned by {identity.name}"
    )
    console.print(f"Your key is {directory.identity_path}: back it up with 'swarmnode key export FILE'")


def _start(
    directory: DataDirectory,
    settings: NodeConfig,
    overrides: dict[str, Any],
    invite: Invite | None,
    invite_file: Path | None,
    timeout: float = 60.0,
) -> None:
    import trio

    from swarmnode.runtime.node import Node

    settings = with_overrides(settings, overrides)
    node = Node(
        directory,
        settings,
        invite=invite,
        invite_file=invite_file,
        join_timeout_s=timeout,
    )
    trio.run(node.run)


def _read_invite(text: str, wait: bool) -> str:
    if "/" not in text and not text.endswith(".txt"):
        return text
    path = Path(text)
    deadline = time.monotonic() + 600
    said = False
    while not path.is_file() or not path.read_text(encoding="utf-8").strip():
        if not wait or time.monotonic() > deadline:
            raise UserError(f"{path}: there is no invite in this file; with --wait the command waits for it")
        if not said:
            console.print(f"Waiting for an invite in {path}")
            said = True
        time.sleep(0.5)
    return path.read_text(encoding="utf-8")


def _port_taken(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
