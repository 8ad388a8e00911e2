"""Sessions of the in-memory network, and the wire that a node's messages share on their way out and in."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable

import trio

from peers.base import PeerId, SessionEnded
from peers.memory_link import Links
from peers.signal import Signal

AHEAD_S = 0.02
"""Bulk waits for its turn while so much is on its way out already."""

RETRANSMIT_S = 0.2
"""A lost message of a session comes later by this and a round trip: the sender's TCP repeats it."""

WINDOW_BYTES = 256 * 1024
"""Bulk waits while so much lies unread at the receiver."""


class MemoryWire:
    """One node's way out and in: what is sent leaves in its order, at the link's rate. None: no limit."""

    def __init__(self, uplink_bytes_per_s: float | None, downlink_bytes_per_s: float | None) -> None:
        self.uplink_bytes_per_s = uplink_bytes_per_s
        self.downlink_bytes_per_s = downlink_bytes_per_s
        self.bytes_sent: Counter[str] = Counter()
        self._out_free_s = -math.inf
        self._in_free_s = -math.inf

    def leave(self, label: str, size_bytes: int) -> float:
        """Send something; when it will have left."""
        self.bytes_sent[label] += size_bytes
        now_s = trio.current_time()
        if self.uplink_bytes_per_s is None:
            return now_s
        self._out_free_s = max(now_s, self._out_free_s) + size_bytes / self.uplink_bytes_per_s
        return self._out_free_s

    def enter(self, size_bytes: int, from_s: float) -> float:
        """Take something in that reaches the downlink at `from_s`; when it will be here."""
        if self.downlink_bytes_per_s is None:
            return from_s
        self._in_free_s = max(from_s, self._in_free_s) + size_bytes / self.downlink_bytes_per_s
        return self._in_free_s

    def room_s(self, taken_bytes: int) -> float:
        """How long until bulk may be sent."""
        if self.uplink_bytes_per_s is None:
            return 0.0
        busy_until_s = max(trio.current_time(), self._out_free_s) + taken_bytes / self.uplink_bytes_per_s
        return max(0.0, busy_until_s - trio.current_time() - AHEAD_S)


class MemorySession:
    """One end of a session. Made in pairs by `pair`."""

    def __init__(
        self,
        owner: PeerId,
        peer: PeerId,
        protocol: str,
        max_message_bytes: int,
        links: Links,
        wire: MemoryWire,
        reachable: Callable[[PeerId, PeerId], bool],
    ) -> None:
        self.owner = owner
        self._peer = peer
        self._protocol = protocol
        self._max_message_bytes = max_message_bytes
        self._links = links
        self._wire = wire
        self._reachable = reachable
        self._other: MemorySession
        self._inbox: deque[tuple[float, bytes]] = deque()
        self._unread_bytes = 0
        self._last_arrival_s = -math.inf
        self._numbers = itertools.count()
        self._news = Signal()
        self._read = Signal()
        self._ends_s = math.inf
        """When this end notices that the session is over."""

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def round_trip_s(self) -> float:
        there = self._links.between(self.owner, self._peer)
        back = self._links.between(self._peer, self.owner)
        return there.delay_s + back.delay_s

    @property
    def ended(self) -> bool:
        return trio.current_time() >= self._ends_s

    async def send(self, message: bytes) -> None:
        """See `Session`."""
        self._send(message)
        await trio.lowlevel.checkpoint()

    async def wait_bulk(self, size_bytes: int) -> None:
        """See `Session`."""
        while self._other._unread_bytes >= WINDOW_BYTES and not self.ended:
            await self._other._read.wait()

    async def send_bulk(self, head: bytes, body: bytes | memoryview) -> None:
        """See `Session`."""
        await self.wait_bulk(len(head) + len(body))
        self._send(head + body)
        await trio.lowlevel.checkpoint()

    def _send(self, message: bytes) -> None:
        if self.ended:
            raise SessionEnded("the session is over")
        other = self._other
        number = str(next(self._numbers))
        passage = self._links.carry(self.owner, self._peer, f"{self._protocol} {number}", message)
        left_s = self._wire.leave(self._protocol, len(message))
        arrival_s = other._wire.enter(len(message), left_s + passage.delay_s)
        if not passage.arrives:
            arrival_s += RETRANSMIT_S + 2 * passage.delay_s
        elif passage.arrives[0] != message or len(message) > other._max_message_bytes:
            # As over Noise: what is not what was sent ends the connection, and nobody is to blame.
            other.end(arrival_s - trio.current_time())
            self.end(arrival_s - trio.current_time() + passage.delay_s)
            return
        other._last_arrival_s = max(other._last_arrival_s, arrival_s)
        other._inbox.append((other._last_arrival_s, message))
        other._unread_bytes += len(message)
        if len(other._inbox) == 1:
            other._news.set()

    async def receive(self) -> bytes:
        """See `Session`."""
        while True:
            now_s = trio.current_time()
            arrival_s = self._inbox[0][0] if self._inbox else math.inf
            if arrival_s <= now_s and not self._reachable(self._peer, self.owner):
                arrival_s = now_s + RETRANSMIT_S
            if arrival_s <= now_s and arrival_s <= self._ends_s:
                _, message = self._inbox.popleft()
                self._unread_bytes -= len(message)
                self._read.set()
                await trio.lowlevel.checkpoint()
                return message
            if self.ended:
                raise SessionEnded("the other side ended the session")
            with trio.move_on_at(min(arrival_s, self._ends_s)):
                await self._news.wait()

    async def aclose(self) -> None:
        """See `Session`."""
        self.end(0.0)
        delay_s = self._links.between(self.owner, self._peer).delay_s
        self._other.end(max(self._other._last_arrival_s - trio.current_time(), delay_s))
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()

    def end(self, in_s: float) -> None:
        """Let this end notice after so long that the session is over."""
        self._ends_s = min(self._ends_s, trio.current_time() + max(0.0, in_s))
        self._news.set()
        self._read.set()


def pair(a: MemorySession, b: MemorySession) -> None:
    """Make the two ends of one session."""
    a._other, b._other = b, a
