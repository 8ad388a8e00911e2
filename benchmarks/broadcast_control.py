"""How long a signed call takes to a node whose uplink is full of chunks, and from it.

Node 0 serves a file to two others, which pull as fast as its uplink gives; its uplink alone is narrow. Node 1
calls it all the while, and it calls node 1: each call is a worker's question for credit, answered at once.
"""

import logging
import statistics
from dataclasses import dataclass
from typing import Any

import trio

from benchmarks.broadcast_swarmnode import ExchangeNode, told
from benchmarks.broadcast_system import SOURCE, START_TIMEOUT_S, Task, make_file
from benchmarks.lab_process import Channel
from benchmarks.link_rates import measure_rates
from benchmarks.netlab import Lab, Link
from peers.base import PeerId, TransportError
from protocol.base import Message
from protocol.messages import Credit, CreditRequest
from protocol.refusals import Refused

RECEIVERS = 2
FAST_MBIT = 200.0
CALL_EVERY_S = 0.1
CALL_TIMEOUT_S = 20.0
WARM_UP_S = 5.0
IDLE_CALLS = 20
POLICY = bytes(32)


@dataclass(frozen=True)
class ControlRow:
    """One narrow uplink and what its calls may take, 99th percentile."""

    up_mbit: float
    bar_s: float


CONTROL_ROWS = {"control20": ControlRow(20.0, 0.5), "control1": ControlRow(1.0, 1.5)}


def run_control_row(row: ControlRow, chunk_size: int, duration_s: float) -> dict[str, Any]:
    """Measure one row: seconds of calls while the uplink is full, both ways."""
    links = [Link(row.up_mbit, FAST_MBIT), *[Link(FAST_MBIT, FAST_MBIT)] * RECEIVERS]
    with Lab(links) as lab:
        up = measure_rates(lab)[SOURCE].up
        # Enough for the whole time and more, even if every byte leaves the source only once.
        size_bytes = int(up * (duration_s + WARM_UP_S) * 1.3) + 4 * chunk_size
        file = make_file(lab.directory / "file", size_bytes, chunk_size)
        processes = []
        for number in range(len(links)):
            task = Task(number, lab.address(number), file, lab.scratch(f"node-{number}"))
            processes.append(lab.start(number, f"node-{number}", _run, task, duration_s))
        addresses = [process.receive(START_TIMEOUT_S)["address"] for process in processes]
        for process in processes:
            process.send(connect=addresses)
        idle = [process.receive(START_TIMEOUT_S)["calls_s"] for process in processes]
        for process in processes:
            process.send(start=True)
        processes[SOURCE].receive(WARM_UP_S + 30)
        before, _ = lab.traffic(SOURCE)
        loaded = [process.receive(duration_s + CALL_TIMEOUT_S + 30) for process in processes[:2]]
        sent = lab.traffic(SOURCE)[0] - before
        return {
            "up_mbit": row.up_mbit,
            "bar_s": row.bar_s,
            "uplink_used": sent / (row.up_mbit * 125_000 * loaded[SOURCE]["seconds"]),
            "idle": _figures(idle[1], 0),
            "calls_to_loaded": _figures(loaded[1]["calls_s"], loaded[1]["failed"]),
            "calls_from_loaded": _figures(loaded[0]["calls_s"], loaded[0]["failed"]),
        }


def _figures(seconds: list[float], failed: int) -> dict[str, Any]:
    ordered = sorted(seconds) or [float("inf")]
    return {
        "calls": len(seconds),
        "failed": failed,
        "median_s": statistics.median(ordered),
        "p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "worst_s": ordered[-1],
    }


def _run(channel: Channel, task: Task, duration_s: float) -> None:
    logging.basicConfig(level=logging.INFO)
    trio.run(_take_part, channel, task, duration_s)


async def _take_part(channel: Channel, task: Task, duration_s: float) -> None:
    node = ExchangeNode(task)
    node.swarm.serve("credit_request", _grant)
    async with node.running():
        own = node.transport.addresses[0]
        channel.send(address=own)
        addresses = (await told(channel))["connect"]
        await node.connect(addresses)
        other = await node.transport.connect(addresses[1 if task.is_source else SOURCE], CALL_TIMEOUT_S)
        idle = [seconds for _ in range(IDLE_CALLS) if (seconds := await _call(node, other)) is not None]
        channel.send(calls_s=idle)
        await told(channel)
        async with trio.open_nursery() as nursery:
            if not task.is_source:
                nursery.start_soon(node.fetch)
            await trio.sleep(WARM_UP_S)
            if task.is_source:
                channel.send(warm=True)
            if task.number <= 1:
                channel.send(**await _call_for(node, other, duration_s))
            await trio.sleep_forever()


async def _call_for(node: ExchangeNode, other: PeerId, duration_s: float) -> dict[str, Any]:
    """Call again and again; a call that is not answered in time counts as failed."""
    began = trio.current_time()
    calls: list[float | None] = []
    while trio.current_time() < began + duration_s:
        calls.append(await _call(node, other))
        await trio.sleep(CALL_EVERY_S)
    return {
        "calls_s": [seconds for seconds in calls if seconds is not None],
        "failed": calls.count(None),
        "seconds": trio.current_time() - began,
    }


async def _call(node: ExchangeNode, other: PeerId) -> float | None:
    began = trio.current_time()
    try:
        request = CreditRequest(policy=POLICY, version=0, wanted=1)
        await node.swarm.call(other, request, timeout_s=CALL_TIMEOUT_S, expect=Credit)
    except (TransportError, Refused):
        logging.getLogger(__name__).warning("a call failed", exc_info=True)
        return None
    return trio.current_time() - began


async def _grant(sender: PeerId, message: Message) -> tuple[str, Message]:
    return "credit", Credit(granted=1, version=0, retry_after_s=0)
