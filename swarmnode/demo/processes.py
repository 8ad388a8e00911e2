"""The node processes of a demo: start, watch through their APIs, ask to finish, stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from swarmnode.cli import local_api
from swarmnode.cli.errors import UserError
from swarmnode.demo.layout import DemoNode, DemoSwarm

STOP_TIMEOUT_S = 10.0


class NodeProcess:
    """One `swarmnode run` of the demo."""

    def __init__(self, node: DemoNode, invite: str) -> None:
        self.node = node
        self.log_path: Path = node.directory.logs_path / "node.log"
        self.last_state: dict[str, Any] | None = None
        needs_invite = not node.directory.spec_path.exists()
        command = ["join", invite] if needs_invite else ["run"]
        environment = {key: value for key, value in os.environ.items() if key != "SWARMNODE_API_TOKEN"}
        with open(self.log_path, "ab") as log:
            # A session of its own: Ctrl-C reaches the demo, which stops its nodes in order.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarmnode.cli.main", *command, "--data", str(node.directory.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def poll_state(self) -> dict[str, Any] | None:
        """The node's state now, or the last one when it does not answer."""
        address = local_api.read_address(self.node.directory)
        if address is not None and address.get("pid") == self.process.pid:
            try:
                self.last_state = local_api.get(address, "/api/state", timeout_s=2.0)
            except UserError:
                return self.last_state
        return self.last_state

    def last_words(self) -> str:
        """The last line of the node's log."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "(nothing was logged)"


class DemoProcesses:
    """All nodes of a demo."""

    def __init__(self, swarm: DemoSwarm) -> None:
        self.swarm = swarm
        self.nodes = [NodeProcess(node, swarm.invite) for node in swarm.nodes]

    def states(self) -> list[dict[str, Any] | None]:
        """One state per node, in order."""
        return [node.poll_state() for node in self.nodes]

    def raise_if_dead_at_start(self) -> None:
        """Raise `UserError` when a node ended before it ever answered."""
        for node in self.nodes:
            if not node.running and node.last_state is None:
                raise UserError(
                    f"{node.node.name} ended with exit code {node.process.returncode}: {node.last_words()} "
                    f"(log: {node.log_path})"
                )

    def finish_training(self) -> None:
        """Ask learners for a final evaluation."""
        for node in self.nodes:
            if node.running and node.node.role in ("learner", "peer"):
                node.process.send_signal(signal.SIGUSR1)

    def stop(self) -> list[str]:
        """Stop all nodes as a person would; returns the names of those that did not end well."""
        for node in reversed(self.nodes):
            if node.running:
                node.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        bad = []
        for node in self.nodes:
            try:
                code = node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                code = node.process.wait()
            if code != 0:
                bad.append(f"{node.node.name} (exit code {code}, log {node.log_path})")
        return bad
