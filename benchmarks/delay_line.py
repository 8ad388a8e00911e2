"""A delay line for packets: TUN devices whose packets come out again later, some of them never.

Not every kernel has netem. A packet routed into the device is read here, kept for its time, and written back,
after which it goes on as if nothing had been. So TCP itself feels the delay, as on a long cable.
"""

import fcntl
import os
import random
import select
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.lab_process import Channel
from benchmarks.namespaces import entered

DEVICE = "delay"
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Per line. More waits only if the senders' windows hold more: 100 ms of 5 Gbit/s."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_PACKET_BYTES = 65536 + 64


@dataclass
class _Line:
    descriptor: int
    delay_s: float
    loss: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0


def run_delay_lines(channel: Channel, lines: list[tuple[str, float, float]]) -> None:
    """Work of a lab process: a TUN device in each (namespace, delay in seconds, share of packets lost)."""
    opened = [_Line(_open(namespace, loss), delay_s, loss) for namespace, delay_s, loss in lines]
    channel.send(event="ready")
    by_descriptor = {line.descriptor: line for line in opened}
    poll = select.epoll()
    for line in opened:
        poll.register(line.descriptor, select.EPOLLIN)
    while True:
        first = min((line.waiting[0][0] for line in opened if line.waiting), default=None)
        timeout_s = None if first is None else max(0.0, first - time.monotonic())
        for descriptor, _ in poll.poll(timeout_s):
            _take(by_descriptor[descriptor])
        now = time.monotonic()
        for line in opened:
            while line.waiting and line.waiting[0][0] <= now:
                _, packet = line.waiting.popleft()
                line.waiting_bytes -= len(packet)
                with suppress(OSError):  # no room further on: a packet is lost, as in any router
                    os.write(line.descriptor, packet)


def _take(line: _Line) -> None:
    while True:
        try:
            packet = os.read(line.descriptor, _PACKET_BYTES)
        except BlockingIOError:
            return
        if line.waiting_bytes + len(packet) > MAX_WAITING_BYTES or random.random() < line.loss:
            continue
        line.waiting.append((time.monotonic() + line.delay_s, packet))
        line.waiting_bytes += len(packet)


def _open(namespace: str, loss: float) -> int:
    """A TUN device in a namespace. Without loss it takes segments of up to 64 KiB, which costs far less."""
    with entered(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, 0 if loss else _TUN_F_CSUM | _TUN_F_TSO4)
    return descriptor
