"""What every benchmark's result has in common: machine facts, a JSON file, a table for people."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """What a figure depends on beside the code: processor, cores, memory, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def write_report(path: Path, benchmark: str, results: dict[str, Any]) -> None:
    """The JSON file of a benchmark: its name, the command that made it, machine facts, results."""
    command = f"python -m benchmarks.{benchmark} {' '.join(sys.argv[1:])}"
    content = {"benchmark": benchmark, "command": command, "machine": machine_facts(), **results}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns padded so that a terminal shows it well too."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def _processor() -> str:
    for row in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if row.startswith("model name"):
            return row.split(":", 1)[1].strip()
    return platform.machine()
