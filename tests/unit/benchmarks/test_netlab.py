"""The network laboratory: caps and delays hold, and nothing of it stays, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab_process import Channel
from benchmarks.link_rates import Rates, fluid_limit_s
from benchmarks.namespaces import NAMESPACES, SCRATCH, LabError, ip, remove_dead_runs, run_prefix
from benchmarks.netlab import Lab, Link, why_not

reason = why_not()
needs_lab = pytest.mark.skipif(reason is not None, reason=f"no network laboratory here: {reason}")

PORT = 4321


def namespaces(prefix: str) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{prefix}*")]


def echo_server(channel: Channel, address: str) -> None:
    """Answer each byte with the same, then take what comes and say how long that took."""
    with socket.create_server((address, PORT)) as listener:
        channel.send(listening=True)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(1))
            began, received = time.monotonic(), 0
            while data := connection.recv(65536):
                received += len(data)
            channel.send(received=received, seconds=time.monotonic() - began)
            channel.receive()


def client(channel: Channel, address: str, size: int) -> None:
    """Send a byte and time its return, then send `size` bytes."""
    with socket.create_connection((address, PORT), timeout=20) as connection:
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        channel.send(round_trip_s=time.monotonic() - began)
        connection.sendall(bytes(size))
    channel.receive()


def failing(channel: Channel) -> None:
    raise ValueError("the reason why")


@needs_lab
def test_a_link_is_no_faster_and_no_shorter_than_it_is_set() -> None:
    """Lower bounds of times only: a busy machine makes everything slower, never faster."""
    size = 400_000
    with Lab([Link(4, 50, delay_ms=20), Link(50, 50, delay_ms=30)]) as lab:
        server = lab.start(1, "server", echo_server, lab.address(1))
        server.receive(20)
        sender = lab.start(0, "client", client, lab.address(1), size)
        assert sender.receive(20)["round_trip_s"] >= 0.050
        result = server.receive(20)
        sent, _ = lab.traffic(0)
    assert result["received"] == size
    assert (
        result["seconds"] >= (size - 20_000) / 500_000
    )  # 4 Mbit/s; the bucket lets a few packets through at once
    assert size < sent < 1.3 * size


@needs_lab
def test_nothing_stays_when_a_laboratory_ends() -> None:
    with Lab([Link(10, 10)] * 2) as lab:
        process = lab.start(0, "server", echo_server, lab.address(0))
        process.receive(20)
        assert len(namespaces(run_prefix(os.getpid()))) == 5  # two nodes, two gateways, the hub
    assert namespaces(run_prefix(os.getpid())) == []
    assert not lab.directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@needs_lab
def test_nothing_stays_when_its_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from benchmarks.netlab import Lab, Link\n"
        "from tests.unit.benchmarks.test_netlab import echo_server\n"
        "with Lab([Link(10, 10, delay_ms=5)]) as lab:\n"
        "    lab.start(0, 'server', echo_server, lab.address(0)).receive(20)\n"
        f"    lab.scratch_elsewhere(pathlib.Path({str(tmp_path)!r}))\n"
        "    print('built', flush=True)\n"
        "    time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "built\n"
    prefix = run_prefix(owner.pid)
    assert len(namespaces(prefix)) == 3
    assert len(list(tmp_path.iterdir())) == 1
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    deadline = time.monotonic() + 30
    while (namespaces(prefix) or any(SCRATCH.glob(f"{prefix}*"))) and time.monotonic() < deadline:
        time.sleep(0.05)  # no event tells of another process's cleaning up
    assert namespaces(prefix) == []
    assert list(SCRATCH.glob(f"{prefix}*")) == []
    assert list(tmp_path.iterdir()) == []


@needs_lab
def test_cleaning_removes_dead_runs_only() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    dead = f"{run_prefix(ended.pid)}n0"
    ended.wait(20)
    alive = f"{run_prefix(os.getpid())}n0"
    reused = f"{run_prefix(os.getpid())[:-1]}0-n0"  # this process's number, but begun at another time
    for name in (dead, alive, reused):
        ip("netns", "add", name)
    try:
        assert remove_dead_runs() >= 2
        assert namespaces(dead) == []
        assert namespaces(reused) == []
        assert namespaces(alive) == [alive]
    finally:
        ip("netns", "delete", alive)


@needs_lab
def test_the_failure_of_a_process_is_told_with_its_log() -> None:
    with Lab([Link(10, 10)]) as lab:
        process = lab.start(0, "failing", failing)
        with pytest.raises(LabError, match=r"(?s)failing: .*the reason why"):
            process.receive(20)


def test_the_fluid_limit_is_the_narrowest_of_three() -> None:
    equal = [Rates(up=10.0, down=40.0)] * 4
    assert fluid_limit_s(1000, 10.0, equal) == 100.0  # the source's uplink
    assert fluid_limit_s(1000, 50.0, [*equal, Rates(10.0, 5.0)]) == 200.0  # one slow downlink
    assert fluid_limit_s(1000, 20.0, [Rates(0.0, 40.0)] * 4) == 200.0  # all uplinks together: 4000 / 20
