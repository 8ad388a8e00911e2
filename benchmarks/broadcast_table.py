"""The tables of the broadcast benchmark."""

from typing import Any

from benchmarks.report import table

_BROADCAST = ("row", "system", "limit s", "last ×", "median ×", "bar", "source sent ×S", "CPU s")
_MACHINE = ("machine busy", "peer +MB", "bit-exact")
_CONTROL = ("row", "uplink Mbit/s", "used", "way", "calls", "failed", "idle s", "median s", "p99 s", "bar s")


def broadcast_table(rows: dict[str, Any]) -> str:
    """Times over the fluid limit, and what they cost."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        limit = f"{row['fluid_limit_s']:.1f}"
        if "useful_limit_s" in row:
            limit += f" ({row['useful_limit_s']:.1f} useful)"
        for system, figures in row["systems"].items():
            lines.append(
                [name, system, limit, *_cells(figures, row["bar"] if system == "swarmnode" else None)]
            )
    return table((*_BROADCAST, *_MACHINE), lines)


def _cells(figures: dict[str, Any], bar: float | None) -> list[str]:
    if "failed" in figures:
        return ["failed", *[""] * (len(_BROADCAST) + len(_MACHINE) - 4)]
    return [
        f"{figures['last_over_limit']:.3f}",
        f"{figures['median_over_limit']:.3f}",
        "" if bar is None else f"{bar:.2f}",
        f"{figures['source_sent_over_size']:.2f}",
        f"{figures['cpu_s']:.1f}",
        f"{figures['machine_busy']:.0%}",
        f"{figures['peer_memory_growth_mb']:.0f}",
        "yes" if figures["bit_exact"] else "NO",
    ]


def control_table(rows: dict[str, Any]) -> str:
    """Round trips of calls to and from a node whose uplink is full."""
    lines = [
        [
            name,
            f"{row['up_mbit']:g}",
            f"{row['uplink_used']:.0%}",
            way,
            str(row[key]["calls"]),
            str(row[key]["failed"]),
            f"{row['idle']['median_s']:.3f}",
            f"{row[key]['median_s']:.3f}",
            f"{row[key]['p99_s']:.3f}",
            f"{row['bar_s']:.1f}",
        ]
        for name, row in rows.items()
        for way, key in (("to it", "calls_to_loaded"), ("from it", "calls_from_loaded"))
    ]
    return table(_CONTROL, lines)
