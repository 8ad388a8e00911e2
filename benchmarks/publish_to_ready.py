"""From the optimizer's step to the last worker's first use of it: deltas against whole snapshots.

    make smollm2
    python -m benchmarks.publish_to_ready --json build/publish-to-ready.json [--quick]

A real fleet in the network laboratory (`benchmarks.netlab`; needs root on Linux): a learner and 8 workers,
each `swarmnode` with all its processes, GRPO on SmolLM2-135M in sequential mode, uplinks of 100 Mbit/s. It
runs twice: as it is, and with a learner that publishes snapshots only. All nodes share this machine's cores,
so loading takes longer than on machines of their own, either way.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lab_process import LabProcess
from benchmarks.link_rates import fluid_limit_s, measure_rates
from benchmarks.namespaces import LabError
from benchmarks.netlab import Lab, Link
from benchmarks.publish_to_ready_fleet import lay_out, run_learner, run_worker
from benchmarks.report import table, write_report

BAR = 10.0
"""How many times sooner with deltas."""

DOWN_PER_UP = 4.0
FIRST_UPDATE_TIMEOUT_S = 900.0
UPDATE_TIMEOUT_S = 600.0
WARM_UP_VERSIONS = 1
"""The first step of AdamW moves every weight by the learning rate and is like no other."""

RUN = {
    "name": "publish-to-ready",
    "preset": "fleet",
    "mode": "sequential",
    "max_staleness": 0,
    "pacing_batches": 1,
    # So many that some group has unequal rewards: without, the gradient is zero and the delta empty.
    "group_size": 8,
    "local_groups": 4,
    "max_new_tokens": 16,
    "partial_credit": True,
    "algorithm": {"loss_type": "grpo", "learning_rate": 1e-6},
}


def main() -> None:
    arguments = _arguments()
    results: dict[str, Any] = {}
    for way, versions in (("deltas", arguments.deltas), ("snapshots", arguments.snapshots)):
        results[way] = _run_fleet(way, versions, arguments)
        if arguments.json:
            write_report(arguments.json, "publish_to_ready", {"bar": BAR, "run": RUN, **results})
    print(_table(results))
    ratio = results["snapshots"]["median_ready_s"] / results["deltas"]["median_ready_s"]
    fluid = results["snapshots"]["fluid_limit_s"] / results["deltas"]["median_ready_s"]
    print(f"deltas are ready {ratio:.1f} times sooner (bar: {BAR:g});")
    print(f"{fluid:.1f} times sooner than a snapshot could be spread at all over these links")


def _run_fleet(way: str, versions: int, arguments: argparse.Namespace) -> dict[str, Any]:
    links = [Link(arguments.up_mbit, arguments.up_mbit * DOWN_PER_UP)] * (1 + arguments.workers)
    with Lab(links) as lab:
        _progress(f"{way}: measuring the links")
        rates = measure_rates(lab)
        addresses = [lab.address(number) for number in range(len(links))]
        updates = WARM_UP_VERSIONS + versions
        fleet = lay_out(
            lab.scratch_elsewhere(arguments.directory), arguments.model.resolve(), RUN, addresses, updates
        )
        _progress(f"{way}: starting {len(links)} nodes")
        learner = lab.start(0, "learner", run_learner, fleet.directories[0], way == "deltas")
        workers = [
            lab.start(number, f"worker-{number}", run_worker, fleet.directories[number], fleet.invite)
            for number in range(1, len(links))
        ]
        try:
            measured = [_measure(way, lab, learner, workers) for _ in range(updates)]
        finally:
            for process in [*workers, learner]:
                process.terminate()
    size = measured[0]["snapshot_bytes"]
    counted = [one["ready_s"] for one in measured[WARM_UP_VERSIONS:]]
    return {
        "versions": measured,
        "median_ready_s": statistics.median(counted),
        "spread_s": [min(counted), max(counted)],
        "fluid_limit_s": fluid_limit_s(size, rates[0].up, rates[1:]),
    }


def _measure(way: str, lab: Lab, learner: LabProcess, workers: list[LabProcess]) -> dict[str, Any]:
    """One update: when its optimizer step was done, when it was published, when each worker had loaded it."""
    sent_before, _ = lab.traffic(0)
    update = learner.receive(FIRST_UPDATE_TIMEOUT_S)
    loaded = [_await_version(worker, update["version"]) for worker in workers]
    sent, _ = lab.traffic(0)
    seconds = [one["at"] - update["step_done"] for one in loaded]
    result = {
        "version": update["version"],
        "published_s": update["told"] - update["step_done"],
        "ready_s": max(seconds),
        "median_worker_s": statistics.median(seconds),
        "workers_s": seconds,
        "ways": [one["way"] for one in loaded],
        "snapshot_bytes": update["snapshot_bytes"],
        "delta_bytes": update["delta_bytes"],
        "learner_sent_bytes": sent - sent_before,
    }
    _progress(f"{way}: version {result['version']} was ready after {result['ready_s']:.2f} s")
    return result


def _await_version(worker: LabProcess, version: int) -> dict[str, Any]:
    deadline = time.monotonic() + UPDATE_TIMEOUT_S
    while time.monotonic() < deadline:
        loaded = worker.receive(max(1.0, deadline - time.monotonic()))
        if loaded["version"] >= version:
            return loaded
    raise LabError(f"{worker.name} did not load version {version} within {UPDATE_TIMEOUT_S:g} s")


def _table(results: dict[str, Any]) -> str:
    header = (
        "published as",
        "version",
        "bytes",
        "published s",
        "median worker s",
        "last worker s",
        "sent MB",
    )
    rows = [
        [
            way,
            str(one["version"]) + (" (first)" if index < WARM_UP_VERSIONS else ""),
            f"{one['delta_bytes'] or one['snapshot_bytes']:,}",
            f"{one['published_s']:.2f}",
            f"{one['median_worker_s']:.2f}",
            f"{one['ready_s']:.2f}",
            f"{one['learner_sent_bytes'] / 1e6:.1f}",
        ]
        for way, result in results.items()
        for index, one in enumerate(result["versions"])
    ]
    return table(header, rows)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--quick", action="store_true", help="3 workers, 2 versions with deltas, 1 without")
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"), help="default %(default)s")
    parser.add_argument("--workers", type=int, help="8 by default")
    parser.add_argument("--deltas", type=int, help="versions measured with deltas, 6 by default")
    parser.add_argument("--snapshots", type=int, help="versions measured without, 3 by default")
    parser.add_argument("--up-mbit", type=float, default=100.0, help="every uplink, default %(default)s")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="for nodes' data")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.workers = arguments.workers or (3 if quick else 8)
    arguments.deltas = arguments.deltas or (2 if quick else 6)
    arguments.snapshots = arguments.snapshots or (1 if quick else 3)
    if not (arguments.model / "model.safetensors").exists():
        parser.error(f"{arguments.model} has no model: run 'make smollm2', or name a folder with --model")
    return arguments


if __name__ == "__main__":
    main()
