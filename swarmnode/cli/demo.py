"""`demo`: a swarm on this machine from one command, with a live page."""

import json
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarmnode.cli.errors import UserError

console = Console(highlight=False, soft_wrap=True)

FINAL_EVALUATION_S = 25.0
"""Time kept at the end for the last update, the final evaluation and an orderly stop."""
STOP_S = 8.0
LINE_EVERY_S = 15.0


def demo(
    preset: Annotated[
        str,
        typer.Option(help="fleet: 1 relay, 1 learner, 2 workers; swarm: 3 peers, each with its own policy."),
    ] = "fleet",
    mode: Annotated[str, typer.Option(help="async, or sequential (no staleness).")] = "async",
    model: Annotated[
        str, typer.Option(help="'tiny' (shipped), a Hugging Face folder, or a hub id.")
    ] = "tiny",
    minutes: Annotated[
        float | None, typer.Option(help="End after this long, with a final evaluation; else at Ctrl-C.")
    ] = None,
    headless: Annotated[bool, typer.Option(help="Plain lines instead of a live table.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write what was measured to this file.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the nodes keep their data; default below ~/.swarmnode/demo.")
    ] = None,
    port: Annotated[int, typer.Option(help="The page's port; 0 takes a free one.")] = 8642,
    seed: Annotated[int, typer.Option(help="Seed of the learners' random numbers.")] = 0,
    updates: Annotated[int | None, typer.Option(help="End after this many updates of every learner.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest completion; default by model.")] = None,
    eval_prompts: Annotated[
        int | None,
        typer.Option(help="Held-out tasks per evaluation; the final one takes four times as many."),
    ] = None,
    local_groups: Annotated[int | None, typer.Option(help="Groups of its own policy per update.")] = None,
) -> None:
    """Start a swarm on this machine and watch it learn."""
    from swarmnode.cli.run_commands import _port_taken
    from swarmnode.demo.layout import free_ports, lay_out
    from swarmnode.demo.processes import DemoProcesses

    if minutes is not None and minutes * 60 < FINAL_EVALUATION_S + 20:
        raise UserError(f"--minutes {minutes}: a swarm needs at least 0.75 minutes to start, learn and stop")
    if port and _port_taken(port):
        raise UserError(
            f"port {port} on 127.0.0.1 is in use; stop what listens there or choose another with --port"
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: the folder does not exist; make it first")
    started = time.monotonic()
    deadline = None if minutes is None else started + minutes * 60
    root = data or Path("~/.swarmnode/demo").expanduser() / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    overrides = {"max_new_tokens": max_new_tokens, "local_groups": local_groups}
    learner = {"max_updates": updates, "eval_prompts": eval_prompts}
    swarm = lay_out(
        root,
        preset=preset,
        mode=mode,
        model=model,
        seed=seed,
        page_port=port or free_ports(1)[0],
        run_overrides={key: value for key, value in overrides.items() if value is not None},
        learner_overrides={key: value for key, value in learner.items() if value is not None},
    )
    console.print(f"Data of this demo: {root.resolve()}")
    console.print(f"Live page: http://127.0.0.1:{swarm.nodes[0].api_port}")
    console.print(f"Join from another terminal: swarmnode join {swarm.invite} --data ~/.swarmnode/guest\n")
    interrupted = _catch_signals()
    processes = DemoProcesses(swarm)
    try:
        _watch(processes, deadline, headless, interrupted)
    finally:
        states = processes.states()
        bad = processes.stop()
    wall_s = time.monotonic() - started
    from swarmnode.demo.report import summarize

    result = summarize(preset, [node.name for node in swarm.nodes], states, wall_s)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _print_result(result)
    if bad:
        raise UserError(f"some nodes did not stop cleanly: {', '.join(bad)}")


def _catch_signals() -> list[int]:
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: received.append(caught))
    return received


def _watch(processes: Any, deadline: float | None, headless: bool, interrupted: list[int]) -> None:
    finishing = False
    next_line = 0.0
    live = None if headless else Live(console=console, refresh_per_second=4)
    if live is not None:
        live.start()
    started = time.monotonic()
    try:
        while not interrupted:
            states = processes.states()
            processes.raise_if_dead_at_start()
            now = time.monotonic()
            if live is not None:
                live.update(_picture(processes, states, started, deadline))
            elif now >= next_line:
                console.print(_line(states, now - started))
                next_line = now + LINE_EVERY_S
            learners = [
                state["learner"] for state in states if state is not None and state["learner"] is not None
            ]
            out_of_time = deadline is not None and now >= deadline - FINAL_EVALUATION_S
            if out_of_time and not finishing:
                processes.finish_training()
                finishing = True
            if learners and all(one["final"] for one in learners):
                return
            if deadline is not None and now >= deadline - STOP_S:
                return
            time.sleep(0.5)
    finally:
        if live is not None:
            live.stop()


def _headline(state: dict[str, Any] | None) -> str:
    if state is None or state["learner"] is None:
        return "starting"
    learner, groups = state["learner"], state["groups"]
    before, after = learner["eval_before"], learner["eval_after"]
    accuracy = "not measured yet"
    if before is not None:
        accuracy = f"{before:.2f}" + ("" if after is None else f" → {after:.2f}")
    return (
        f"{learner['state']} · {learner['updates']} updates · held-out accuracy {accuracy} · "
        f"{groups['accepted']} groups accepted, {sum(state['refused'].values())} refused"
    )


def _line(states: list[dict[str, Any] | None], elapsed_s: float) -> str:
    return f"{elapsed_s:5.0f} s  {_headline(states[0])}"


def _picture(
    processes: Any, states: list[dict[str, Any] | None], started: float, deadline: float | None
) -> Group:
    table = Table(expand=False)
    for column in ("node", "role", "state", "version", "lag", "groups/min", "reward", "accuracy", "memory"):
        table.add_column(column, justify="left" if column in ("node", "role", "state") else "right")
    for process, state in zip(processes.nodes, states, strict=True):
        if state is None:
            table.add_row(process.node.name, process.node.role, "starting" if process.running else "ended")
            continue
        me = next(node for node in state["nodes"] if node["self"])
        alive = "running" if process.running else f"ended ({process.process.returncode})"
        learner = state["learner"]
        accuracy = None if learner is None else (learner["eval_after"] or learner["eval_before"])
        table.add_row(
            process.node.name,
            process.node.role,
            alive,
            "" if me["version"] is None else str(me["version"]),
            "" if me["lag"] is None else str(me["lag"]),
            f"{me['groups_per_min']:.0f}",
            "" if me["reward"] is None else f"{me['reward']:.2f}",
            "" if accuracy is None else f"{accuracy:.2f}",
            f"{me['rss_mb']:.0f} MB",
        )
    parts: list[Any] = [table, Text(_headline(states[0]))]
    if deadline is not None:
        parts.append(ProgressBar(total=deadline - started, completed=time.monotonic() - started, width=60))
    else:
        parts.append(Text("Ctrl-C stops the swarm", style="dim"))
    return Group(*parts)


def _print_result(result: dict[str, Any]) -> None:
    before, after = result["eval_before"], result["eval_after"]
    if before is not None and after is not None:
        console.print(
            f"Held-out accuracy {before:.3f} → {after:.3f} in {result['updates']} updates, "
            f"{result['wall_s']:.0f} s"
        )
    console.print(
        f"{result['published_versions']} versions published, {result['accepted_groups']} groups accepted, "
        f"refused: {result['refused'] or 'none'}, "
        f"largest staleness trained on: {result['max_staleness_seen']}"
    )
