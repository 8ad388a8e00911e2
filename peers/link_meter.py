"""How full a node's way out is, from what Linux knows of its TCP connections.

Whatever TCP's congestion control allows, bulk is given to the kernel only while what is under way would reach
its receivers within the shortest round trip and `QUEUE_S` more. So a control message never waits behind more
than that, in the kernel or in the router's queue. On other systems there is no such bound, only that on what
waits unsent in each socket.
"""

import struct
from collections import deque

import trio

from peers.libp2p_socket import PeerSocket

QUEUE_S = 0.08
"""How much bulk may stand in queues, in seconds of the link's rate: enough to keep the link busy while this
process waits for the processor."""

UNSENT_S = 0.06
"""How much may wait unsent in sockets, in the same measure: a connection that begins sends little at once."""

LEAST_LIMIT_BYTES = 12 * 1024
FIRST_LIMIT_BYTES = 128 * 1024

RATE_INTERVAL_S = 0.25
RATE_WINDOW_S = 2.0
"""The rate is the best of so many seconds, measured over such intervals."""

SAMPLE_S = 0.002
"""The kernel is not asked more often than this."""

STUCK_S = 1.0
"""What waits unsent in a socket whose peer has acknowledged nothing for so long is not on its way."""

MAX_ROUND_TRIP_S = 0.5

_ACKED, _NOTSENT, _MIN_RTT = 120, 144, 148
"""Where in `struct tcp_info`: u64 bytes_acked, u32 notsent_bytes, u32 min_rtt in microseconds."""
_NEEDED_BYTES = 152
_U64, _U32 = struct.Struct("=Q"), struct.Struct("=I")


class LinkMeter:
    """Watches the connections that have something under way."""

    def __init__(self) -> None:
        self._active: dict[PeerSocket, tuple[int, float]] = {}
        """With what the kernel said last to be acknowledged, and since when."""
        self._in_flight_bytes = 0
        self._unsent_bytes = 0
        self._given_bytes = 0
        """Given to the kernel since it was asked."""
        self._sampled_s = 0.0
        self._round_trip_s = 0.0
        self._acked_bytes = 0
        self._interval_s = 0.0
        self._rates: deque[tuple[float, float]] = deque()

    def sent(self, socket: PeerSocket, size_bytes: int) -> None:
        """So much was given to the kernel."""
        self._given_bytes += size_bytes
        if socket not in self._active:
            self._active[socket] = socket.sent_bytes - size_bytes, trio.current_time()

    def rate(self) -> float | None:
        """Bytes per second that the link has carried lately at its best; None before anything is known."""
        return max((rate for _, rate in self._rates), default=None)

    def room_s(self, taken_bytes: int) -> float:
        """How long until more bulk may be sent, 0 if it may be now."""
        now_s = trio.current_time()
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sample(now_s)
        rate = self.rate()
        in_flight = self._in_flight_bytes + self._given_bytes + taken_bytes
        if rate is None:
            excess: float = in_flight - FIRST_LIMIT_BYTES
        else:
            most_in_flight = max(LEAST_LIMIT_BYTES, rate * (self._round_trip_s + QUEUE_S))
            most_unsent = max(LEAST_LIMIT_BYTES, rate * UNSENT_S)
            excess = max(in_flight - most_in_flight, self._unsent_bytes - most_unsent)
        if excess < 0 or in_flight == 0:
            return 0.0
        expected_s = excess / rate if rate else SAMPLE_S
        return min(0.02, max(SAMPLE_S, expected_s))

    def _sample(self, now_s: float) -> None:
        """Ask the kernel about every connection with something under way."""
        self._sampled_s = now_s
        self._given_bytes = self._in_flight_bytes = self._unsent_bytes = 0
        round_trip_s = 0.0
        for socket, (acked_before, since_s) in list(self._active.items()):
            info = socket.tcp_info()
            if info is None or len(info) < _NEEDED_BYTES:
                del self._active[socket]
                continue
            (acked,) = _U64.unpack_from(info, _ACKED)
            (not_sent,) = _U32.unpack_from(info, _NOTSENT)
            (min_rtt_us,) = _U32.unpack_from(info, _MIN_RTT)
            if acked > acked_before:
                self._acked_bytes += acked - acked_before
                since_s = now_s
            if now_s - since_s <= STUCK_S:
                self._unsent_bytes += not_sent
            self._in_flight_bytes += max(0, socket.sent_bytes - acked - not_sent)
            round_trip_s = max(round_trip_s, min(MAX_ROUND_TRIP_S, min_rtt_us / 1e6))
            if socket.sent_bytes <= acked:
                del self._active[socket]
            else:
                self._active[socket] = acked, since_s
        if self._active:
            self._round_trip_s = round_trip_s
        elapsed_s = now_s - self._interval_s
        if elapsed_s >= RATE_INTERVAL_S:
            if elapsed_s < 4 * RATE_INTERVAL_S:
                self._rates.append((now_s, self._acked_bytes / elapsed_s))
            self._acked_bytes = 0
            self._interval_s = now_s
            while self._rates and self._rates[0][0] < now_s - RATE_WINDOW_S:
                self._rates.popleft()
