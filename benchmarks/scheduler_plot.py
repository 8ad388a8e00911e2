"""The picture of the scheduler's benchmark: predictions against simulated fleets, and what policies cost."""

from pathlib import Path
from typing import Any

GREEN, GREY, AMBER = "#2a7f62", "#b0b0b0", "#e0a030"


def plot(path: Path, results: dict[str, Any]) -> None:
    """Write the picture of the parts that were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    _draw_prediction(left, results)
    _draw_costs(middle, results)
    _draw_policies(right, results)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_prediction(axes: Any, results: dict[str, Any]) -> None:
    rows = results.get("below", {}).get("rows", [])
    axes.plot([0.4, 1], [0.4, 1], color="black", linewidth=1)
    axes.fill_between([0.4, 1], [0.35, 0.95], [0.45, 1.05], color=GREY, alpha=0.4, label="5 points")
    axes.scatter([row["predicted"] for row in rows], [row["utilization"] for row in rows], s=14, color=GREEN)
    axes.set_xlabel("learner utilization, predicted")
    axes.set_ylabel("simulated")
    axes.set_title("Below the rule")
    axes.legend(fontsize=8)


def _draw_costs(axes: Any, results: dict[str, Any]) -> None:
    rows = results.get("cost", {}).get("planned", [])
    split = [row["generating_per_training"] for row in rows]
    axes.plot(
        split, [row["central_per_update"] for row in rows], "o-", color=GREY, label="one data centre, H100"
    )
    axes.plot(
        split, [row["swarm_per_update"] for row in rows], "o-", color=GREEN, label="the market, planned"
    )
    axes.plot(
        split, [row["learner_per_update"] for row in rows], ":", color="black", label="the learner's part"
    )
    axes.set_xlabel("GPUs that generate per GPU that trains (data centre)")
    axes.set_ylabel("$ per update")
    axes.set_ylim(bottom=0)
    axes.set_title("Same throughput")
    axes.legend(fontsize=8)


def _draw_policies(axes: Any, results: dict[str, Any]) -> None:
    outcomes = results.get("policies", {}).get("outcomes", {})
    names = list(outcomes)
    costs = [outcomes[name]["per_update"] for name in names]
    colors = [GREEN if name == "plan" else GREY for name in names]
    axes.bar([name.replace("_", "\n") for name in names], costs, color=colors)
    for index, name in enumerate(names):
        axes.text(
            index, costs[index], f"{outcomes[name]['utilization']:.3f}", ha="center", va="bottom", fontsize=8
        )
    axes.set_ylabel("$ per update (utilization above)")
    axes.set_title("20 % of the machines leave per hour")
