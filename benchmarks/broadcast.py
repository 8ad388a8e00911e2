"""One file from one node to N: this project, plain HTTP, BitTorrent, over the same capped links.

    python -m benchmarks.broadcast --json build/broadcast.json [--quick] [--rows NAME ...]

Every node is a process in a network namespace of its own (`benchmarks.netlab`; needs root on Linux). A row is
a number of peers with their links; every system gives the same file over the same laboratory, one after the
other, all peers starting at once. Times are over the fluid limit, the least time that the links allow,
computed from what one plain TCP stream carries through each of them, measured just before.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.broadcast_http import run_http
from benchmarks.broadcast_swarmnode import run_node
from benchmarks.broadcast_system import Outcome, SharedFile, broadcast, make_file
from benchmarks.broadcast_torrent import run_torrent
from benchmarks.lab_process import Work
from benchmarks.link_rates import Rates, fluid_limit_s, measure_rates
from benchmarks.namespaces import LabError
from benchmarks.netlab import Lab, Link
from benchmarks.report import table, write_report

SYSTEMS: dict[str, Work] = {"swarmnode": run_node, "http": run_http, "libtorrent": run_torrent}
DOWN_PER_UP = 4.0
KILL_AT = 0.5
"""Of the fluid limit: when the peers that are to be lost are killed."""


@dataclass(frozen=True)
class Row:
    """N peers and a source with their links."""

    peers: int
    bar: float
    """The acceptance bar: last peer over the fluid limit."""
    uplinks: tuple[float, ...] = (1.0,)
    """Relative uplinks, given to the peers in turn; the source has 1."""
    round_trip_ms: float = 0.0
    faults: Mapping[int, str] = field(default_factory=dict)

    def links(self, up_mbit: float) -> list[Link]:
        mean = sum(self.uplinks) / len(self.uplinks)
        shares = [1.0, *(self.uplinks[i % len(self.uplinks)] / mean for i in range(self.peers))]
        down = up_mbit * DOWN_PER_UP
        return [Link(up_mbit * share, down, self.round_trip_ms / 2) for share in shares]


ROWS = {
    "n4": Row(4, 1.10),
    "n8": Row(8, 1.15),
    "n16": Row(16, 1.25),
    "mixed": Row(8, 1.30, uplinks=(1, 2, 4, 8)),
    "rtt": Row(8, 1.35, round_trip_ms=100),
    "faults": Row(8, 1.40, faults={2: "corrupt", 4: "killed", 5: "stalling", 7: "killed"}),
}


def main() -> None:
    arguments = _arguments()
    size_bytes = int(arguments.size_mib * 2**20)
    results: dict[str, Any] = {}
    for name in arguments.rows:
        results[name] = _run_row(
            name, ROWS[name], size_bytes, arguments.chunk_kib * 1024, arguments.up_mbit, arguments.systems
        )
        print(_table(results), flush=True)
    if arguments.json:
        settings = {
            "size_mib": arguments.size_mib,
            "chunk_kib": arguments.chunk_kib,
            "up_mbit": arguments.up_mbit,
        }
        write_report(arguments.json, "broadcast", {**settings, "rows": results})


def _run_row(
    name: str, row: Row, size_bytes: int, chunk_size: int, up_mbit: float, systems: list[str]
) -> dict[str, Any]:
    with Lab(row.links(up_mbit)) as lab:
        file = make_file(lab.directory / "file", size_bytes, chunk_size)
        _progress(f"{name}: measuring the links")
        rates = measure_rates(lab)
        limit_s = fluid_limit_s(size_bytes, rates[0].up, rates[1:])
        result: dict[str, Any] = {
            "peers": row.peers,
            "bar": row.bar,
            "rates_bytes_per_s": [asdict(rate) for rate in rates],
            "fluid_limit_s": limit_s,
            "systems": {},
        }
        if row.faults:
            result["faults"] = {str(number): fault for number, fault in row.faults.items()}
            result["useful_limit_s"] = _useful_limit_s(row, size_bytes, rates)
        for system in systems:
            _progress(f"{name}: {system}, fluid limit {limit_s:.1f} s")
            try:
                outcome = broadcast(
                    lab,
                    system,
                    SYSTEMS[system],
                    file,
                    faults=row.faults,
                    kill_after_s=KILL_AT * limit_s,
                    timeout_s=60 + 6 * limit_s,
                )
            except LabError as error:
                _progress(f"{name}: {system} FAILED: {error}")
                result["systems"][system] = {"failed": str(error)}
                continue
            result["systems"][system] = _summary(outcome, limit_s, file)
    return result


def _useful_limit_s(row: Row, size_bytes: int, rates: list[Rates]) -> float:
    """The limit for those that are not killed, with the uplinks of those that serve well all the time."""
    alive = [i for i in range(1, row.peers + 1) if row.faults.get(i) != "killed"]
    honest = [i for i in alive if i not in row.faults]
    up = rates[0].up + sum(rates[i].up for i in honest)
    fluid_s = fluid_limit_s(size_bytes, rates[0].up, [rates[i] for i in alive])
    return max(fluid_s, len(alive) * size_bytes / up)


def _summary(outcome: Outcome, limit_s: float, file: SharedFile) -> dict[str, Any]:
    return {
        "last_s": outcome.last_s,
        "median_s": outcome.median_s,
        "last_over_limit": outcome.last_s / limit_s,
        "median_over_limit": outcome.median_s / limit_s,
        "source_sent_over_size": outcome.source_sent_bytes / file.size_bytes,
        "cpu_s": outcome.cpu_s,
        "machine_busy": outcome.busy,
        "peer_memory_growth_mb": outcome.peer_growth_mb,
        "bit_exact": outcome.bit_exact,
        "seconds": {str(number): seconds for number, seconds in outcome.seconds.items()},
        "details": outcome.details,
    }


HEADER = (
    "row",
    "system",
    "limit s",
    "last ×",
    "median ×",
    "bar",
    "source sent ×S",
    "CPU s",
    "machine busy",
    "peer +MB",
    "bit-exact",
)


def _table(results: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for name, result in results.items():
        limit = f"{result['fluid_limit_s']:.1f}"
        if "useful_limit_s" in result:
            limit += f" ({result['useful_limit_s']:.1f} useful)"
        for system, figures in result["systems"].items():
            if "failed" in figures:
                rows.append([name, system, limit, "failed", *[""] * (len(HEADER) - 4)])
                continue
            rows.append(
                [
                    name,
                    system,
                    limit,
                    f"{figures['last_over_limit']:.3f}",
                    f"{figures['median_over_limit']:.3f}",
                    f"{result['bar']:.2f}",
                    f"{figures['source_sent_over_size']:.2f}",
                    f"{figures['cpu_s']:.1f}",
                    f"{figures['machine_busy']:.0%}",
                    f"{figures['peer_memory_growth_mb']:.0f}",
                    "yes" if figures["bit_exact"] else "NO",
                ]
            )
    return table(HEADER, rows)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument(
        "--quick", action="store_true", help="N = 4 and 8, 16 MiB, this project: about a minute"
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="default: all")
    parser.add_argument("--size-mib", type=float, help="the file's size, 64 by default")
    parser.add_argument(
        "--chunk-kib", type=int, default=1024, help="this project's chunks, %(default)s by default"
    )
    parser.add_argument("--up-mbit", type=float, default=10.0, help="the mean uplink, %(default)s by default")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (["n4", "n8"] if arguments.quick else list(ROWS))
    arguments.systems = arguments.systems or (["swarmnode"] if arguments.quick else list(SYSTEMS))
    arguments.size_mib = arguments.size_mib or (16.0 if arguments.quick else 64.0)
    return arguments


if __name__ == "__main__":
    main()
