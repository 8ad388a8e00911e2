"""The plot of `swarmnode plan --plot FILE`: the market, and what S and bandwidth do to the cost."""

from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.cli.errors import UserError
from swarmnode.scheduler.planning import Planned, Run

MARKET_SHOWN = 4.0
"""Of the market, this many times the need is drawn."""


def load_pyplot() -> Any:
    """matplotlib.pyplot without a screen. Raises `UserError` where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_plan(
    path: Path,
    planned: Planned,
    run: Run,
    by_staleness: list[tuple[int, Planned]],
    by_bandwidth: list[tuple[float, Planned]],
) -> None:
    """Write the picture."""
    pyplot = load_pyplot()
    figure, (market, staleness, bandwidth) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    _draw_market(market, planned)
    _draw_costs(staleness, [(float(bound), one) for bound, one in by_staleness], "staleness bound S")
    staleness.axvline(run.demand.max_staleness, color="0.6", linewidth=1, linestyle=":")
    _draw_costs(bandwidth, by_bandwidth, "bandwidth of all links, × today's")
    bandwidth.set_xscale("log", base=2)
    bandwidth.set_xticks(
        [factor for factor, _ in by_bandwidth], [f"{factor:g}" for factor, _ in by_bandwidth]
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_market(axes: Any, planned: Planned) -> None:
    """Offers by cost per group, as steps: height is the price, width the rate."""
    active, spares = set(planned.plan.active), set(planned.plan.spares)
    offers = [offer for offer in planned.offers if offer.timing.groups_per_s > 0]
    order = {True: 0, False: 1}
    offers.sort(
        key=lambda offer: (
            round(offer.price_per_hour / offer.timing.groups_per_s, 6),
            order[offer.worker in active],
            order[offer.worker in spares],
        )
    )
    rate = np.array([60 * offer.timing.groups_per_s for offer in offers])
    price = np.array([offer.price_per_hour / (3.6 * offer.timing.groups_per_s) for offer in offers])
    left = np.concatenate([[0.0], np.cumsum(rate)[:-1]])
    for state, color in (("active", "#2a7f62"), ("warm standby", "#e0a030"), ("not used", "#c8c8c8")):
        chosen = np.array(
            [
                (offer.worker in active, offer.worker in spares)
                == (state == "active", state == "warm standby")
                for offer in offers
            ],
            dtype=bool,
        )
        axes.bar(
            left[chosen], price[chosen], rate[chosen], align="edge", color=color, label=state, linewidth=0
        )
    if planned.plan.assessment.feasible:
        need = 60 * planned.plan.assessment.required_rate
        axes.axvline(need, color="black", linewidth=1, label="need")
        axes.set_xlim(0, min(float(rate.sum()), MARKET_SHOWN * need))
    axes.set_xlabel("groups per minute, cheapest first")
    axes.set_ylabel("$ per 1,000 groups")
    axes.legend(fontsize=8)


def _draw_costs(axes: Any, planned: list[tuple[float, Planned]], label: str) -> None:
    enough = [(x, one) for x, one in planned if one.plan.is_enough]
    short = [(x, one) for x, one in planned if not one.plan.is_enough]
    axes.plot(
        [x for x, _ in enough], [one.economics.dollars_per_update for _, one in enough], "o-", color="#2a7f62"
    )
    if short:
        floor = min((one.economics.dollars_per_update for _, one in enough), default=0.0)
        axes.plot([x for x, _ in short], [floor] * len(short), "x", color="#b03030", label="not enough")
        axes.legend(fontsize=8)
    axes.set_xlabel(label)
    axes.set_ylabel("$ per update")
    highest = max((one.economics.dollars_per_update for _, one in enough), default=1.0)
    axes.set_ylim(0, 1.15 * highest)
