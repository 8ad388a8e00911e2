"""What the compared ways of giving one file to many have in common: a node's steps, and the run.

The steps, in JSON lines over the process's channel: it says its address; is told to connect and says when it
is connected; is told to start at the same moment as all others; a peer says when the file lies on its disk
under its final name; is told to check and says the SHA-256 of the file.
"""

import hashlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab_process import LabProcess, Work
from benchmarks.namespaces import LabError
from benchmarks.netlab import Lab

SOURCE = 0
"""The node that has the file; peers are 1, 2, ..."""

START_TIMEOUT_S = 90.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class SharedFile:
    """The file that is given to all."""

    path: Path
    size_bytes: int
    chunk_size: int
    chunks: list[bytes]
    sha256: str


def make_file(path: Path, size_bytes: int, chunk_size: int) -> SharedFile:
    """Random bytes, so that nobody can compress them."""
    digest = hashlib.sha256()
    chunks = []
    with path.open("wb") as file:
        for start in range(0, size_bytes, chunk_size):
            data = os.urandom(min(chunk_size, size_bytes - start))
            file.write(data)
            digest.update(data)
            chunks.append(hashlib.sha256(data).digest())
    return SharedFile(path, size_bytes, chunk_size, chunks, digest.hexdigest())


@dataclass(frozen=True)
class Task:
    """What a node's process is given."""

    number: int
    address: str
    file: SharedFile
    directory: Path
    fault: str | None = None

    @property
    def is_source(self) -> bool:
        return self.number == SOURCE


@dataclass
class Outcome:
    """One system in one row."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Of each peer that was not killed, from the common start."""
    source_sent_bytes: int = 0
    cpu_s: float = 0.0
    """User and system time of all nodes' processes."""
    busy: float = 0.0
    """Share of the machine's cores in use meanwhile, the kernel's network and others' work included."""
    peer_growth_mb: float = 0.0
    """The most that the resident memory of one peer's process rose above where it was at the start."""
    bit_exact: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def last_s(self) -> float:
        return max(self.seconds.values())

    @property
    def median_s(self) -> float:
        ordered = sorted(self.seconds.values())
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def broadcast(
    lab: Lab,
    name: str,
    work: Work,
    file: SharedFile,
    *,
    faults: Mapping[int, str],
    kill_after_s: float,
    timeout_s: float,
) -> Outcome:
    """Run one system: node 0 of the laboratory has the file, all others get it.

    Peers whose fault is "killed" are lost `kill_after_s` after the start. Raises `LabError`.
    """
    processes: list[LabProcess] = []
    try:
        for number in range(len(lab.links)):
            directory = lab.scratch(f"{name}-{number}")
            task = Task(number, lab.address(number), file, directory, faults.get(number))
            processes.append(lab.start(number, f"{name}-{number}", work, task))
        return _run(lab, processes, file, faults, kill_after_s, timeout_s)
    finally:
        for process in processes:
            process.kill()


def _run(
    lab: Lab,
    processes: Sequence[LabProcess],
    file: SharedFile,
    faults: Mapping[int, str],
    kill_after_s: float,
    timeout_s: float,
) -> Outcome:
    outcome = Outcome()
    addresses = [process.receive(START_TIMEOUT_S)["address"] for process in processes]
    for process in processes:
        process.send(connect=addresses)
    for process in processes:
        process.receive(START_TIMEOUT_S)
    cpu_before = {process.pid: _cpu_s(process.pid) for process in processes}
    resident = {process.pid: _resident_at_start(process.pid) for process in processes}
    sent_before, _ = lab.traffic(SOURCE)
    busy_before = _machine_cpu()
    began = time.monotonic()
    for process in processes:
        process.send(start=True)
    peers = {number: process for number, process in enumerate(processes) if number != SOURCE}
    doomed = [number for number, fault in faults.items() if fault == "killed"]
    if doomed:
        time.sleep(kill_after_s)
        for number in doomed:
            process = peers.pop(number)
            outcome.cpu_s += _cpu_s(process.pid) - cpu_before.pop(process.pid)
            process.kill()
    for number, process in peers.items():
        done = process.receive(max(1.0, timeout_s - (time.monotonic() - began)))
        outcome.seconds[number] = done.pop("at") - began
        outcome.details[str(number)] = done
    outcome.busy = _busy(busy_before, _machine_cpu())
    outcome.source_sent_bytes = lab.traffic(SOURCE)[0] - sent_before
    outcome.cpu_s += sum(_cpu_s(pid) - before for pid, before in cpu_before.items())
    outcome.peer_growth_mb = max(_peak_mb(p.pid) - resident[p.pid] for p in peers.values())
    for process in peers.values():
        process.send(check=True)
    found = {process.receive(60)["sha256"] for process in peers.values()}
    outcome.bit_exact = found == {file.sha256}
    return outcome


def answer_check(channel: Any, path: Path) -> None:
    """The last step of a peer's process."""
    channel.receive()
    with path.open("rb") as file:
        channel.send(sha256=hashlib.file_digest(file, "sha256").hexdigest())


def stop_on_terminate() -> None:
    """Let SIGTERM end a process of the laboratory as it ends any other."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# What the kernel counts


def _cpu_s(pid: int) -> float:
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident_at_start(pid: int) -> float:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    return _peak_mb(pid)


def _peak_mb(pid: int) -> float:
    line = next(line for line in _proc(pid, "status").splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError as error:
        raise LabError(f"process {pid} of the laboratory is gone") from error


def _machine_cpu() -> tuple[int, int]:
    """(ticks not idle, all ticks) of all cores."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _busy(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[0] - before[0]) / max(1, after[1] - before[1])
