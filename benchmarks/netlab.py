"""A network laboratory on one machine: every node in a network namespace of its own behind a capped link.

    node 0 [eth0] -- [lan] gateway 0 [wan] -- [p0] hub [p1] -- [wan] gateway 1 [lan] -- [eth0] node 1 ...

A gateway is the node's home router: `tc tbf` on its wan side caps the uplink, on its lan side the downlink.
It forwards on the IP layer, so its queue fills and drops as a real one's does (a cap on the node's own
interface would push back into the sender's TCP, which flatters it). `Link.delay_ms` holds packets back on
their way up, in a user-space delay line, because not every kernel has netem; a round trip between two nodes
takes the sum of both.

Needs root, iproute2 and the kernel's veth, tbf and tun. Nothing outside the namespaces is touched. Everything
is removed at the end, by a watchdog process when this one is killed, and by the next run or

    python -m benchmarks.netlab clean

when both were. `python -m benchmarks.netlab check` builds a small laboratory and measures its links.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.delay_line import DEVICE, run_delay_lines
from benchmarks.lab_process import LabProcess, Work
from benchmarks.namespaces import (
    SCRATCH,
    LabError,
    entered,
    ip,
    remove_dead_runs,
    remove_run,
    run_prefix,
)

MAX_NODES = 120
QUEUE_MS = 100.0
"""How long a packet waits at most in a full gateway: what a home router with a moderate buffer does."""

MIN_QUEUE_BYTES = 10 * 1514
BURST_MS = 10.0
MIN_BURST_BYTES = 2 * 1514 + 64
"""The bucket: what may pass at line rate after a pause. Two packets at least, or tbf would starve."""


@dataclass(frozen=True)
class Link:
    """One node's access to the network. `delay_ms` and `loss` (a share) apply on the way up."""

    up_mbit: float
    down_mbit: float
    delay_ms: float = 0.0
    loss: float = 0.0


def why_not() -> str | None:
    """What keeps a laboratory from being built here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing: install iproute2"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    return None


class Lab:
    """The laboratory for `with`: builds the network, starts processes in it, reads its counters."""

    def __init__(self, links: Sequence[Link], *, congestion_control: str = "cubic") -> None:
        """`congestion_control`: of all TCP in the laboratory. Cubic is what nearly every machine has."""
        reason = why_not()
        if reason is not None:
            raise LabError(f"no laboratory here: {reason}")
        if not 1 <= len(links) <= MAX_NODES:
            raise LabError(f"a laboratory has 1 to {MAX_NODES} nodes, not {len(links)}")
        self.links = list(links)
        self._congestion_control = congestion_control
        self._prefix = run_prefix(os.getpid())
        self._processes: list[LabProcess] = []
        self._watchdog = -1
        self._watchdog_pipe = -1

    def __enter__(self) -> "Lab":
        remove_dead_runs()
        if list(SCRATCH.glob(f"{self._prefix}*")):
            raise LabError("this process has a laboratory already")
        self.directory = SCRATCH / f"{self._prefix}files"
        self.directory.mkdir()
        try:
            self._start_watchdog()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs and remove everything."""
        for process in self._processes:
            process.kill()
        remove_run(self._prefix)
        if self._watchdog > 0:
            os.write(self._watchdog_pipe, b"done")
            os.close(self._watchdog_pipe)
            os.waitpid(self._watchdog, 0)
            self._watchdog = -1

    def address(self, node: int) -> str:
        """The node's IP address, reachable from every other node."""
        return f"10.77.{node}.2"

    @property
    def hub_address(self) -> str:
        """An address of the uncapped middle of the network."""
        return "10.78.0.1"

    def start(self, node: int | None, name: str, work: Work, *arguments: Any) -> LabProcess:
        """Run `work(channel, *arguments)` in a process of its own at a node, or at the hub (None)."""
        namespace = self._hub if node is None else self._node(node)
        log = self.directory / f"{name}.log"
        process = LabProcess(name, namespace, log, self._child(work), *arguments)
        self._processes.append(process)
        return process

    def scratch(self, name: str) -> Path:
        """A new directory for files, in memory, removed with the laboratory."""
        path = self.directory / name
        path.mkdir()
        return path

    def scratch_elsewhere(self, parent: Path) -> Path:
        """A new directory below `parent`, for more than fits into memory; removed with the laboratory."""
        path = parent.resolve() / f"{self._prefix}data"
        (self.directory / "elsewhere").symlink_to(path)
        path.mkdir()
        return path

    def traffic(self, node: int) -> tuple[int, int]:
        """Bytes that the node's interface has (sent, received) so far, headers and all."""
        with entered(self._node(node)):
            for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
                interface, _, counters = line.partition(":")
                if interface.strip() == "eth0":
                    fields = counters.split()
                    return int(fields[8]), int(fields[0])
        raise LabError(f"node {node} has no interface")

    # Building

    @property
    def _hub(self) -> str:
        return f"{self._prefix}hub"

    def _node(self, number: int) -> str:
        return f"{self._prefix}n{number}"

    def _gateway(self, number: int) -> str:
        return f"{self._prefix}g{number}"

    def _build(self) -> None:
        numbers = range(len(self.links))
        gateways = [self._gateway(i) for i in numbers]
        ip(lines=[f"netns add {name}" for name in [self._hub, *gateways, *map(self._node, numbers)]])
        for i in numbers:
            self._build_node(i)
        hub = [f"address add 10.78.{i}.1/24 dev p{i}" for i in numbers]
        hub += [f"link set p{i} up" for i in numbers]
        routed = f"congctl {self._congestion_control}"
        hub += [f"route add 10.77.{i}.0/24 via 10.78.{i}.2 {routed}" for i in numbers]
        ip("-n", self._hub, lines=["link set lo up", *hub])
        _set_sysctls(self._hub, {"ip_forward": 1, "tcp_no_metrics_save": 1})
        self._delay(
            [(i, link.delay_ms / 1e3, link.loss) for i, link in enumerate(self.links) if _is_delayed(link)]
        )

    def _build_node(self, i: int) -> None:
        node, gateway, link = self._node(i), self._gateway(i), self.links[i]
        lines = [
            "link set lo up",
            f"link add name lan type veth peer name eth0 netns {node}",
            f"link add name wan type veth peer name p{i} netns {self._hub}",
            f"address add 10.77.{i}.1/24 dev lan",
            f"address add 10.78.{i}.2/24 dev wan",
            "link set lan up",
            "link set wan up",
            f"route add default via 10.78.{i}.1",
        ]
        ip("-n", gateway, lines=lines)
        lines = [
            "link set lo up",
            f"address add 10.77.{i}.2/24 dev eth0",
            "link set eth0 up",
            f"route add default via 10.77.{i}.1 congctl {self._congestion_control}",
        ]
        ip("-n", node, lines=lines)
        _set_sysctls(gateway, {"ip_forward": 1, "conf/all/rp_filter": 0, "conf/default/rp_filter": 0})
        _set_sysctls(node, {"tcp_no_metrics_save": 1})
        with entered(gateway):
            _cap("wan", link.up_mbit)
            _cap("lan", link.down_mbit)

    def _delay(self, delayed: list[tuple[int, float, float]]) -> None:
        if not delayed:
            return
        lines = [(self._gateway(i), delay_s, loss) for i, delay_s, loss in delayed]
        log = self.directory / "delay.log"
        process = LabProcess("the delay line", None, log, self._child(run_delay_lines), lines)
        self._processes.append(process)
        process.receive(10)
        for gateway, _, _ in lines:
            ip("-n", gateway, lines=[f"link set {DEVICE} up", f"route add default dev {DEVICE} table 77"])
            _set_sysctls(gateway, {f"conf/{DEVICE}/rp_filter": 0, "conf/lan/rp_filter": 0})
            # What comes from the node goes through the delay line, and what comes out of that to the wan.
            ip("-n", gateway, "rule", "add", "iif", "lan", "table", "77")

    def _child(self, work: Work) -> Work:
        watchdog_pipe = self._watchdog_pipe

        def run(*arguments: Any) -> None:
            os.close(watchdog_pipe)  # the watchdog waits for its last holder
            work(*arguments)

        return run

    def _start_watchdog(self) -> None:
        ending, self._watchdog_pipe = os.pipe()
        self._watchdog = os.fork()
        if self._watchdog == 0:
            os.close(self._watchdog_pipe)
            _watch(ending, self._prefix)
        os.close(ending)


