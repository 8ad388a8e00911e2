"""Ctrl-C and SIGTERM at awkward moments, and again and again: exit code 0, quickly, and no child left."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from live_swarm import run_cli, wait_for, wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarmnode.cli.main", *arguments], stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def stops_in_order(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send the signal every tenth of a second, as an impatient person does."""
    children = [child.pid for child in psutil.Process(process.pid).children()]
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(number)
        time.sleep(0.1)
    assert process.poll() == 0
    wait_gone(children, 2)


def said(log: Path, text: str) -> Callable[[], bool]:
    return lambda: text in log.read_text(errors="replace")


def test_a_node_stops_in_order_at_any_moment(tmp_path: Path) -> None:
    data = str(tmp_path / "node")
    assert run_cli("init", "--data", data).returncode == 0
    # The ledger is being opened; the children are being imported; the first evaluation runs.
    for number, text in enumerate(("data directory: ", "node ", "learner ready at version 0")):
        log = tmp_path / f"{number}.log"
        with started(log, "run", "--data", data, "--api-port", "0") as process:
            wait_for(f"{text!r} in the log", said(log, text), 90)
            stops_in_order(process, signal.SIGINT if number else signal.SIGTERM)
            assert "Traceback" not in log.read_text(errors="replace")
