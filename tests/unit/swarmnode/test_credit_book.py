"""Who holds credit: bounded per worker, given up when late, learned from."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.runtime.credit_book import (
    FIRST_ALLOWANCE,
    LARGEST_ALLOWANCE,
    MAX_WORKERS,
    SHORTEST_LIFETIME_S,
    CreditBook,
)


def test_a_grant_is_outstanding_until_its_group_comes() -> None:
    book = CreditBook()
    book.grant(b"a", 3, 0.0)
    book.received(b"a", 1.0, accepted=True)
    assert book.outstanding(1.0) == 2
    assert book.room(b"a", 1.0) == 2 * FIRST_ALLOWANCE - 2


def test_what_is_late_is_given_up_and_halves_the_allowance() -> None:
    book = CreditBook()
    book.grant(b"a", 8, 0.0)
    assert book.outstanding(SHORTEST_LIFETIME_S - 1) == 8
    assert book.outstanding(SHORTEST_LIFETIME_S) == 0
    assert book.room(b"a", SHORTEST_LIFETIME_S) == FIRST_ALLOWANCE // 2


def test_a_slow_worker_is_waited_for_longer_once_it_is_known_to_be_slow() -> None:
    book = CreditBook()
    book.grant(b"a", 1, 0.0)
    assert book.outstanding(100.0) == 0
    book.received(b"a", 100.0, accepted=True)
    book.grant(b"a", 1, 100.0)
    assert book.outstanding(100.0 + 299.0) == 1
    assert book.outstanding(100.0 + 300.0) == 0


def test_groups_come_in_the_order_of_their_grants() -> None:
    book = CreditBook()
    book.grant(b"a", 1, 0.0)
    book.grant(b"a", 1, 50.0)
    book.received(b"a", 51.0, accepted=True)
    assert book.outstanding(109.0) == 1, "the one that came was the first"


def test_a_lost_connection_forgets_grants_and_not_what_was_learned() -> None:
    book = CreditBook()
    book.grant(b"a", 4, 0.0)
    book.outstanding(60.0)
    book.forget_grants(b"a")
    assert book.outstanding(60.0) == 0
    assert book.room(b"a", 60.0) == FIRST_ALLOWANCE // 2


def test_any_number_of_workers_costs_bounded_memory() -> None:
    book = CreditBook()
    for number in range(MAX_WORKERS + 10):
        book.grant(number.to_bytes(4, "big"), 1, 0.0)
    assert book.outstanding(0.0) == MAX_WORKERS


def test_the_sum_over_many_workers_follows_each_of_them() -> None:
    """Against counting every grant by hand: lifetimes differ, and groups come late, early and never."""
    rng = random.Random(7)
    book, now = CreditBook(), 0.0
    for _ in range(2_000):
        worker = bytes([rng.randrange(12)])
        now += rng.expovariate(0.5)
        step = rng.random()
        if step < 0.5:
            book.grant(worker, min(rng.randrange(1, 4), book.room(worker, now)), now)
        elif step < 0.9:
            book.received(worker, now, accepted=rng.random() < 0.8)
        elif step < 0.95:
            book.forget_grants(worker)
        total = book.outstanding(now)
        for one in range(12):
            book.room(bytes([one]), now)
        accounts = book._accounts.values()
        assert total == book.outstanding(now) == sum(account.outstanding for account in accounts)
        assert total <= sum(book.undelivered(bytes([one])) for one in range(12))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grant", "receive", "refuse", "forget", "wait"]),
            st.sampled_from([b"a", b"b"]),
            st.integers(1, 20),
        ),
        max_size=40,
    )
)
def test_outstanding_is_never_negative_nor_above_what_was_granted(
    steps: list[tuple[str, bytes, int]],
) -> None:
    book, now, granted = CreditBook(), 0.0, 0
    for step, worker, number in steps:
        if step == "grant":
            count = min(number, book.room(worker, now))
            book.grant(worker, count, now)
            granted += count
        elif step in ("receive", "refuse"):
            book.received(worker, now, accepted=step == "receive")
        elif step == "forget":
            book.forget_grants(worker)
        else:
            now += 37.0 * number
        assert 0 <= book.outstanding(now) <= granted
        assert 0 <= book.room(worker, now) <= LARGEST_ALLOWANCE
