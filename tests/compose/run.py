"""Builds the image and runs docker-compose.yml for real: training starts, survives a killed worker, goes on.

Usage: make compose-test, or: python3 tests/compose/run.py [--no-build] [--keep]
Needs the docker command with an engine, and Compose (the plugin, or docker-compose from 1.29 on).
Only the standard library is used. It brings up a project of its own and always takes it down again.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "swarmnode:local"
PROJECT = "swarmnode-compose-test"
SERVICES = ("learner", "relay", "worker-1", "worker-2", "worker-3")
WORKERS = ("worker-1", "worker-2", "worker-3")
VICTIM = "worker-3"
POLL_S = 2.0

# Generous: a loaded two-core machine starts five nodes and their children one after another.
TRAINING_S = 600.0
HEALTHY_S = 120.0
GONE_S = 60.0
GOES_ON_S = 300.0

State = dict[str, Any]
STARTED = time.monotonic()


class Failed(Exception):
    """What was wanted did not happen; the message says what was seen instead."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


class Swarm:
    """The five containers of one Compose project, its page on a free port of this machine's loopback."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.port = free_port()
        self.compose = compose_command()
        self.environment = {
            **os.environ,
            "SWARMNODE_API_TOKEN": self.token,
            "SWARMNODE_PAGE_PORT": str(self.port),
        }

    def run(self, *arguments: str, timeout_s: float = 120.0) -> None:
        command = [*self.compose, "-p", PROJECT, "-f", str(ROOT / "docker-compose.yml"), *arguments]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, timeout=timeout_s)

    def down(self) -> None:
        self.run("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout_s=180.0)

    def container(self, service: str) -> str:
        """The container's id, by its labels: the two generations of Compose name containers differently."""
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [word for key, value in labels.items() for word in ("--filter", f"label={key}={value}")]
        found = output("docker", "ps", "--all", "--quiet", "--no-trunc", *filters).split()
        if len(found) != 1:
            raise Failed(f"service {service} has {len(found)} containers, wanted 1")
        return found[0]

    def inspect(self, service: str) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(output("docker", "inspect", self.container(service)))[0]
        return described

    def get(self, path: str, *, token: str | None) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def state(self) -> State | None:
        """The learner's /api/state, or None while nothing answers."""
        try:
            status, body = self.get("/api/state", token=self.token)
        except (OSError, urllib.error.URLError):
            return None
        if status != 200:
            raise Failed(f"/api/state answers {status} with the right token: {body[:200]!r}")
        state: State = json.loads(body)
        return state

    def print_logs(self) -> None:
        for service in SERVICES:
            try:
                described = self.inspect(service)["State"]
                health = described.get("Health", {}).get("Status", "none")
                how = f"{described['Status']}, exit code {described['ExitCode']}, health {health}"
                print(f"\n--- {service}: {how}", flush=True)
                subprocess.run(
                    ["docker", "logs", "--tail", "60", self.container(service)], timeout=30, check=False
                )
            except (Failed, subprocess.SubprocessError, KeyError) as error:
                print(f"--- {service}: no logs: {error}")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def compose_command() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "version"], capture_output=True, timeout=60).returncode == 0:
                return command
    stop("Compose is missing: install docker-compose, or the docker-compose-plugin of your Docker packages")


def stop(reason: str) -> NoReturn:
    print(f"compose-test: {reason}", file=sys.stderr)
    sys.exit(2)


def wait_for(
    what: str, within_s: float, swarm: Swarm, reached: Callable[[State], bool], seen: Callable[[State], str]
) -> State:
    """Polls the learner's state until it is as wanted; raises Failed with the last thing seen."""
    say(f"waiting for {what}, at most {within_s:.0f} s")
    deadline = time.monotonic() + within_s
    last = "no answer from the learner's page"
    shown = ""
    while time.monotonic() < deadline:
        state = swarm.state()
        if state is not None:
            last = seen(state)
            if reached(state):
                say(f"{what}: {last}")
                return state
            if last != shown:
                say(f"  {last}")
                shown = last
        time.sleep(POLL_S)
    raise Failed(f"{what} did not happen within {within_s:.0f} s; last seen: {last}")


def published(state: State) -> int:
    return int((state["learner"] or {}).get("published_versions") or 0)


def version(state: State) -> int:
    return int((state["policy"] or {}).get("version") or 0)


def worker_nodes(state: State) -> dict[str, State]:
    return {node["name"]: node for node in state["nodes"] if node["name"] in WORKERS}


