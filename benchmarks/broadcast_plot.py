"""The pictures of the broadcast benchmark."""

from pathlib import Path
from typing import Any

NAMES = {"swarmnode": "swarmnode", "libtorrent": "libtorrent", "http": "one-to-all (HTTP)"}
COLOURS = {"swarmnode": "#0b6e4f", "libtorrent": "#c8553d", "http": "#5b6770"}
EQUAL = ("n4", "n8", "n16")


def plot(rows: dict[str, Any], folder: Path) -> None:
    """Draw broadcast.png (time against N) and broadcast-rows.png (every row over its limit) into `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    _plot_peers(rows, folder / "broadcast.png")
    _plot_rows(rows, folder / "broadcast-rows.png")


def _plot_peers(rows: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for system, label in NAMES.items():
        points = [
            (rows[name]["peers"], rows[name]["systems"][system]["last_s"])
            for name in EQUAL
            if "last_s" in rows.get(name, {}).get("systems", {}).get(system, {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=COLOURS[system])
    limits = [(rows[name]["peers"], rows[name]["fluid_limit_s"]) for name in EQUAL if name in rows]
    if limits:
        axes.plot(*zip(*limits, strict=True), linestyle="--", color="black", label="fluid limit", linewidth=1)
    axes.set(xlabel="peers", ylabel="last peer has the file after, s", ylim=(0, None), xticks=[4, 8, 16])
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)


def _plot_rows(rows: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    shown = [name for name in rows if rows[name]["systems"]]
    width = 0.38
    for offset, system in ((-width / 2, "swarmnode"), (width / 2, "libtorrent")):
        found = [
            (x + offset, rows[name]["systems"][system]["last_over_limit"])
            for x, name in enumerate(shown)
            if "last_s" in rows[name]["systems"].get(system, {})
        ]
        if found:
            places, heights = zip(*found, strict=True)
            bars = axes.bar(places, heights, width=width, color=COLOURS[system], label=NAMES[system])
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    for x, name in enumerate(shown):
        label = "bar for swarmnode" if x == 0 else ""
        axes.hlines(rows[name]["bar"], x - width, x, colors="black", linewidth=1.5, label=label)
    axes.set(
        ylabel="last peer, over the fluid limit", xticks=range(len(shown)), xticklabels=shown, ylim=(0, None)
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
