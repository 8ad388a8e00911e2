"""Staleness at 0, S and S + 1, with several versions in one group, and after a learner came back."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Completion, RolloutGroup
from protocol.staleness import deadline, expired, is_admissible, newest_version, oldest_version, staleness

S = 3


@pytest.mark.parametrize(
    ("consuming", "oldest", "lag", "admissible"),
    [
        (0, 0, 0, True),
        (10, 10, 0, True),
        (11, 10, 1, True),
        (13, 10, S, True),
        (14, 10, S + 1, False),
        (10, 11, -1, False),
        (10**12, 10**12 - S, S, True),
        (10**12, 10**12 - S - 1, S + 1, False),
    ],
)
def test_the_bound_is_inclusive(consuming: int, oldest: int, lag: int, admissible: bool) -> None:
    assert staleness(consuming, oldest) == lag
    assert is_admissible(consuming, oldest, S) is admissible


@pytest.mark.parametrize(("oldest", "admissible"), [(5, True), (4, False), (6, False)])
def test_a_bound_of_zero_admits_the_consuming_version_only(oldest: int, admissible: bool) -> None:
    assert is_admissible(5, oldest, 0) is admissible


def runs(*versions: tuple[int, int]) -> Completion:
    count = sum(run[1] for run in versions)
    return Completion.build([1] * count, [-1.0] * count, list(versions), "stop")


@pytest.mark.parametrize(
    ("completions", "oldest", "newest"),
    [
        ([runs((7, 3)), runs((7, 1))], 7, 7),
        ([runs((7, 1), (8, 2)), runs((7, 3))], 7, 8),
        ([runs((8, 3)), runs((7, 1), (9, 1))], 7, 9),
        ([runs((9, 1)), runs((8, 1)), runs((7, 1))], 7, 9),
        ([runs((0, 1), (40, 1))], 0, 40),
    ],
)
def test_the_oldest_token_decides(
    make_group: Callable[..., RolloutGroup], completions: list[Completion], oldest: int, newest: int
) -> None:
    group = make_group(completions=completions)
    assert (oldest_version(group), newest_version(group)) == (oldest, newest)


VERSIONS = st.integers(0, 50)


@given(VERSIONS, VERSIONS, st.integers(0, 10))
def test_the_deadline_is_the_last_version_that_may_consume(consuming: int, oldest: int, bound: int) -> None:
    assert is_admissible(consuming, oldest, bound) == (oldest <= consuming <= deadline(oldest, bound))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=2), VERSIONS)), VERSIONS, st.integers(0, 10))
def test_expired_groups_are_those_that_no_later_version_may_consume(
    groups: list[tuple[bytes, int]], consuming: int, bound: int
) -> None:
    later = range(consuming, consuming + 70)
    hopeless = [name for name, oldest in groups if not any(is_admissible(v, oldest, bound) for v in later)]
    assert expired(groups, consuming, bound) == hopeless


def test_a_learner_that_resumes_at_an_older_version_counts_from_there() -> None:
    # It had reached 9 and is back at its last checkpoint: what version 6 made is one behind again, and what
    # version 8 made is from a future that did not happen.
    waiting: list[tuple[bytes, Any]] = [(b"a", 3), (b"b", 6), (b"c", 8)]
    assert expired(waiting, 9, S) == [b"a"]
    assert expired(waiting, 7, S) == [b"a"]
    assert expired(waiting, 6, S) == []
    assert [is_admissible(7, oldest, S) for _, oldest in waiting] == [False, True, False]
