"""What one download knows of one peer: what it has, what was asked of it, how fast it is. No clock."""

import math
from dataclasses import dataclass, field

from peers.base import PeerId
from peers.chunk_frames import Mask

BUSY_LOAD = 2
"""A peer for which so many chunks wait has enough to do: one request of ours is open with it, else two, so
that it need not wait for us."""

MAX_WINDOW = 16
"""Requests open with one peer where a round trip takes as long as many chunks."""

_WEIGHT = 0.3
"""Of the newest measurement in a moving average."""


@dataclass
class Asked:
    """One chunk asked of one peer."""

    asked_s: float
    ahead: float = 0.0
    """How many chunks were expected to wait before it."""
    spare: bool = False
    first_piece_s: float | None = None
    first_piece_bytes: int = 0
    received_bytes: int = 0


@dataclass(eq=False)
class Neighbour:
    """A peer with a session. Times are in seconds of one clock, durations measured lately."""

    peer: PeerId
    round_trip_s: float = 0.0
    held: Mask | None = None
    """What it has; None until it has said so."""
    giving: bool = False
    gives_at_s: float = -math.inf
    """When it may be asked for chunks of its choice again, having had none for us."""
    asked: dict[int, Asked] = field(default_factory=dict)
    any_asked: list[float] = field(default_factory=list)
    """When chunks of its choice were asked for that have not begun to come."""
    load: int = 0
    load_s: float = -math.inf
    """How many chunks waited at it, as it said, and when."""
    latency_s: float | None = None
    """How long it takes from asking for a chunk to having it."""
    service_s: float | None = None
    """How long it takes to send a chunk."""
    interval_s: float | None = None
    """How often it brings a chunk while it is asked for more."""
    heard_s: float = -math.inf
    """When it last brought a piece, or was asked for the first of what is open."""
    finished_s: float = -math.inf
    ready_s: float = -math.inf
    """When it may be asked again after a failure."""
    failures: int = 0
    """In a row."""

    @property
    def open(self) -> int:
        """How many requests are open with it."""
        return len(self.asked) + len(self.any_asked)

    def waiting(self, now_s: float) -> float:
        """How many chunks are expected to wait at it now: those of which it spoke, less what it can have
        sent since."""
        if self.service_s is None:
            return float(self.load)
        return max(0.0, self.load - (now_s - self.load_s) / max(self.service_s, 1e-3))

    def window(self, now_s: float) -> int:
        """How many requests may be open with it."""
        if self.failures:
            return 1
        least = 1 if self.waiting(now_s) >= BUSY_LOAD else 2
        if self.interval_s is None:
            return least
        return min(MAX_WINDOW, least + int(self.round_trip_s / max(self.interval_s, 1e-3)))

    def brought(self, asked: Asked, size_bytes: int, now_s: float) -> None:
        """All of a chunk came: learn from when."""
        took_s, since_s = now_s - asked.asked_s, now_s - max(self.finished_s, asked.asked_s)
        self.latency_s = _average(self.latency_s, took_s)
        self.interval_s = _average(self.interval_s, since_s)
        self.finished_s = now_s
        self.failures = 0
        assert asked.first_piece_s is not None
        after_first = size_bytes - asked.first_piece_bytes
        if after_first > 0:
            sending_s = (now_s - asked.first_piece_s) * size_bytes / after_first
            self.service_s = _average(self.service_s, sending_s)
        else:
            # In one piece: `since_s` includes the wait for chunks that went to others; the best tells most.
            is_best = self.service_s is None or since_s < self.service_s
            self.service_s = _average(self.service_s, since_s, 1.0 if is_best else 0.02)


def _average(old: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if old is None else old + weight * (new - old)
