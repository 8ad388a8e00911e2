"""`plan`: which offers would work for a run, and what that costs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from swarmnode.cli.errors import UserError
from swarmnode.cli.quiet_solver import quiet_solver

console = Console(highlight=False)

OTHER_BOUNDS = (2, 3, 4, 6, 8, 11, 16)
OTHER_BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


def plan(
    offers: Annotated[
        Path, typer.Argument(help="CSV of offers; docs/examples/offers.csv shows the columns.")
    ],
    groups: Annotated[int, typer.Option(help="Groups per update (R).")] = 128,
    train_seconds: Annotated[float, typer.Option(help="Time of one update (T_train).")] = 60.0,
    staleness: Annotated[int, typer.Option(help="Largest staleness of a group that is trained on (S).")] = 6,
    publish_every: Annotated[
        int | None, typer.Option(help="Updates between published versions (κ); default max(1, S − 1).")
    ] = None,
    form: Annotated[
        str, typer.Option(help="conservative: workers stop while they fetch weights; or overlapped.")
    ] = "conservative",
    group_size: Annotated[int, typer.Option(help="Completions per group.")] = 8,
    completion_tokens: Annotated[float, typer.Option(help="Mean tokens of a completion.")] = 1000.0,
    version_mb: Annotated[float, typer.Option(help="Megabytes of one published version.")] = 500.0,
    source_mbps: Annotated[float, typer.Option(help="The learner's uplink, megabits per second.")] = 1000.0,
    load_seconds: Annotated[float, typer.Option(help="From having a version to generating with it.")] = 2.0,
    learner_price: Annotated[float, typer.Option(help="Dollars per hour of the learner itself.")] = 0.0,
    budget: Annotated[float | None, typer.Option(help="Most dollars per hour for workers.")] = None,
    owner_share: Annotated[float, typer.Option(help="Most of the capacity that one owner may have.")] = 1.0,
    shortfall: Annotated[
        float, typer.Option(help="Most probability that capacity is short before someone is replaced.")
    ] = 0.05,
    region_mbps: Annotated[
        list[str] | None, typer.Option(help="A region's link, as NAME=MBPS; may be repeated.")
    ] = None,
    memory_gb: Annotated[float, typer.Option(help="Least memory of a worker.")] = 0.0,
    everyone: Annotated[bool, typer.Option("--all", help="List every offer.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw market and sensitivities into this file.")] = None,
) -> None:
    """Choose the cheapest workers that keep the learner busy."""
    from swarmnode.cli.plan_tables import as_json, print_plan, print_sensitivity
    from swarmnode.scheduler.capacity import Demand
    from swarmnode.scheduler.offers_csv import OffersError, read_offers
    from swarmnode.scheduler.planning import (
        Run,
        plan_rows,
        sensitivity_to_bandwidth,
        sensitivity_to_staleness,
    )
    from swarmnode.scheduler.settings import PlanSettings

    if form not in ("conservative", "overlapped"):
        raise UserError(f"--form {form}: there are two, conservative and overlapped")
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{file}: the folder does not exist; make it first")
    if plot is not None:
        from swarmnode.cli.plan_plot import load_pyplot, plot_plan

        load_pyplot()
    try:
        rows = read_offers(offers)
        demand = Demand(groups, train_seconds, staleness, publish_every, form)  # type: ignore[arg-type]
        settings = PlanSettings(
            shortfall_probability=shortfall,
            owner_share=owner_share,
            region_mbps=_regions(region_mbps or []),
            budget_per_hour=float("inf") if budget is None else budget,
            least_memory_gb=memory_gb,
        )
    except OffersError as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        raise UserError(f"these options do not fit: {error}") from error
    run = Run(
        demand,
        group_size=group_size,
        completion_tokens=completion_tokens,
        version_bytes=version_mb * 1e6,
        source_upload_mbps=source_mbps,
        load_s=load_seconds,
        learner_price_per_hour=learner_price,
    )
    with quiet_solver():
        planned = plan_rows(rows, run, settings)
        by_staleness = sensitivity_to_staleness(rows, run, settings, OTHER_BOUNDS)
        by_bandwidth = sensitivity_to_bandwidth(rows, run, settings, OTHER_BANDWIDTHS)
    print_plan(console, planned, run, everyone=everyone)
    print_sensitivity(console, by_staleness, by_bandwidth)
    if json_file is not None:
        content = as_json(planned, run)
        content["if_staleness"] = {
            str(bound): as_json(one, run) | {"workers": None} for bound, one in by_staleness
        }
        content["if_bandwidth"] = {
            str(factor): as_json(one, run) | {"workers": None} for factor, one in by_bandwidth
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot_plan(plot, planned, run, by_staleness, by_bandwidth)
        console.print(f"Plot: {plot}")


def _regions(texts: list[str]) -> dict[str, float]:
    regions = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        try:
            regions[name] = float(value)
        except ValueError:
            separator = ""
        if not separator or not name or regions[name] < 0:
            raise UserError(f"--region-mbps {text}: write NAME=MBPS, for example eu=2000")
    return regions
