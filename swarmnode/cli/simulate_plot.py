"""The plot of `swarmnode simulate --plot FILE`: time lines and staleness."""

from pathlib import Path
from typing import Any

from swarmnode.cli.plan_plot import load_pyplot

GREEN, GREY, RED, AMBER = "#2a7f62", "#909090", "#b03030", "#e0a030"


def plot_report(path: Path, report: dict[str, Any]) -> None:
    """Write the picture."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6.5), constrained_layout=True)
    figure.suptitle(f"{report['scenario']}, seed {report['seed']}")
    minutes = [time_s / 60 for time_s in report["timeline"]["time_s"]]
    if report["kind"] == "fleet":
        _draw_fleet(axes, minutes, report)
    else:
        _draw_swarm(axes, minutes, report)
    histogram = report["staleness"]
    axes[1][1].bar(list(histogram), list(histogram.values()), color=GREEN)
    axes[1][1].set_xlabel("staleness of groups trained on")
    for one in (axes[0][0], axes[0][1], axes[1][0]):
        one.set_xlabel("minutes")
        one.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_fleet(axes: Any, minutes: list[float], report: dict[str, Any]) -> None:
    line = report["timeline"]
    axes[0][0].plot(minutes, line["utilization"], color=GREEN)
    axes[0][0].set_ylabel("learner trains (share of time)")
    axes[0][1].plot(minutes, [60 * value for value in line["capacity"]], color=GREEN, label="active")
    need = 60 * report["capacity"]["rule_groups_per_s"]
    axes[0][1].axhline(need, color="black", linewidth=1, label="the rule")
    axes[0][1].set_ylabel("groups per minute")
    axes[0][1].legend(fontsize=8)
    axes[1][0].plot(minutes, line["active"], color=GREEN, label="active workers")
    axes[1][0].plot(minutes, line["waiting"], color=GREY, linewidth=0.8, label="groups waiting")
    axes[1][0].legend(fontsize=8)
    if any(line["cost_per_hour"]):
        dollars = axes[1][0].twinx()
        dollars.plot(minutes, line["cost_per_hour"], color=AMBER)
        dollars.set_ylabel("workers, $ per hour", color=AMBER)
        dollars.set_ylim(bottom=0)


def _draw_swarm(axes: Any, minutes: list[float], report: dict[str, Any]) -> None:
    line = report["timeline"]
    axes[0][0].plot(minutes, line["present"], color=GREY, label="present")
    axes[0][0].plot(minutes, line["training"], color=GREEN, label="training")
    axes[0][0].set_ylabel("nodes")
    axes[0][0].legend(fontsize=8)
    axes[0][1].plot(minutes, line["updates"], color=GREEN)
    axes[0][1].set_ylabel("updates of all nodes")
    axes[1][0].plot(minutes, line["pulled_gigabytes"], color=GREEN)
    axes[1][0].set_ylabel("groups pulled, GB")
