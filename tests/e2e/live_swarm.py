"""Starts and watches real nodes, as the demo does; every wait has an end and says what it waited for."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from swarmnode.demo.layout import DemoNode, free_ports, lay_out
from swarmnode.demo.processes import DemoProcesses, NodeProcess

State = dict[str, Any]


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
    """The first truthy value of `condition`. Raises AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.25)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain for: {what}")


class LiveSwarm:
    """The nodes of a demo layout, by name."""

    def __init__(self, root: Path, preset: str, mode: str = "async", **run: Any) -> None:
        self.layout = lay_out(
            root,
            preset=preset,
            mode=mode,
            model="tiny",
            seed=0,
            page_port=free_ports(1)[0],
            run_overrides=run,
        )
        self.processes = DemoProcesses(self.layout)
        self.nodes = {process.node.name: process for process in self.processes.nodes}

    def state(self, name: str) -> State:
        """The node's state now; empty while it does not answer."""
        return self.nodes[name].poll_state() or {}

    def learner_version(self, name: str = "learner") -> int:
        """The version that a learner trains; -1 before it says."""
        version = (self.state(name).get("policy") or {}).get("version")
        return -1 if version is None else int(version)

    def row(self, viewer: str, name: str) -> State:
        """How one node sees another."""
        return next((row for row in self.state(viewer).get("nodes", []) if row["name"] == name), {})

    def kill(self, name: str) -> list[int]:
        """kill -9 a node process; returns the pids of its children."""
        process = self.nodes[name].process
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        return children

    def restart(self, name: str) -> None:
        """Start a node again in its data directory."""
        self.nodes[name] = NodeProcess(self.nodes[name].node, self.layout.invite)
        self.processes.nodes = list(self.nodes.values())

    def add(self, node: DemoNode) -> None:
        """Start one more node, with the invite."""
        node.directory.create()
        self.nodes[node.name] = NodeProcess(node, self.layout.invite)
        self.processes.nodes = list(self.nodes.values())

    def logs(self) -> str:
        """The end of every log, for a failing test."""
        parts = []
        for name, node in self.nodes.items():
            for path in sorted(node.node.directory.logs_path.glob("*.log")):
                lines = path.read_text(errors="replace").splitlines()[-15:]
                parts.append(f"--- {name}/{path.name}\n" + "\n".join(lines))
        return "\n".join(parts)


@contextmanager
def live_swarm(root: Path, preset: str, mode: str = "async", **run: Any) -> Iterator[LiveSwarm]:
    """A swarm that is stopped whatever happens; on a failure its logs are printed."""
    swarm = LiveSwarm(root, preset, mode, **run)
    try:
        yield swarm
    except BaseException:
        print(swarm.logs())
        raise
    finally:
        swarm.processes.stop()


def wait_gone(pids: list[int], timeout_s: float) -> None:
    """Wait until none of these processes runs."""

    def running() -> list[int]:
        found = []
        for pid in pids:
            try:
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
        return found

    wait_for(f"the end of processes {pids}", lambda: not running(), timeout_s)


def run_cli(*arguments: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `swarmnode ...` to its end."""
    import sys

    return subprocess.run(
        [sys.executable, "-m", "swarmnode.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
