"""The buffer's accounting: each id leaves once, nothing beyond the bound is taken, the earliest deadline goes
first."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.replay_buffer import Added, ReplayBuffer


@dataclass(frozen=True)
class Item:
    id: bytes
    oldest_version: int
    is_local: bool = True
    is_informative: bool = True


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def buffer(max_staleness: int = 2, local_bound: int = 100, external_bound: int = 4) -> ReplayBuffer[Item]:
    return ReplayBuffer(max_staleness=max_staleness, local_bound=local_bound, external_bound=external_bound)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("oldest", "version", "added"),
    [
        (5, 5, Added.WAITING),  # 0
        (5, 7, Added.WAITING),  # S
        (5, 8, Added.STALE),  # S + 1
        (5, 4, Added.STALE),  # of a version that does not exist
    ],
)
def test_admission_at_the_bound(oldest: int, version: int, added: Added) -> None:
    held = buffer(max_staleness=2)
    assert held.add(Item(name(1), oldest), version) is added
    assert held.take_dropped() == ([] if added is Added.WAITING else [name(1)])


def test_the_earliest_deadline_goes_first_and_ties_in_order_of_arrival() -> None:
    held = buffer()
    for number, oldest in enumerate([2, 1, 2, 1, 2]):
        held.add(Item(name(number), oldest), 2)
    batch = held.take(2, 3, 0, rng())
    assert batch is not None
    assert [item.id for item in batch.local] == [name(1), name(3), name(0)]


def test_a_batch_waits_for_local_groups_and_never_for_external_ones() -> None:
    held = buffer()
    held.add(Item(name(1), 0, is_local=False), 0)
    assert held.take(0, 1, 5, rng()) is None
    held.add(Item(name(2), 0), 0)
    batch = held.take(0, 1, 5, rng())
    assert batch is not None
    assert ([i.id for i in batch.local], [i.id for i in batch.external]) == ([name(2)], [name(1)])


def test_a_group_is_taken_once_however_often_it_is_sent() -> None:
    held = buffer()
    assert held.add(Item(name(1), 0), 0) is Added.WAITING
    assert held.add(Item(name(1), 0), 0) is Added.DUPLICATE
    assert held.take(0, 1, 0, rng()) is not None
    assert held.add(Item(name(1), 0), 1) is Added.DUPLICATE
    held.remember_consumed([name(2)], 0)
    assert held.add(Item(name(2), 0), 1) is Added.DUPLICATE
    assert held.take(1, 1, 0, rng()) is None
    assert held.take_dropped() == []


def test_an_abandoned_batch_waits_again_in_its_old_place() -> None:
    held = buffer()
    for number in range(3):
        held.add(Item(name(number), 0), 0)
    held.add(Item(name(9), 0, is_local=False), 0)
    batch = held.take(0, 2, 1, rng())
    assert batch is not None
    held.put_back(batch)
    again = held.take(0, 2, 1, rng())
    assert again == batch


def test_external_groups_without_advantage_never_enter_and_the_pool_keeps_the_newest() -> None:
    held = buffer(external_bound=2)
    assert held.add(Item(name(0), 9, is_local=False, is_informative=False), 0) is Added.NO_ADVANTAGE
    for number in range(1, 5):
        assert held.add(Item(name(number), 9, is_local=False), 0) is Added.WAITING
    assert held.take_dropped() == [name(0), name(1), name(2)]
    assert held.external_waiting == 2


def test_external_groups_are_drawn_uniformly_and_reproducibly() -> None:
    counts = np.zeros(4)
    for seed in range(2000):
        held = buffer()
        held.add(Item(name(99), 0), 0)
        for number in range(4):
            held.add(Item(name(number), 0, is_local=False), 0)
        batch = held.take(0, 1, 2, rng(seed))
        assert batch is not None and len({item.id for item in batch.external}) == 2
        for item in batch.external:
            counts[int.from_bytes(item.id, "big")] += 1
    # Each of the four is in half of the draws; six standard deviations of a binomial.
    assert np.abs(counts - 1000).max() < 6 * np.sqrt(2000 * 0.25)


def test_a_full_buffer_drops_what_is_next_to_expire() -> None:
    held = buffer(local_bound=2)
    for number, oldest in enumerate([1, 0, 1]):
        held.add(Item(name(number), oldest), 1)
    assert held.take_dropped() == [name(1)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("local"), st.integers(0, 30), st.integers(0, 4)),
        st.tuples(st.just("external"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("abandon"), st.integers(1, 4), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(OPERATIONS, st.integers(0, 3))
def test_every_group_that_enters_leaves_once_or_waits(
    operations: list[tuple[str, int, int]], max_staleness: int
) -> None:
    held = buffer(max_staleness=max_staleness, local_bound=10, external_bound=3)
    version, generator = 4, rng()
    entered: set[bytes] = set()
    consumed: list[bytes] = []
    dropped: list[bytes] = []
    for kind, first, second in operations:
        if kind in ("local", "external"):
            local = kind == "local"
            item = Item(name(first), version - second if local else 0, local, bool(second) or local)
            if held.add(item, version) is not Added.DUPLICATE:
                entered.add(item.id)
            continue
        batch = held.take(version, first, second, generator)
        if batch is None:
            continue
        assert len(batch.local) == first and len(batch.external) <= second
        assert all(0 <= version - item.oldest_version <= max_staleness for item in batch.local)
        assert [i.oldest_version for i in batch.local] == sorted(i.oldest_version for i in batch.local)
        if kind == "abandon":
            held.put_back(batch)
            continue
        consumed += [item.id for item in (*batch.local, *batch.external)]
        version += 1
    dropped += held.take_dropped()
    left = [*consumed, *dropped]
    assert len(left) == len(set(left)), "an id left twice"
    assert set(left) <= entered
    assert len(entered) == len(left) + held.local_waiting + held.external_waiting
