"""What a simulated fleet cost and achieved: money by the second, tallies, time lines."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Money:
    """Dollars spent at a rate that changes now and then."""

    spent: float = 0.0
    per_hour: float = 0.0
    highest_per_hour: float = 0.0
    since_s: float = 0.0

    def change(self, now: float, by_per_hour: float) -> None:
        """The rate is another one from now on."""
        self.settle(now)
        self.per_hour += by_per_hour
        if abs(self.per_hour) < 1e-9:
            self.per_hour = 0.0
        self.highest_per_hour = max(self.highest_per_hour, self.per_hour)

    def settle(self, now: float) -> float:
        """Dollars until now."""
        self.spent += self.per_hour * (now - self.since_s) / 3600
        self.since_s = now
        return self.spent


@dataclass
class Tally:
    """Counters of a fleet; a copy at the end of the warm-up is taken off at the end."""

    started: int = 0
    finished: int = 0
    lost_with_worker: int = 0
    joins: int = 0
    departures: int = 0
    activations: int = 0
    cold_activations: int = 0
    activation_wait_s: float = 0.0
    capacity_s: float = 0.0
    """Groups per second of the active workers that are there, times seconds."""
    need_s: float = 0.0
    work_s: float = 0.0
    upload_s: float = 0.0
    paused_s: float = 0.0


@dataclass
class TimeLine:
    """Samples at equal steps."""

    step_s: float
    columns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(round(value, 6))


def mean_of(histogram: Counter[int]) -> float:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else 0.0


def as_plain(histogram: Counter[int]) -> dict[str, int]:
    """For JSON: keys as text, in order."""
    return {str(key): histogram[key] for key in sorted(histogram)}


Report = dict[str, Any]
