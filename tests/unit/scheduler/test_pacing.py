"""How much credit one worker may hold."""

import math

import pytest

from protocol.pacing import PacingState
from swarmnode.scheduler.pacing import (
    IN_TRANSIT,
    LONGEST_RETRY_S,
    SHORTEST_RETRY_S,
    WorkerPace,
    retry_after_s,
    time_left_s,
    worker_limit,
)


@pytest.mark.parametrize(
    ("lag", "training_for_s", "left_s"),
    [
        # S = 4, T = 10 s. The last update that may consume what starts now begins S − lag updates after this
        # one.
        (0, 0.0, 40.0),
        (0, 7.0, 33.0),
        (3, 7.0, 3.0),
        (4, 7.0, -7.0),
        # A learner that waits takes whatever comes.
        (4, None, math.inf),
    ],
)
def test_the_time_left_counts_whole_updates(lag: int, training_for_s: float | None, left_s: float) -> None:
    assert time_left_s(lag, 4, 10.0, training_for_s) == left_s


def test_what_would_come_too_late_is_not_granted() -> None:
    pace = WorkerPace(groups_per_s=0.2, latency_s=20.0, latency_deviation_s=5.0)
    assert worker_limit(pace, 27.4, 0) == 0
    assert worker_limit(pace, 27.5, 0) == 6 + IN_TRANSIT
    assert worker_limit(pace, 27.5, 7) == 1
    assert worker_limit(pace, 27.5, 99) == 0


def test_a_learner_that_waits_sets_no_limit_of_its_own() -> None:
    assert worker_limit(WorkerPace(0.001, 1e6), math.inf, 50) > 1_000


def state(published: int) -> PacingState:
    return PacingState(5, published, 16, 30, 10, 4, 2)


def test_asking_again_pays_when_the_update_ends_and_not_all_at_once() -> None:
    soon = retry_after_s(state(5), 5, train_s=10.0, training_for_s=8.0, spread=0.0)
    late = retry_after_s(state(5), 5, train_s=10.0, training_for_s=8.0, spread=0.99)
    assert 2.0 <= soon < late <= 4.0
    assert retry_after_s(state(5), 5, train_s=100.0, training_for_s=1.0, spread=0.5) == LONGEST_RETRY_S


def test_who_is_about_to_have_a_newer_version_asks_soon() -> None:
    assert retry_after_s(state(5), 4, train_s=100.0, training_for_s=1.0, spread=0.0) == SHORTEST_RETRY_S
