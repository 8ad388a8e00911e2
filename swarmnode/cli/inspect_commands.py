"""`status`, `invite`, `health` and `config`: what a node is doing and how it is set up."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.cli import local_api
from swarmnode.cli.errors import UserError
from swarmnode.cli.options import DEFAULT_DATA, Data
from swarmnode.config import load_config, to_toml
from swarmnode.data_directory import DataDirectory
from swarmnode.runtime.transfer import transfer_text

console = Console(highlight=False)


def invite(data: Data = DEFAULT_DATA) -> None:
    """Print the invite that lets others join this node's run."""
    text = local_api.state(DataDirectory(data))["node"]["invite"]
    if text is None:
        raise UserError(
            "this node has no address that others can dial yet; see network.announce in its run.toml"
        )
    typer.echo(text)


def health(data: Data = DEFAULT_DATA) -> None:
    """Exit 0 if the node of this data directory answers."""
    directory = DataDirectory(data)
    address = local_api.read_address(directory)
    if address is None:
        raise UserError(f"no node is running in {directory.root}")
    local_api.get(address, "/healthz")
    typer.echo("ok")


def config(
    data: Data = DEFAULT_DATA,
    file: Annotated[Path | None, typer.Option("--config", help="Check this file instead.")] = None,
) -> None:
    """Print the resolved configuration, defaults included."""
    typer.echo(to_toml(load_config(file or DataDirectory(data).config_path)), nl=False)


def status(
    data: Data = DEFAULT_DATA,
    as_json: Annotated[bool, typer.Option("--json", help="The whole state as JSON.")] = False,
) -> None:
    """Who I am, in which run, version and lag, what was accepted last, what was refused and why."""
    state = local_api.state(DataDirectory(data))
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    console.print(_facts(state))
    console.print(_nodes(state))


def _facts(state: dict[str, Any]) -> Table:
    node, run, policy, mine = state["node"], state["run"], state["policy"], state["my_contribution"]
    table = Table(show_header=False, box=None, pad_edge=False)

    def row(label: str, text: str) -> None:
        table.add_row(Text(label, style="bold"), Text(text))

    row("I am", f"{node['name']} ({node['role']}), key {node['key'][:16]}…, data in {node['data_dir']}")
    row("run", f"{run['name']} {run['id'][:12]} · {run['preset']}, {run['mode']} · model {run['model']}")
    if policy is not None:
        row("version", f"{policy['version']}, swarm at {policy['swarm_version']}, lag {policy['lag']}")
    if state["transfer"] is not None:
        row("fetching", transfer_text(state["transfer"]))
    if state["learner"] is not None:
        learner = state["learner"]
        row(
            "learner",
            f"{learner['state']} · {learner['updates']} updates · held-out accuracy {_accuracy(learner)}",
        )
    row(
        "my groups",
        f"{mine['accepted']} accepted{_ago(mine['last_accepted_s'])} · refused: {_reasons(mine['refused'])}",
    )
    if mine["last_refusal"]:
        row("last refusal", mine["last_refusal"])
    groups = state["groups"]
    row(
        "received",
        f"{groups['accepted']} accepted, {groups['consumed']} trained on, {groups['waiting']} waiting, "
        f"{groups['stale']} went stale · refused: {_reasons(state['refused'])}",
    )
    return table


def _accuracy(learner: dict[str, Any]) -> str:
    parts = [learner["eval_before"], learner["eval_after"]]
    return " → ".join("not measured" if value is None else f"{value:.3f}" for value in parts)


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f" (last {seconds:.0f} s ago)"


def _reasons(refused: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items())) or "nothing"


def _nodes(state: dict[str, Any]) -> Table:
    table = Table(title="nodes")
    for column in ("name", "role", "state", "version", "lag", "groups/min", "accepted", "refused"):
        table.add_column(column, justify="left" if column in ("name", "role", "state") else "right")
    for node in state["nodes"]:
        name = f"{node['name']} (me)" if node["self"] else node["name"]
        gone = f"gone {node['last_seen_s']:.0f} s" if node["state"] == "gone" else node["state"]
        version = "" if node["version"] is None else str(node["version"])
        lag = "" if node["lag"] is None else str(node["lag"])
        cells = [name, node["role"], gone, version, lag, f"{node['groups_per_min']:.0f}"]
        table.add_row(*(Text(cell) for cell in [*cells, str(node["accepted"]), str(node["refused"])]))
    return table
