"""How long a version takes from its publication to a ready worker: the network's own limit, for who has no
measurement yet. Sizes are bytes, rates megabits per second, times seconds."""

from dataclasses import dataclass

MBIT = 1e6 / 8
"""Bytes per second of one megabit per second."""


@dataclass(frozen=True)
class Link:
    """A node's line."""

    upload_mbps: float
    download_mbps: float
    round_trip_s: float = 0.0
    serves: bool = True
    """Whether it can hand chunks to others (behind some NATs it cannot)."""


@dataclass(frozen=True)
class Broadcast:
    """One version on its way to its receivers."""

    size_bytes: float
    swarm_s: float
    """What the source's uplink and all uplinks together take: no receiver is done before."""
    overhead: float

    def seconds(self, link: Link) -> float:
        """From the publication until `link`'s node has all of it."""
        own_s = self.size_bytes / (link.download_mbps * MBIT) if link.download_mbps > 0 else float("inf")
        return self.overhead * max(self.swarm_s, own_s) + link.round_trip_s


def plan_broadcast(
    size_bytes: float, source_upload_mbps: float, links: list[Link], *, overhead: float = 1.15
) -> Broadcast:
    """The fluid limit max(S/u_source, N·S/(u_source + Σu)), stretched by `overhead`.

    It holds for pieces served onward as they come; per receiver its own line is added by `Broadcast.seconds`.
    `overhead` is what a real exchange loses to round trips, headers and the order of pieces.
    """
    return broadcast_from_totals(
        size_bytes,
        source_upload_mbps,
        receivers=len(links),
        serving_mbps=sum(link.upload_mbps for link in links if link.serves),
        overhead=overhead,
    )


def broadcast_from_totals(
    size_bytes: float,
    source_upload_mbps: float,
    *,
    receivers: int,
    serving_mbps: float,
    overhead: float = 1.15,
) -> Broadcast:
    """`plan_broadcast` from the number of receivers and the sum of their uplinks."""
    if receivers == 0:
        return Broadcast(size_bytes, 0.0, overhead)
    source = size_bytes / (source_upload_mbps * MBIT)
    together = receivers * size_bytes / ((source_upload_mbps + serving_mbps) * MBIT)
    return Broadcast(size_bytes, max(source, together), overhead)