def _watch(ending: int, prefix: str) -> None:
    """The watchdog: waits until the run ends, and cleans up after it if it could not say so."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Whoever waits for the end of the run's output must not wait for this process.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if os.read(ending, 4) != b"done":
            remove_run(prefix)
    finally:
        os._exit(0)


def _is_delayed(link: Link) -> bool:
    return link.delay_ms > 0 or link.loss > 0


def _cap(interface: str, mbit: float) -> None:
    bytes_per_ms = mbit * 125
    burst = max(int(bytes_per_ms * BURST_MS), MIN_BURST_BYTES)
    limit = burst + max(int(bytes_per_ms * QUEUE_MS), MIN_QUEUE_BYTES)
    shape = f"rate {int(mbit * 1e6)}bit burst {burst} limit {limit}".split()
    command = ["tc", "qdisc", "add", "dev", interface, "root", "tbf", *shape]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def _set_sysctls(namespace: str, values: dict[str, int]) -> None:
    with entered(namespace):
        for name, value in values.items():
            Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The network laboratory: clean up after dead runs, or try it."
    )
    parser.add_argument("command", choices=["clean", "check"])
    if parser.parse_args().command == "clean":
        print(f"{remove_dead_runs()} namespaces of dead runs removed")
        return
    from benchmarks.link_rates import measure_rates

    links = [Link(8, 32), Link(8, 32, delay_ms=50), Link(4, 16, delay_ms=50, loss=0.01)]
    with Lab(links) as lab:
        for number, (link, rates) in enumerate(zip(links, measure_rates(lab), strict=True)):
            print(
                f"node {number}: {link.up_mbit:g}/{link.down_mbit:g} Mbit/s, {link.delay_ms:g} ms, "
                f"{link.loss:.0%} lost: one TCP stream carries {rates.up * 8e-6:.2f} up, "
                f"{rates.down * 8e-6:.2f} Mbit/s down"
            )


if __name__ == "__main__":
    main()
