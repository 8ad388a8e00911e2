"""One file from one node to N: this project, plain HTTP, BitTorrent, over the same capped links.

    python -m benchmarks.broadcast --json build/broadcast.json --plot [--quick] [--rows NAME ...] [--resume]

Every node is a process in a network namespace of its own (`benchmarks.netlab`; needs root on Linux). A row is
a number of peers with their links; every system gives the same file over the same laboratory, one after the
other, all peers starting at once. Times are over the fluid limit, the least time that the links allow,
computed from what one plain TCP stream carries through each of them, measured just before. One-to-all takes
N copies' time and next to no processor: its rows are measured first, all at once, in a laboratory each.

The rows `control20` and `control1` are about something else: calls through an uplink that is full of chunks.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.broadcast_control import CONTROL_ROWS, run_control_row
from benchmarks.broadcast_http import run_http
from benchmarks.broadcast_plot import plot
from benchmarks.broadcast_swarmnode import run_node
from benchmarks.broadcast_system import Outcome, SharedFile, broadcast, make_file
from benchmarks.broadcast_table import broadcast_table, control_table
from benchmarks.broadcast_torrent import run_torrent
from benchmarks.lab_process import Work
from benchmarks.link_rates import Rates, fluid_limit_s, measure_rates
from benchmarks.namespaces import LabError
from benchmarks.netlab import Lab, Link
from benchmarks.report import write_report

SYSTEMS: dict[str, Work] = {"swarmnode": run_node, "libtorrent": run_torrent, "http": run_http}
DOWN_PER_UP = 4.0
KILL_AT = 0.5
"""Of the fluid limit: when the peers that are to be lost are killed."""


@dataclass(frozen=True)
class Row:
    """N peers and a source with their links."""

    peers: int
    bar: float
    """The acceptance bar: last peer over the fluid limit."""
    systems: tuple[str, ...] = ("swarmnode", "libtorrent")
    uplinks: tuple[float, ...] = (1.0,)
    """Relative uplinks, given to the peers in turn; the source has their mean."""
    round_trip_ms: float = 0.0
    faults: Mapping[int, str] = field(default_factory=dict)
    """Peers that do not do their part. Other systems suffer the "killed" ones only."""

    def links(self, up_mbit: float) -> list[Link]:
        mean = sum(self.uplinks) / len(self.uplinks)
        shares = [1.0, *(self.uplinks[i % len(self.uplinks)] / mean for i in range(self.peers))]
        return [Link(up_mbit * share, up_mbit * DOWN_PER_UP, self.round_trip_ms / 2) for share in shares]


ALL = tuple(SYSTEMS)
ROWS = {
    "n4": Row(4, 1.10, ALL),
    "n8": Row(8, 1.15, ALL),
    "n16": Row(16, 1.25, ALL),
    "mixed": Row(8, 1.30, uplinks=(1, 2, 4, 8)),
    "rtt": Row(8, 1.35, round_trip_ms=100),
    "faults": Row(8, 1.40, faults={2: "corrupt", 4: "killed", 5: "stalling", 7: "killed"}),
}


def main() -> None:
    arguments = _arguments()
    results = _Results(arguments)
    side_by_side = [
        name for name in arguments.rows if len(results.to_do(name)) > 1 and "http" in results.to_do(name)
    ]
    if side_by_side:
        results.add_http(side_by_side)
    for name in arguments.rows:
        if name in ROWS and results.to_do(name):
            _run_row(name, results)
        elif name in CONTROL_ROWS and name not in results.control:
            _progress(f"{name}: calls for {arguments.control_s:g} s")
            results.control[name] = run_control_row(
                CONTROL_ROWS[name], results.chunk_size, arguments.control_s
            )
            results.save()
    if results.rows:
        print(broadcast_table(results.rows))
    if results.control:
        print(control_table(results.control))
    if arguments.plot:
        plot(results.rows, arguments.plot)


class _Results:
    """What has been measured, on disk after every step, so that a broken run can be resumed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.up_mbit = float(arguments.up_mbit)
        self.size_bytes = int(arguments.size_mib * 2**20)
        self.chunk_size = arguments.chunk_kib * 1024
        self.rows: dict[str, Any] = {}
        self.control: dict[str, Any] = {}
        self._systems = arguments.systems
        self._path: Path | None = arguments.json
        self._settings = {
            name: getattr(arguments, name) for name in ("size_mib", "chunk_kib", "up_mbit", "control_s")
        }
        if arguments.resume and self._path is not None and self._path.exists():
            before = json.loads(self._path.read_text())
            if before["settings"] != self._settings:
                sys.exit(f"{self._path} was measured with {before['settings']}: choose another file")
            self.rows, self.control = before["rows"], before["control"]

    def to_do(self, name: str) -> list[str]:
        """Systems still to be measured in a row."""
        if name not in ROWS:
            return []
        done = self.rows.get(name, {}).get("systems", {})
        return [s for s in ROWS[name].systems if s in self._systems and "last_s" not in done.get(s, {})]

    def row(self, name: str, links: dict[str, Any]) -> dict[str, Any]:
        """The row's entry, with its links as last measured."""
        entry: dict[str, Any] = self.rows.setdefault(name, {"systems": {}})
        entry.update(links)
        return entry

    def save(self) -> None:
        if self._path is not None:
            content = {"settings": self._settings, "rows": self.rows, "control": self.control}
            write_report(self._path, "broadcast", content)

    def add_http(self, names: list[str]) -> None:
        """Measure one-to-all in several rows at once, each by a process of its own."""
        _progress(f"one-to-all, side by side: {', '.join(names)}")
        started = []
        for name in names:
            options = {"rows": name, "systems": "http", "json": self._http_path(name)}
            options |= {"size-mib": self.size_bytes / 2**20, "up-mbit": self.up_mbit}
            command = [sys.executable, "-m", "benchmarks.broadcast"]
            command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for name, process in zip(names, started, strict=True):
            if process.wait() != 0:
                sys.exit(f"one-to-all of {name} failed; its messages are above")
            path = self._http_path(name)
            entry = json.loads(path.read_text())["rows"][name]
            self.row(name, entry | {"systems": self.rows.get(name, {}).get("systems", {}) | entry["systems"]})
            path.unlink()
        self.save()

    def _http_path(self, name: str) -> Path:
        beside = self._path or Path("broadcast.json")
        return beside.with_name(f"{beside.stem}-http-{name}.json")


