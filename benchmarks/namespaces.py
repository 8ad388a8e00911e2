"""Network namespaces of a laboratory run: their names, entering them, removing what a dead run has left.

A run's names begin with `snlab-PID-START-`, PID and START being the process that made it and when that began,
so that what belongs to a dead run is known for certain and nothing else is ever touched.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "snlab"
NAMESPACES = Path("/run/netns")
SCRATCH = Path("/dev/shm")
"""Where runs keep their files: memory, so that no disk's speed is measured."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class LabError(RuntimeError):
    """The laboratory cannot do what was asked; the message says what to do."""


def run_prefix(pid: int) -> str:
    """What the names of a run by process `pid` begin with. Raises `OSError` if there is no such process."""
    return f"{PREFIX}-{pid}-{_start_ticks(pid)}-"


def _start_ticks(pid: int) -> str:
    # The name in the second field may hold spaces and parentheses; what follows its last one is regular.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def ip(*arguments: str, lines: Sequence[str] = ()) -> str:
    """Run `ip`, with `lines` as a batch if there are any. Raises `LabError` with its message."""
    command = ["ip", *arguments, *(["-batch", "-"] if lines else [])]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Be in a namespace for the block. For processes of one thread: others would stay outside."""
    with open("/proc/self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _set(before.fileno(), "the former namespace")


def enter(namespace: str) -> None:
    """Go into a namespace for good."""
    with open(NAMESPACES / namespace) as file:
        _set(file.fileno(), namespace)


def _set(descriptor: int, name: str) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def remove_run(prefix: str) -> int:
    """Kill all inside the namespaces of one run, remove them and its files; how many namespaces there were.

    Files elsewhere are those that a link among its files names. Several processes may do this at once.
    """
    names = _names(prefix)
    for name in names:
        for pid in _inside(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in names:
        deadline = time.monotonic() + 5
        while _inside(name) and time.monotonic() < deadline:
            time.sleep(0.02)  # a process of another parent cannot be waited for
        try:
            ip("netns", "delete", name)
        except LabError:
            if name in _names(prefix):
                raise
    for path in SCRATCH.glob(f"{prefix}*"):
        for link in path.glob("*"):
            if link.is_symlink() and link.readlink().name.startswith(prefix):
                shutil.rmtree(link.readlink(), ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
    return len(names)


def _inside(name: str) -> list[int]:
    try:
        return [int(pid) for pid in ip("netns", "pids", name).split()]
    except LabError:
        return []  # removed meanwhile


def remove_dead_runs() -> int:
    """Remove what runs have left whose process is gone; how many namespaces there were."""
    found = {name.rpartition("-")[0] + "-" for name in _names(f"{PREFIX}-")}
    found |= {path.name.rpartition("-")[0] + "-" for path in SCRATCH.glob(f"{PREFIX}-*")}
    return sum(remove_run(prefix) for prefix in found if not _alive(prefix))


def _names(prefix: str) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{prefix}*")]


def _alive(prefix: str) -> bool:
    try:
        return run_prefix(int(prefix.split("-")[1])) == prefix
    except (OSError, ValueError, IndexError):
        return False
