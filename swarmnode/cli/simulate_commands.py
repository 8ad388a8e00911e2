"""`simulate`: what a fleet or swarm would do and cost, on virtual time."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from swarmnode.cli.errors import UserError
from swarmnode.cli.quiet_solver import quiet_solver

console = Console(highlight=False)


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="A TOML file, or the name of a shipped scenario (see --list).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the scenario's.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="plan, or to compare with: everyone, cheapest, cheapest_per_group, random."),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Simulate for so long instead.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the shipped scenarios.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time lines and staleness into this file.")] = None,
) -> None:
    """Simulate a scenario with the node's own scheduler, staleness and credit rules."""
    from swarmnode.cli.simulate_tables import print_report
    from swarmnode.simulator.run import simulate as run_scenario
    from swarmnode.simulator.scenario import ScenarioError, load_scenario, parse_scenario, shipped_scenarios

    if show:
        for name in shipped_scenarios():
            console.print(f"[bold]{name}[/bold]: {load_scenario(name).about}")
        return
    if scenario is None:
        raise UserError("name a scenario: a TOML file, or one of swarmnode simulate --list")
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{file}: the folder does not exist; make it first")
    if plot is not None:
        from swarmnode.cli.plan_plot import load_pyplot
        from swarmnode.cli.simulate_plot import plot_report

        load_pyplot()
    try:
        values = load_scenario(scenario).model_dump()
        if seed is not None:
            values["seed"] = seed
        if policy is not None:
            values["plan"]["policy"] = policy
        if hours is not None:
            values["duration_s"] = 3600 * hours
        chosen = parse_scenario(values, scenario)
    except ScenarioError as error:
        raise UserError(str(error)) from error
    started = time.process_time()
    with quiet_solver():
        report = run_scenario(chosen)
    took_s = time.process_time() - started
    print_report(console, report)
    console.print(
        f"{report['simulated_s'] / 3600:g} h of {report['nodes']:,} nodes "
        f"in {took_s:.1f} s of processor time, {report['events']:,} events, invariants checked after each"
    )
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot_report(plot, report)
        console.print(f"Plot: {plot}")
