"""Credit: exact grants, and simulations in which no group that was paid for goes stale."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.pacing import PacingState, grant_credit

STATES = st.builds(
    PacingState,
    version=st.integers(0, 1000),
    published_version=st.integers(0, 1000),
    batch_groups=st.integers(1, 40),
    waiting=st.integers(0, 200),
    outstanding=st.integers(0, 200),
    max_staleness=st.integers(0, 8),
    pacing_batches=st.integers(1, 12),
)


def state(**changes: int) -> PacingState:
    base = PacingState(
        version=10,
        published_version=10,
        batch_groups=4,
        waiting=0,
        outstanding=0,
        max_staleness=3,
        pacing_batches=9,
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "worker_version", "granted"),
    [
        ({}, 10, 16),  # four batches: consumed at 10, 11, 12, 13
        ({}, 9, 12),
        ({}, 7, 4),  # at the bound: only what the very next update consumes
        ({}, 6, 0),  # beyond it
        ({}, 11, 0),  # ahead of the learner
        ({"waiting": 5}, 10, 11),
        ({"outstanding": 5}, 10, 11),
        ({"waiting": 5, "outstanding": 6}, 10, 5),
        ({"waiting": 16}, 10, 0),
        ({"waiting": 30}, 10, 0),
        ({"pacing_batches": 2}, 10, 8),
        ({"pacing_batches": 2}, 8, 8),
        ({"pacing_batches": 2}, 7, 4),
        ({"max_staleness": 0}, 10, 4),
        ({"max_staleness": 0}, 9, 0),
        ({"max_staleness": 0, "waiting": 1, "outstanding": 2}, 10, 1),
    ],
)
def test_exact_grants(changes: dict[str, int], worker_version: int, granted: int) -> None:
    assert grant_credit(state(**changes), worker_version, 1000).count == granted


@given(STATES, st.integers(0, 1000), st.integers(1, 1024))
def test_a_grant_is_within_what_was_asked_and_a_refusal_says_why(
    at: PacingState, worker_version: int, wanted: int
) -> None:
    grant = grant_credit(at, worker_version, wanted)
    assert 0 <= grant.count <= wanted
    assert (grant.count == 0) == bool(grant.reason)


@given(STATES, st.integers(0, 12), st.integers(1, 1024))
def test_no_granted_group_is_predicted_to_be_staler_than_the_bound(
    at: PacingState, lag: int, wanted: int
) -> None:
    count = grant_credit(at, at.version - lag, wanted).count
    if count:
        last = at.waiting + at.outstanding + count - 1
        assert last // at.batch_groups + lag <= at.max_staleness
        assert last // at.batch_groups < at.pacing_batches


@given(STATES, st.integers(0, 12))
def test_no_credit_is_withheld_that_could_be_used(at: PacingState, lag: int) -> None:
    grant = grant_credit(at, at.version - lag, 10**6)
    following = (at.waiting + at.outstanding + grant.count) // at.batch_groups
    assert following + lag > at.max_staleness or following >= at.pacing_batches


@given(STATES, st.integers(0, 12), st.integers(1, 1024), st.integers(0, 10**6))
def test_only_the_lag_counts_not_how_the_version_was_reached(
    at: PacingState, lag: int, wanted: int, shift: int
) -> None:
    resumed = replace(at, version=at.version + shift, published_version=at.published_version + shift)
    granted = grant_credit(at, at.version - lag, wanted).count
    assert granted == grant_credit(resumed, resumed.version - lag, wanted).count


@given(st.integers(1, 100), st.integers(1, 10), st.integers(0, 10**6))
def test_without_staleness_exactly_one_batch_is_granted(batch: int, pacing: int, version: int) -> None:
    at = state(batch_groups=batch, pacing_batches=pacing, max_staleness=0, version=version)
    assert grant_credit(at, version, 10**6).count == batch
    assert grant_credit(replace(at, outstanding=batch), version, 10**6).count == 0


@settings(max_examples=150)
@given(
    batch=st.integers(1, 5),
    bound=st.integers(0, 4),
    pacing=st.integers(1, 6),
    earliest_deadline_first=st.booleans(),
    start=st.integers(0, 100),
    data=st.data(),
)
def test_nothing_goes_stale_while_workers_deliver_in_order(
    batch: int, bound: int, pacing: int, earliest_deadline_first: bool, start: int, data: st.DataObject
) -> None:
    """Any interleaving of asking, delivering, updating, loading; groups arrive in the order of grants."""
    version = start
    workers = [start] * data.draw(st.integers(1, 3), label="workers")
    outstanding: list[int] = []  # the version of each group, oldest grant first
    waiting: list[int] = []
    for step in data.draw(st.lists(st.sampled_from(["ask", "deliver", "update", "load"]), max_size=80)):
        worker = data.draw(st.integers(0, len(workers) - 1))
        if step == "ask":
            at = PacingState(version, version, batch, len(waiting), len(outstanding), bound, pacing)
            wanted = data.draw(st.integers(1, 12))
            outstanding += [workers[worker]] * grant_credit(at, workers[worker], wanted).count
        elif step == "deliver" and outstanding:
            waiting.append(outstanding.pop(0))
        elif step == "load":
            workers[worker] = version
        elif step == "update" and len(waiting) >= batch:
            if earliest_deadline_first:
                waiting.sort()
            consumed, waiting = waiting[:batch], waiting[batch:]
            assert all(version - made_by <= bound for made_by in consumed)
            version += 1
        assert len(waiting) + len(outstanding) <= (bound + 1) * batch
        assert len(waiting) + len(outstanding) <= pacing * batch


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 6), st.integers(1, 4))
def test_eager_workers_never_starve_the_learner(batch: int, bound: int, pacing: int, workers: int) -> None:
    waiting = 0
    for version in range(20):
        for _ in range(workers):  # each loads, asks as often as it is granted, and delivers at once
            while granted := grant_credit(
                PacingState(version, version, batch, waiting, 0, bound, pacing), version, 1
            ).count:
                waiting += granted
        assert waiting >= batch
        waiting -= batch
