"""Streaming estimates: they converge, they forget, and their intervals hold what they say."""

import math
import random

import pytest

from swarmnode.scheduler.estimates import EventRate, Lengths, MovingMean


def test_a_mean_without_samples_is_no_estimate() -> None:
    assert MovingMean().estimate() is None
    assert not MovingMean()


def test_the_mean_and_deviation_of_few_samples_are_nearly_the_plain_ones() -> None:
    mean = MovingMean(memory=1e9)
    for value in (1.0, 2.0, 3.0, 4.0):
        mean.add(value)
    assert mean.value == pytest.approx(2.5)
    assert mean.deviation == pytest.approx(math.sqrt(5 / 3))
    assert mean.samples == pytest.approx(4)


def test_a_mean_follows_a_change() -> None:
    mean = MovingMean(memory=10)
    for _ in range(50):
        mean.add(1.0)
    for _ in range(50):
        mean.add(5.0)
    assert mean.value == pytest.approx(5.0, rel=0.01)


def test_intervals_of_a_mean_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        mean = MovingMean(memory=30)
        for _ in range(60):
            mean.add(rng.gauss(10, 3))
        estimate = mean.estimate(0.9)
        assert estimate is not None
        held += not estimate.excludes(10)
    assert 0.85 <= held / 400 <= 0.95


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_measurement_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError):
        MovingMean().add(bad)


def test_a_rate_is_the_prior_until_something_was_seen() -> None:
    rate = EventRate(0.5, prior_events=3)
    assert rate.value == pytest.approx(0.5)
    rate.add(30, 20.0)
    # (3 + 30) events in (6 + 20) s.
    assert rate.value == pytest.approx(33 / 26)


def test_no_event_in_a_long_time_lowers_a_rate_and_its_upper_end() -> None:
    rate = EventRate(0.1)
    before = rate.estimate().high
    rate.add(0, 1000.0)
    after = rate.estimate()
    assert after.value < 0.001 and after.high < before and after.low >= 0


def test_intervals_of_a_rate_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(300):
        rate = EventRate(2.0, prior_events=0.5)
        elapsed = 0.0
        for _ in range(30):
            wait = rng.expovariate(2.0)
            rate.add(1, wait)
            elapsed += wait
        held += not rate.estimate(0.9).excludes(2.0)
    assert 0.84 <= held / 300 <= 0.96


def test_lengths_know_quantiles_to_a_bucket() -> None:
    lengths = Lengths()
    for length in range(1, 1001):
        lengths.add(length)
    assert lengths.quantile(0.5) == pytest.approx(500, rel=0.2)
    assert lengths.quantile(1.0) == pytest.approx(1000, rel=0.2)
    assert lengths.mean() == pytest.approx(500, rel=0.1)


def test_lengths_forget_and_stay_bounded() -> None:
    lengths = Lengths(memory=100)
    for _ in range(1000):
        lengths.add(10)
    for _ in range(1000):
        lengths.add(1000)
    assert lengths.mean() > 900
    assert lengths.samples <= 101
