"""What one plain TCP stream carries through each link of a laboratory, and the least time of a broadcast."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab_process import Channel
from benchmarks.netlab import Lab

PORT = 4000
WARM_UP_S = 4.0
"""What TCP lost in its first overshoot is sent again later and would count in another second than it came."""
MEASURE_S = 6.0
_PIECE = 64 * 1024


@dataclass(frozen=True)
class Rates:
    """Payload bytes per second of one TCP stream, everything of the stream's overhead subtracted."""

    up: float
    down: float


def fluid_limit_s(size_bytes: int, source_up: float, peers: Sequence[Rates]) -> float:
    """The least time in which `size_bytes` can reach all peers, were data a fluid that needs no chunks:
    max(S/u_s, S/d_min, N·S/(u_s + Σu_i)) (Kumar and Ross, "Peer-assisted file distribution", 2006)."""
    total = len(peers) * size_bytes
    return max(
        size_bytes / source_up,
        size_bytes / min(peer.down for peer in peers),
        total / (source_up + sum(peer.up for peer in peers)),
    )


def measure_rates(lab: Lab) -> list[Rates]:
    """Of each node: up with all uplinks busy at once, then down with all downlinks busy at once."""
    ups = _measure(lab, sending_to_hub=True)
    downs = _measure(lab, sending_to_hub=False)
    return [Rates(up, down) for up, down in zip(ups, downs, strict=True)]


def _measure(lab: Lab, *, sending_to_hub: bool) -> list[float]:
    name = "up" if sending_to_hub else "down"
    hub = lab.start(None, f"rate-{name}-hub", _hub, len(lab.links), sending_to_hub)
    hub.receive(10)
    nodes = [
        lab.start(number, f"rate-{name}-{number}", _node, lab.hub_address, number, sending_to_hub)
        for number in range(len(lab.links))
    ]
    results = hub if sending_to_hub else None
    if results is not None:
        rates = results.receive(WARM_UP_S + MEASURE_S + 30)["rates"]
        found = [rates[str(number)] for number in range(len(nodes))]
    else:
        found = [node.receive(WARM_UP_S + MEASURE_S + 30)["rate"] for node in nodes]
    for process in [hub, *nodes]:
        process.kill()
    return [float(rate) for rate in found]


def _hub(channel: Channel, count: int, sending_to_hub: bool) -> None:
    """Take `count` connections, each of which begins with its node's number; receive or send on all."""
    listener = socket.create_server(("0.0.0.0", PORT), backlog=count)
    channel.send(event="ready")
    rates: dict[str, float] = {}

    def serve(connection: socket.socket) -> None:
        number = connection.recv(1)[0]
        if sending_to_hub:
            rates[str(number)] = _receive(connection)
        else:
            _send(connection)

    threads = [threading.Thread(target=serve, args=(listener.accept()[0],)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    channel.send(rates=rates)
    channel.receive()


def _node(channel: Channel, hub: str, number: int, sending: bool) -> None:
    connection = socket.create_connection((hub, PORT), timeout=10)
    connection.settimeout(None)
    connection.sendall(bytes([number]))
    if sending:
        _send(connection)
    else:
        channel.send(rate=_receive(connection))
        channel.receive()


def _send(connection: socket.socket) -> None:
    piece = bytes(_PIECE)
    try:
        while True:
            connection.sendall(piece)
    except OSError:
        pass  # the receiver has seen enough


def _receive(connection: socket.socket) -> float:
    """Bytes per second after the warm-up."""
    buffer = bytearray(_PIECE)
    began = time.monotonic()
    while time.monotonic() - began < WARM_UP_S:
        connection.recv_into(buffer)
    began, received = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < MEASURE_S:
        received += connection.recv_into(buffer)
    connection.close()
    return received / elapsed
