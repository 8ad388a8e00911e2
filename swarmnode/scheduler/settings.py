"""What a run's owner decides about who works."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlanSettings:
    """What a run's owner decides."""

    shortfall_probability: float = 0.05
    """Most probability that capacity falls short of the need before somebody is replaced."""
    replacement_s: float = 60.0
    """How long it takes until a worker that left is noticed and another one works in its place."""
    owner_share: float = 1.0
    """Most of the capacity that may be one owner's, so that nobody can starve or steer the run."""
    region_mbps: dict[str, float] = field(default_factory=dict)
    """Bandwidth to a region; one not named has no limit."""
    budget_per_hour: float = math.inf
    """Dollars for all active and draining workers together."""
    least_memory_gb: float = 0.0
    least_available_s: float = 300.0
    """A worker that is there for less is not worth its weights' transfer."""
    stay_s: float = 4 * 3600.0
    """How long a plan lasts about: what it takes to start a worker is spread over this."""
    hysteresis: float = 0.05
    """What a change must save, relative to the cost, to be made."""
    volunteer_price_per_hour: float = 0.01
    """What an hour of a free worker counts when choices are compared: its power is not free to its owner."""
    spare_share: float = 0.1
    """Standby capacity that keeps its weights warm, relative to the active capacity; at least one worker."""
    exact_up_to: int = 200
    """Offers up to which the choice is solved exactly."""

    def __post_init__(self) -> None:
        if not 0 < self.shortfall_probability < 1 or not 0 < self.owner_share <= 1:
            raise ValueError("shortfall_probability lies in (0, 1), owner_share in (0, 1]")
        if self.hysteresis < 0 or self.budget_per_hour < 0:
            raise ValueError("hysteresis and budget_per_hour are not negative")
