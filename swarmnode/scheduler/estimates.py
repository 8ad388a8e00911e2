"""Streaming estimates that know how sure they are: means, rates of events, lengths. No clock: time is given.

Every estimate forgets: old samples lose weight, so that a change shows, and the confidence interval is that
of the samples that still count.
"""

import math
from dataclasses import dataclass

from scipy.special import gammaincinv, stdtrit

CONFIDENCE = 0.9
"""Of the two-sided intervals, unless said otherwise."""


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that it lies in with the stated confidence."""

    value: float
    low: float
    high: float
    samples: float
    """What it rests on; forgetting makes that less than what was seen, and not whole."""

    @classmethod
    def claimed(cls, value: float, spread: float = 0.5) -> "Estimate":
        """Somebody's word: an interval of plus and minus `spread` of it, resting on no sample."""
        return cls(value, value * (1 - spread), value * (1 + spread), 0.0)

    @property
    def relative_width(self) -> float:
        """Half the interval over the value."""
        return (self.high - self.low) / (2 * self.value) if self.value else math.inf

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval."""
        return not self.low <= value <= self.high


class MovingMean:
    """Mean of the newest samples, exponentially weighted. Invariant: low ≤ value ≤ high."""

    def __init__(self, memory: float = 20.0) -> None:
        """`memory`: about how many samples count."""
        self._decay = 1 - 1 / memory
        self._weight = 0.0
        self._weight_squares = 0.0
        self._mean = 0.0
        self._squares = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, value: float) -> None:
        """Another sample. Raises ValueError if it is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"a measurement of {value} is none")
        decay = self._decay
        self._weight = self._weight * decay + 1
        self._weight_squares = self._weight_squares * decay * decay + 1
        step = value - self._mean
        self._mean += step / self._weight
        self._squares = self._squares * decay + step * (value - self._mean)

    @property
    def value(self) -> float:
        """The mean so far, 0 without samples."""
        return self._mean

    @property
    def samples(self) -> float:
        return self._weight * self._weight / self._weight_squares if self._weight else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of one sample; 0 while there are fewer than two."""
        freedom = self._weight - self._weight_squares / self._weight if self._weight else 0.0
        return math.sqrt(max(0.0, self._squares / freedom)) if freedom > 1e-9 else 0.0

    def estimate(self, confidence: float = CONFIDENCE) -> Estimate | None:
        """None without samples. One sample says nothing of the spread: its interval is that of a claim."""
        samples = self.samples
        if not samples:
            return None
        if samples < 1.5:
            claim = Estimate.claimed(self._mean)
            return Estimate(self._mean, min(claim.low, claim.high), max(claim.low, claim.high), samples)
        error = self.deviation / math.sqrt(samples)
        reach = float(stdtrit(samples - 1, (1 + confidence) / 2)) * error
        return Estimate(self._mean, self._mean - reach, self._mean + reach, samples)


class EventRate:
    """Events per second of exposure: departures, failures, groups. A Gamma posterior of what was seen and a
    prior.

    The prior is worth `prior_events` events at `prior_rate`: with little seen, it is what is believed.
    """

    def __init__(self, prior_rate: float, *, prior_events: float = 0.5, memory_s: float = math.inf) -> None:
        self._prior_rate = prior_rate
        self._prior_events = prior_events
        self._memory_s = memory_s
        self._events = 0.0
        self._exposure_s = 0.0

    def add(self, events: float, exposure_s: float) -> None:
        """`events` happened while one could have happened for `exposure_s`."""
        keep = math.exp(-exposure_s / self._memory_s) if exposure_s else 1.0
        self._events = self._events * keep + events
        self._exposure_s = self._exposure_s * keep + exposure_s

    @property
    def events(self) -> float:
        """Those that still count."""
        return self._events

    @property
    def value(self) -> float:
        """The posterior mean; the prior's rate if nothing was seen."""
        if self._prior_rate <= 0:
            return self._events / self._exposure_s if self._exposure_s else 0.0
        prior_s = self._prior_events / self._prior_rate
        return (self._prior_events + self._events) / (prior_s + self._exposure_s)

    def estimate(self, confidence: float = CONFIDENCE) -> Estimate:
        """The interval is that of the Gamma posterior."""
        shape = self._events + (self._prior_events if self._prior_rate > 0 else 0.0)
        exposure_s = self._exposure_s + (
            self._prior_events / self._prior_rate if self._prior_rate > 0 else 0.0
        )
        if exposure_s == 0:
            return Estimate(0.0, 0.0, math.inf, 0.0)
        tail = (1 - confidence) / 2
        low = float(gammaincinv(shape, tail)) / exposure_s if shape else 0.0
        high = float(gammaincinv(max(shape, 0.5), 1 - tail)) / exposure_s
        value = self.value
        return Estimate(value, min(low, value), max(high, value), self._events)


class Lengths:
    """Distribution of whole numbers (tokens of a completion) in buckets a quarter of an octave wide."""

    def __init__(self, memory: float = 10_000.0) -> None:
        self._memory = memory
        self._buckets: dict[int, float] = {}
        self._total = 0.0

    def add(self, length: int) -> None:
        """Another length, at least 1."""
        bucket = math.floor(4 * math.log2(max(1, length)))
        self._buckets[bucket] = self._buckets.get(bucket, 0.0) + 1
        self._total += 1
        if self._total > self._memory:
            self._buckets = {key: value / 2 for key, value in self._buckets.items() if value > 1e-3}
            self._total = sum(self._buckets.values())

    @property
    def samples(self) -> float:
        return self._total

    def quantile(self, share: float) -> float:
        """The length that `share` of them do not exceed, to a bucket's width; 0 without samples."""
        seen = 0.0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= share * self._total:
                return float(2 ** ((bucket + 1) / 4))
        return 0.0

    def mean(self) -> float:
        """To a bucket's width; 0 without samples."""
        if not self._total:
            return 0.0
        return sum(count * 2 ** ((bucket + 0.5) / 4) for bucket, count in self._buckets.items()) / self._total
