"""What a worker offers, as the planner sees it."""

import math
from dataclasses import dataclass

from swarmnode.scheduler.capacity import Demand, Timing


@dataclass(frozen=True)
class WorkerOffer:
    """One worker. Rates come from measurements where there are any, from its offer where not."""

    worker: bytes
    timing: Timing
    name: str = ""
    owner: str = ""
    """Who runs it, for the bound on any one owner's share; empty: its own."""
    region: str = ""
    device: str = ""
    memory_gb: float = math.inf
    price_per_hour: float = 0.0
    """Paid while it is active or draining; 0 for a volunteer."""
    presence: float = 1.0
    """The chance that it is there and works when it is counted on."""
    departures_per_hour: float = 0.0
    rate_spread: float = 0.1
    """Standard deviation of its rate from one minute to the next, relative to the rate."""
    traffic_mbps: float = 0.0
    """What it takes of its region's link while it is active."""
    start_s: float = 0.0
    """From its activation to its first group beyond the group's own time: what fetching and loading weights
    takes."""
    available_for_s: float = math.inf
    """Until its hours end, its owner's cap of hours or dollars is reached, or its lease is over."""

    def presence_for(self, horizon_s: float) -> float:
        """The chance that it is there now and still after `horizon_s`."""
        return self.presence * math.exp(-self.departures_per_hour * horizon_s / 3600)


def traffic_mbps(demand: Demand, timing: Timing, *, version_bytes: float, group_bytes: float) -> float:
    """What an active worker moves at most: a version every κ updates, and groups at its full rate."""
    groups = timing.groups_per_s * group_bytes
    return (version_bytes / (demand.kappa * demand.train_s) + groups) * 8 / 1e6
