"""What a byte costs on its way from one node to another: processor time of each side, on the loopback device.

    python -m benchmarks.chunk_bytes --json build/chunk_bytes.json [--quick]

Two processes with a node's transport, chunk server and download, one file, nothing else: Noise, the
multiplexer, the chunk sessions, hashing, and the page cache of both files. The links have no cap, so the
figure says how many cores a node needs for a given rate, and what a faster machine could carry at most.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from benchmarks.broadcast_swarmnode import ExchangeNode, told
from benchmarks.broadcast_system import START_TIMEOUT_S, Task, make_file
from benchmarks.lab_process import Channel, LabProcess
from benchmarks.report import table, write_report

ADDRESSES = ("127.0.0.1", "127.0.0.2")
CHUNKS_KIB = (64, 256, 1024)
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--quick", action="store_true", help="one size of chunks, 64 MiB, three times: 10 s")
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size_mib, arguments.times = 64, 3
    chunks_kib = (256,) if arguments.quick else CHUNKS_KIB
    results = {
        str(chunk_kib): [_measure(arguments.size_mib, chunk_kib * 1024) for _ in range(arguments.times)]
        for chunk_kib in chunks_kib
    }
    print(table(["chunk KiB", "MiB/s", "source MiB/core-s", "peer MiB/core-s"], _rows(results)))
    if arguments.json:
        write_report(arguments.json, "chunk_bytes", {"size_mib": arguments.size_mib, "chunk_kib": results})


def _rows(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    rows = []
    for chunk_kib, runs in results.items():
        row = [chunk_kib]
        for figure in ("mib_per_s", "source_mib_per_core_s", "peer_mib_per_core_s"):
            values = [run[figure] for run in runs]
            row.append(f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})")
        rows.append(row)
    return rows


def _measure(size_mib: int, chunk_size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        file = make_file(root / "file", size_mib * 2**20, chunk_size)
        processes: list[LabProcess] = []
        try:
            for number, address in enumerate(ADDRESSES):
                directory = root / f"node-{number}"
                directory.mkdir()
                task = Task(number, address, file, directory)
                processes.append(LabProcess(f"node-{number}", None, root / f"{number}.log", _run, task))
            addresses = [process.receive(START_TIMEOUT_S)["address"] for process in processes]
            for process in processes:
                process.send(connect=addresses)
            for process in processes:
                process.receive(START_TIMEOUT_S)
            for process in processes:
                process.send(start=True)
            peer = processes[1].receive(TIMEOUT_S)
            processes[0].send(stop=True)
            source = processes[0].receive(START_TIMEOUT_S)
        finally:
            for process in processes:
                process.kill()
    return {
        "mib_per_s": size_mib / peer["seconds"],
        "source_mib_per_core_s": size_mib / source["cpu_s"],
        "peer_mib_per_core_s": size_mib / peer["cpu_s"],
    }


def _run(channel: Channel, task: Task) -> None:
    trio.run(_take_part, channel, task)


async def _take_part(channel: Channel, task: Task) -> None:
    node = ExchangeNode(task)
    async with node.running():
        channel.send(address=node.transport.addresses[0])
        await node.connect((await told(channel))["connect"])
        channel.send(connected=True)
        await told(channel)
        began_s, cpu_s = time.monotonic(), _cpu_s()
        figures: dict[str, Any] = {}
        if task.is_source:
            await told(channel)
        else:
            figures["seconds"] = await node.fetch() - began_s
        channel.send(cpu_s=_cpu_s() - cpu_s, **figures)
        await trio.sleep_forever()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
