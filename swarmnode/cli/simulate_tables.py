"""What `swarmnode simulate` shows."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 40


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The figures of a report, and its staleness histogram."""
    table = Table(title=f"{report['scenario']}, seed {report['seed']}", show_header=False)
    rows = _fleet(report) if report["kind"] == "fleet" else _swarm(report)
    for label, text in rows:
        table.add_row(Text(label, style="bold"), Text(text))
    console.print(table)
    console.print(_staleness(report["staleness"]))


def _fleet(report: dict[str, Any]) -> list[tuple[str, str]]:
    groups, cost, activation = report["groups"], report["cost"], report["activation"]
    capacity = report["capacity"]
    refused = ", ".join(f"{reason} {count}" for reason, count in groups["refused"].items()) or "none"
    return [
        ("policy", report["policy"]),
        ("learner trains", f"{100 * report['utilization']:.1f} % of the time"),
        ("updates", f"{report['updates']}, {report['updates_per_min']:.3f} per minute"),
        (
            "capacity",
            f"{60 * capacity['active_groups_per_s']:.1f} groups/min "
            f"of {capacity['mean_active']:.1f} workers, "
            f"{100 * capacity['over_rule']:.1f} % of the rule",
        ),
        (
            "groups",
            f"{groups['finished']} made, {groups['accepted']} accepted, {groups['consumed']} trained on, "
            f"{groups['stale_in_queue']} went stale in the queue, "
            f"{groups['lost_with_their_worker']} lost with their worker",
        ),
        ("refused", refused),
        ("wasted", f"{100 * report['waste']:.2f} % of the groups"),
        ("mean staleness", f"{report['mean_staleness']:.2f}"),
        ("moving data took", f"{100 * report['transfer_share']:.2f} % of the workers' time"),
        (
            "cost",
            f"${cost['per_hour']:.2f} per hour, {_dollars(cost['per_update'])} per update, "
            f"{_dollars(cost['per_million_tokens'])} per million tokens",
        ),
        (
            "activation",
            f"{activation['plans']} plans, {activation['activations']} activations "
            f"({activation['of_cold_workers']} of cold workers), {activation['stood_in']} stood in; "
            f"{activation['departures']} left, {activation['joins']} came",
        ),
        (
            "cheats",
            f"{activation['excluded_cheats']} of {activation['cheats']} excluded, "
            f"{activation['excluded_honest']} honest ones too; "
            f"{groups['from_cheats_consumed']} of their groups trained on",
        ),
        ("weights sent", f"{report['weights_gigabytes']:.1f} GB"),
    ]


def _swarm(report: dict[str, Any]) -> list[tuple[str, str]]:
    groups, authors, network = report["groups"], report["authors"], report["network"]
    return [
        ("nodes present", f"{report['mean_present']:.0f} on average"),
        ("learners train", f"{100 * report['utilization']:.1f} % of the time"),
        ("updates", f"{report['updates']}, {report['updates_per_node_per_hour']:.1f} per node and hour"),
        (
            "others' groups",
            f"{report['external_per_update']:.2f} per update "
            f"of {report['external_wanted_per_update']} wanted; "
            f"{groups['pulled']} pulled, {groups['pulled_no_advantage']} of them taught nothing, "
            f"{groups['not_found']} were gone",
        ),
        ("own groups", f"{groups['generated']} made, {groups['local_consumed']} trained on"),
        ("mean staleness", f"{report['mean_staleness']:.2f}"),
        (
            "authors",
            f"{authors['used']} learned from, as even as {authors['effective']:.0f} equal ones",
        ),
        (
            "network",
            f"{network['announcements_per_s']:.1f} announcements per second in all, "
            f"{network['pulled_kilobytes_per_node_per_s']:.2f} kB/s pulled per node",
        ),
        ("churn", f"{report['churn']['departures']} left, {report['churn']['joins']} came"),
    ]


def _staleness(histogram: dict[str, int]) -> Table:
    table = Table(title="staleness of groups trained on")
    table.add_column("behind", justify="right")
    table.add_column("groups", justify="right")
    table.add_column("")
    most = max(histogram.values(), default=1)
    for lag, count in histogram.items():
        table.add_row(lag, str(count), "█" * round(BAR_WIDTH * count / most))
    return table


def _dollars(value: float | None) -> str:
    return "nothing" if value is None else f"${value:.4g}"
