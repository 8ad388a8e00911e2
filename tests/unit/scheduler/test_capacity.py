"""The capacity rule: exact values, its limits, and what it advises."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.scheduler.assessment import assess
from swarmnode.scheduler.capacity import (
    Demand,
    Timing,
    admissible_rate,
    admissible_share,
    default_publish_every,
    expected_utilization,
    pacing_batches_needed,
    required_rate,
    start_window,
    update_period_s,
)


@pytest.mark.parametrize(("staleness", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5), (11, 10)])
def test_the_publication_period_is_one_less_than_the_bound_and_at_least_one(
    staleness: int, kappa: int
) -> None:
    assert default_publish_every(staleness) == kappa


@pytest.mark.parametrize(
    ("staleness", "form", "expected"),
    [
        # κR / (κ·T − B) with R = 64, T = 20 s, B = 30 s.
        (6, "conservative", 5 * 64 / (100 - 30)),
        (11, "conservative", 10 * 64 / (200 - 30)),
        (3, "conservative", 2 * 64 / (40 - 30)),
        (6, "overlapped", 64 / 20),
        # κ·T = 20 s is less than B: no amount of workers suffices.
        (2, "conservative", math.inf),
        (2, "overlapped", math.inf),
    ],
)
def test_the_rule_in_closed_form(staleness: int, form: str, expected: float) -> None:
    demand = Demand(64, 20.0, staleness, form=form)  # type: ignore[arg-type]
    assert required_rate(demand, 30.0) == pytest.approx(expected)


@settings(deadline=None)
@given(
    staleness=st.integers(2, 12),
    batch=st.integers(1, 512),
    train_s=st.floats(0.5, 300),
    broadcast_share=st.floats(0, 0.95),
    workers=st.integers(1, 50),
)
def test_the_rule_and_the_admissible_rate_agree_when_latency_is_nothing(
    staleness: int, batch: int, train_s: float, broadcast_share: float, workers: int
) -> None:
    demand = Demand(batch, train_s, staleness)
    broadcast_s = broadcast_share * demand.kappa * train_s
    each = required_rate(demand, broadcast_s) / workers
    assert admissible_rate(demand, [Timing(each, broadcast_s)] * workers) == pytest.approx(
        demand.floor_rate, rel=1e-9
    )


@pytest.mark.parametrize(
    ("form", "latency_s", "share"),
    [
        # S = 6, κ = 5, T = 10 s, B = 10 s: starts from 10 on; the last update that may consume begins at 60.
        ("conservative", 0.0, 0.8),  # until 50
        # One in hand at 50 stands still for 10 s: until 60 − 10 − 10. Then nothing may start for 10 s, and
        # groups
        # in hand run on for 0 to 10 s: idle 10 − 10/2.
        ("conservative", 10.0, 0.7),
        ("conservative", 20.0, 0.6),  # until 30; idle 20 − 20/2
        ("conservative", 55.0, 0.0),  # 50 − 55 is before 10
        ("overlapped", 0.0, 1.0),  # until 60
        ("overlapped", 10.0, 0.9),  # until 50: idle 10 − 10/2
    ],
)
def test_a_long_way_back_costs_part_of_the_end_of_each_cycle(
    form: str, latency_s: float, share: float
) -> None:
    demand = Demand(16, 10.0, 6, form=form)  # type: ignore[arg-type]
    assert admissible_share(demand, Timing(1.0, 10.0, latency_s)) == pytest.approx(share)


def test_groups_of_varying_length_must_start_a_deviation_earlier() -> None:
    demand = Demand(16, 10.0, 6)
    steady, varying = Timing(1.0, 10.0, 20.0), Timing(1.0, 10.0, 14.0, latency_deviation_s=4.0)
    # The last start is the same, 20 s after the first, and all begin together: of those of 20 s half get a
    # second
    # group, of those of 14 ± 4 s P(Z < 1.5), and P(Z < −1.41) a third: 2.0126 groups. The mean of what a
    # normal
    # number exceeds 1.5 by is 0.0293: so many deviations' worth of starts are late.
    assert admissible_share(demand, steady) == pytest.approx(20 * 1.5 / 50)
    assert admissible_share(demand, varying) == pytest.approx(
        14 * 2.0126 / 50 * (1 - 0.02931 * 4 / 20), rel=1e-4
    )


def test_without_staleness_the_learner_always_waits() -> None:
    demand = Demand(batch_groups=20, train_s=2.0, max_staleness=0)
    workers = [Timing(5.0, broadcast_s=1.0, latency_s=1.0)] * 2
    # One after the other: broadcast, generation of 20 groups at 10 per second, half a group's way, update.
    assert update_period_s(demand, workers) == pytest.approx(1 + 2 + 0.5 + 2)
    assert math.isinf(assess(demand, workers).required_rate)


def test_with_too_little_capacity_the_period_is_generation_and_the_broadcasts_part() -> None:
    demand = Demand(64, 20.0, 6)
    workers = [Timing(0.3, 30.0)] * 8
    assert update_period_s(demand, workers) == pytest.approx(64 / 2.4 + 30 / 5)
    assert expected_utilization(demand, workers) == pytest.approx(20 / (64 / 2.4 + 6))


@settings(deadline=None)
@given(
    staleness=st.integers(0, 12),
    batch=st.integers(1, 64),
    train_s=st.floats(0.5, 60),
    workers=st.lists(
        st.tuples(st.floats(0.01, 5), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=6
    ),
)
def test_more_workers_never_make_the_learner_slower(
    staleness: int, batch: int, train_s: float, workers: list[tuple[float, float, float]]
) -> None:
    demand = Demand(batch, train_s, staleness)
    timings = [Timing(*worker) for worker in workers]
    fewer, more = update_period_s(demand, timings[:-1]), update_period_s(demand, timings)
    assert train_s <= more <= fewer * (1 + 1e-6)


def test_nobody_makes_nothing() -> None:
    assert update_period_s(Demand(1, 1.0, 1), []) == math.inf
    assert update_period_s(Demand(1, 1.0, 1), [Timing(0.0)]) == math.inf
    assert assess(Demand(1, 1.0, 1), []).advice[0].knob == "workers"


def test_advice_when_no_amount_suffices_names_the_least_change_of_each_knob() -> None:
    demand = Demand(64, 20.0, 2)
    assessment = assess(demand, [Timing(0.5, broadcast_s=30.0, latency_s=15.0)] * 8)
    assert not assessment.feasible
    advice = {one.knob: one.value for one in assessment.advice}
    # κ·T must exceed 30 s, so κ = 2; a group that starts at 30 s, and stands still for 30 s, must be there at
    # S · 20 s.
    assert advice["max_staleness"] == 4
    # R and T grow together: 2·T − 30 − 15 s must exceed 30 s, which it does beyond the 37.5 s of 120 groups.
    assert advice["batch_groups"] == 121
    # 2 · 20 − 15 s must exceed twice the 30 s over the factor: 2.4 and more.
    assert advice["bandwidth"] == 3.0


def test_advice_when_workers_are_missing_says_how_many_and_what_else_would_do() -> None:
    assessment = assess(Demand(64, 20.0, 6), [Timing(0.5, 30.0)] * 8)
    advice = {one.knob: one.value for one in assessment.advice}
    assert assessment.required_rate == pytest.approx(5 * 64 / 70)
    assert assessment.ratio == pytest.approx(4 / (5 * 64 / 70))
    assert advice["workers"] == pytest.approx(5 * 64 / 70 - 4)
    # With S: κR/(κT − B) ≤ 4 from κ = 7.5 on, and 30 s + R/4 for the first batch within (S + 1 − κ + 0.04 κ)
    # · 20 s.
    assert advice["max_staleness"] == 9
    # B ≤ 20 s is enough: 100 − 80.
    assert advice["bandwidth"] == pytest.approx(1.5)


def test_a_narrow_window_for_starts_is_said() -> None:
    # S = 2, κ = 1, T = 10 s: the last update begins at 20; started before 20 − 12 − 1.5 · 2, after 1 s.
    timing = Timing(1000.0, 1.0, 12.0, 2.0)
    assert start_window(Demand(16, 10.0, 2, form="overlapped"), timing) == pytest.approx((20 - 15 - 1) / 10)
    knobs = [one.knob for one in assess(Demand(16, 10.0, 2, form="overlapped"), [timing]).advice]
    assert knobs == ["max_staleness"]
    assert start_window(Demand(16, 10.0, 4, 1, "overlapped"), timing) == 1.0


def test_pacing_must_allow_what_is_being_made() -> None:
    assert pacing_batches_needed(Demand(16, 10.0, 4), 0.0) == 2
    assert pacing_batches_needed(Demand(16, 10.0, 4), 10.0) == 3
    assert pacing_batches_needed(Demand(16, 10.0, 4), 10.1) == 4
    tight = Demand(16, 10.0, 8, pacing_batches=2)
    knobs = [one.knob for one in assess(tight, [Timing(10.0, 0.0, latency_s=25.0)]).advice]
    assert knobs == ["pacing_batches"]


@pytest.mark.parametrize(
    "values",
    [
        {"batch_groups": 0},
        {"train_s": 0.0},
        {"train_s": math.inf},
        {"max_staleness": -1},
        {"publish_every": 7},
        {"publish_every": 0},
    ],
)
def test_a_demand_that_no_run_can_have_is_refused(values: dict[str, float]) -> None:
    sound: dict[str, float] = {"batch_groups": 8, "train_s": 1.0, "max_staleness": 5}
    with pytest.raises(ValueError):
        Demand(**(sound | values))  # type: ignore[arg-type]