def accepted(state: State) -> dict[str, int]:
    return {name: int(node["accepted"] or 0) for name, node in sorted(worker_nodes(state).items())}


def summary(state: State) -> str:
    nodes = {name: node["state"] for name, node in sorted(worker_nodes(state).items())}
    learner = (state["learner"] or {}).get("state")
    return (
        f"version {version(state)}, {published(state)} published, accepted {accepted(state)}, "
        f"workers {nodes}, learner {learner}, refused {state['refused']}"
    )


def check_hardening(swarm: Swarm) -> None:
    """Every container runs as the plain user; only the learner's page is published, and it wants a token."""
    for service in SERVICES:
        user = output("docker", "exec", swarm.container(service), "id", "-u").strip()
        if user != "10001":
            raise Failed(f"{service} runs as user {user}, wanted 10001")
        ports = swarm.inspect(service)["NetworkSettings"]["Ports"] or {}
        bound = {port: [item["HostIp"] for item in binding] for port, binding in ports.items() if binding}
        wanted = {"8642/tcp": ["127.0.0.1"]} if service == "learner" else {}
        if bound != wanted:
            raise Failed(f"{service} publishes {bound} on the host, wanted {wanted}")
    for token in (None, "wrong" * 6):
        status, _ = swarm.get("/api/state", token=token)
        if status not in (401, 403):
            raise Failed(f"/api/state answers {status} to the token {token!r}, wanted 401 or 403")
    say("all five run as user 10001, only the page is published, and it asks for its token")


def check_healthy(swarm: Swarm) -> None:
    deadline = time.monotonic() + HEALTHY_S
    while True:
        health = {service: swarm.inspect(service)["State"]["Health"]["Status"] for service in SERVICES}
        if set(health.values()) == {"healthy"}:
            say("all five health checks pass")
            return
        if time.monotonic() > deadline:
            raise Failed(f"health checks do not pass: {health}")
        time.sleep(POLL_S)


def exercise(swarm: Swarm) -> None:
    wait_for(
        "three published versions and groups accepted from all three workers",
        TRAINING_S,
        swarm,
        lambda state: (
            published(state) >= 3
            and set(accepted(state)) == set(WORKERS)
            and min(accepted(state).values()) > 0
        ),
        summary,
    )
    check_healthy(swarm)
    check_hardening(swarm)

    output("docker", "kill", "--signal", "KILL", swarm.container(VICTIM))
    say(f"{VICTIM} is killed")
    at_kill = wait_for(
        f"{VICTIM} shown gone",
        GONE_S,
        swarm,
        lambda state: (
            {name: node["state"] for name, node in worker_nodes(state).items()}
            == {name: "gone" if name == VICTIM else "live" for name in WORKERS}
        ),
        summary,
    )
    survivors = {name: count for name, count in accepted(at_kill).items() if name != VICTIM}
    wait_for(
        f"three more versions after {version(at_kill)}, and new groups from both other workers",
        GOES_ON_S,
        swarm,
        lambda state: (
            version(state) >= version(at_kill) + 3
            and all(accepted(state)[name] > before for name, before in survivors.items())
        ),
        summary,
    )


@contextlib.contextmanager
def up(swarm: Swarm, keep: bool) -> Iterator[None]:
    """Brings the project up and, whatever happens, down; the logs are printed first when something failed."""
    swarm.down()
    try:
        try:
            swarm.run("up", "--detach", "--no-build")
            yield
        except (Exception, KeyboardInterrupt, SystemExit):
            swarm.print_logs()
            raise
    finally:
        if keep:
            say(f"left running: http://127.0.0.1:{swarm.port}, token {swarm.token}")
        else:
            swarm.down()


def on_terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal_number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-build", action="store_true", help=f"use the image {IMAGE} as it is")
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    options = parser.parse_args()
    try:
        output("docker", "info")
    except (FileNotFoundError, subprocess.SubprocessError):
        stop("no Docker engine answers: install docker.io, sudo systemctl start docker, then try again")
    signal.signal(signal.SIGTERM, on_terminate)
    swarm = Swarm()
    try:
        if not options.no_build:
            say(f"building {IMAGE}")
            subprocess.run(
                ["docker", "build", "--network=host", "--quiet", "--tag", IMAGE, "."],
                cwd=ROOT,
                check=True,
                timeout=1800,
            )
        with up(swarm, options.keep):
            exercise(swarm)
    except (Failed, subprocess.SubprocessError) as error:
        print(f"\ncompose-test failed: {error}", file=sys.stderr)
        return 1
    say("compose-test passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