def _run_row(name: str, results: _Results) -> None:
    row = ROWS[name]
    size_bytes = results.size_bytes
    with Lab(row.links(results.up_mbit)) as lab:
        file = make_file(lab.directory / "file", size_bytes, results.chunk_size)
        _progress(f"{name}: measuring the links")
        rates = measure_rates(lab)
        limit_s = fluid_limit_s(size_bytes, rates[0].up, rates[1:])
        links: dict[str, Any] = {
            "peers": row.peers,
            "bar": row.bar,
            "rates_bytes_per_s": [asdict(rate) for rate in rates],
            "fluid_limit_s": limit_s,
        }
        if row.faults:
            links["faults"] = {str(number): fault for number, fault in row.faults.items()}
            links["useful_limit_s"] = _useful_limit_s(row, size_bytes, rates)
        entry = results.row(name, links)
        for system in results.to_do(name):
            _progress(f"{name}: {system}, fluid limit {limit_s:.1f} s")
            copies = row.peers if system == "http" else 6
            try:
                outcome = broadcast(
                    lab,
                    system,
                    SYSTEMS[system],
                    file,
                    faults=row.faults,
                    kill_after_s=KILL_AT * limit_s,
                    timeout_s=60 + copies * limit_s * 1.5,
                )
                entry["systems"][system] = _summary(outcome, limit_s, file)
            except LabError as error:
                _progress(f"{name}: {system} FAILED: {error}")
                entry["systems"][system] = {"failed": str(error)}
            results.save()
    _progress(broadcast_table({name: entry}))


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


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = [*ROWS, *CONTROL_ROWS]
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--resume", action="store_true", help="go on from what the --json file has")
    parser.add_argument("--plot", type=Path, nargs="?", const=Path("docs/img"), help="draw into this folder")
    parser.add_argument("--quick", action="store_true", help="n4 and n8, 16 MiB, this project: 70 s")
    parser.add_argument("--rows", nargs="+", choices=rows, help="default: all")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="default: all that the row has")
    parser.add_argument("--size-mib", type=float, help="the file's size, 64 by default")
    parser.add_argument(
        "--chunk-kib", type=int, default=1024, help="this project's chunks, default %(default)s"
    )
    parser.add_argument("--up-mbit", type=float, default=10.0, help="the mean uplink, default %(default)s")
    parser.add_argument("--control-s", type=float, help="how long calls are measured, 60 by default")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.rows = arguments.rows or (["n4", "n8"] if quick else rows)
    arguments.systems = arguments.systems or (["swarmnode"] if quick else list(SYSTEMS))
    arguments.size_mib = arguments.size_mib or (16.0 if quick else 64.0)
    arguments.control_s = arguments.control_s or (20.0 if quick else 60.0)
    return arguments


if __name__ == "__main__":
    main()
