"""The ledger: recorded once, consumed once, reconciled with the learner's checkpoint after a crash."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.store import Store, StoreError


def _accept(
    store: Store, name: bytes, *, source: str = "local", sender: bytes = b"s" * 32, counter: int | None = None
) -> bool:
    return store.accept(
        name,
        sender=sender,
        policy=b"p" * 32,
        counter=int.from_bytes(name, "big") if counter is None else counter,
        oldest_version=3,
        source=source,
        tokens=12,
        mean_reward=0.5,
        envelope=b"signed " + name,
        checked={"prompt_ids": [1, 2], "completions": None, "rewards": [0.0, 1.0]},
    )


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path / "state.sqlite")
    yield opened
    opened.close()


def test_a_group_is_recorded_once(store: Store) -> None:
    assert _accept(store, b"a")
    assert not _accept(store, b"a")
    assert store.counts() == {"accepted": 1}
    (waiting,) = store.waiting()
    assert waiting.id == b"a"
    assert waiting.envelope == b"signed a"
    assert waiting.checked == {"prompt_ids": [1, 2], "completions": None, "rewards": [0.0, 1.0]}


def test_a_counter_brings_one_group_of_each_sender(store: Store) -> None:
    assert _accept(store, b"a", counter=5)
    assert not _accept(store, b"the same work signed anew", counter=5)
    assert _accept(store, b"another sender", counter=5, sender=b"t" * 32)
    assert store.counts() == {"accepted": 2}


def test_a_known_group_keeps_its_verdict(store: Store) -> None:
    assert store.verdict(b"a") is None
    _accept(store, b"a")
    store.record_update(4, [b"a"], [])
    verdict = store.verdict(b"a")
    assert verdict is not None and verdict.accepted


def test_consuming_twice_or_the_unknown_is_reported(store: Store) -> None:
    for name in (b"a", b"b"):
        assert _accept(store, name)
    assert store.record_update(1, [b"a"], [b"b"]) == []
    assert store.record_update(2, [b"a", b"b", b"never seen"], []) == [b"a", b"b", b"never seen"]
    assert store.counts() == {"consumed": 1, "stale": 1}


def test_repeating_the_same_update_changes_nothing(store: Store) -> None:
    _accept(store, b"a")
    assert store.record_update(1, [b"a"], []) == []
    assert store.record_update(1, [b"a"], []) == []
    assert store.counts() == {"consumed": 1}


def test_reconcile_follows_the_checkpoint_both_ways(store: Store) -> None:
    for name in (b"a", b"b", b"c", b"d"):
        _accept(store, name)
    store.record_update(1, [b"a"], [])
    store.record_update(2, [b"b"], [b"c"])
    # The checkpoint knows version 1 only, and that it consumed d, which the ledger never heard.
    assert store.reconcile(1, {1: [b"a", b"d"]}) == (2, 1)
    assert {group.id for group in store.waiting()} == {b"b", b"c"}
    assert store.counts() == {"accepted": 2, "consumed": 2}


def test_reserved_numbers_never_repeat_across_restarts(tmp_path: Path) -> None:
    seen: list[int] = []
    for count in (3, 1, 5):
        store = Store(tmp_path / "state.sqlite")
        first = store.reserve("group_counter", count)
        seen += range(first, first + count)
        store.close()
    assert seen == list(range(9))


def test_outbox_keeps_a_group_until_its_receipt(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    store.put_outbox(b"x", 7, b"envelope x")
    store.put_outbox(b"w", 6, b"envelope w")
    store.close()
    store = Store(tmp_path / "state.sqlite")
    assert store.outbox() == [(b"w", b"envelope w"), (b"x", b"envelope x")]
    store.settle_outbox(b"w", "accepted")
    store.settle_outbox(b"x", "too_stale")
    assert store.outbox() == []
    assert store.receipts() == {"accepted": 1, "too_stale": 1}
    store.close()


def test_refusals_add_up_across_restarts(tmp_path: Path) -> None:
    for _ in range(2):
        store = Store(tmp_path / "state.sqlite")
        store.add_refusals({"too_stale": 2, "replayed": 1})
        store.close()
    store = Store(tmp_path / "state.sqlite")
    assert store.refusals() == {"too_stale": 4, "replayed": 2}
    store.close()


def test_bodies_of_old_finished_groups_are_dropped_and_waiting_ones_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.store.KEEP_BODIES", 2)
    names = [bytes([number]) for number in range(6)]
    for name in names:
        _accept(store, name)
    store.record_update(1, names[:5], [])
    assert store.envelopes(names, 10**6) == [b"signed " + name for name in names[3:]]


def test_a_damaged_ledger_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot open the ledger"):
        Store(path)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["accept", "update", "crash"]), st.integers(0, 7)), max_size=25))
def test_no_group_is_consumed_twice_in_the_surviving_history(
    tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    """A model of learner and ledger: updates consume what waits; a crash falls back to an earlier
    checkpoint."""
    path = tmp_path / f"{os.urandom(8).hex()}.sqlite"
    store = Store(path)
    history: dict[int, list[bytes]] = {}
    version = 0
    for step, number in steps:
        if step == "accept":
            _accept(store, bytes([number]))
        elif step == "update":
            version += 1
            history[version] = [group.id for group in store.waiting()][: number or 1]
            assert store.record_update(version, history[version], []) == []
        else:
            version = max(0, version - number % 3)
            history = {one: groups for one, groups in history.items() if one <= version}
            store.close()
            store = Store(path)
            store.reconcile(version, history)
        consumed = [group for groups in history.values() for group in groups]
        assert len(consumed) == len(set(consumed))
        assert not {group.id for group in store.waiting()} & set(consumed)
        assert sum(store.counts().values()) == len(set(consumed)) + len(store.waiting())
    store.close()


@pytest.mark.e2e
def test_what_was_accepted_survives_kill_9(tmp_path: Path) -> None:
    """The process says a number only after its transaction; every number said is there afterwards."""
    path = tmp_path / "state.sqlite"
    program = textwrap.dedent(
        f"""
        import pathlib
        from swarmnode.store import Store
        store = Store(pathlib.Path({str(path)!r}))
        for number in range(100_000):
            store.accept(number.to_bytes(4, "big"), sender=b"s", policy=b"p", counter=number,
                         oldest_version=0, source="local",
                         tokens=1, mean_reward=0.0, envelope=b"e", checked={{}})
            print(number, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(40)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().splitlines()
    process.wait()
    store = Store(path)
    assert store.counts()["accepted"] >= int(said[-1]) + 1
    store.close()


def test_a_ledger_can_be_used_from_several_threads(store: Store) -> None:
    """The event loop reserves sequence numbers while the store's thread is in a transaction."""
    failures: list[BaseException] = []
    reserved: list[int] = []

    def accept() -> None:
        try:
            for number in range(200):
                _accept(store, number.to_bytes(2, "big"))
                store.record_update(number + 1, [number.to_bytes(2, "big")], [])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    while thread.is_alive():
        reserved.append(store.reserve("sequence", 1))
    thread.join()
    assert failures == []
    assert reserved == list(range(len(reserved)))
    assert store.counts() == {"consumed": 200}


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    _accept(store, b"a")

    def ids() -> Iterator[bytes]:
        yield b"a"
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        store.record_update(1, ids(), [])
    assert store.counts() == {"accepted": 1}
    assert store.record_update(1, [b"a"], []) == []


def test_counts_are_those_of_the_groups_after_any_history(store: Store) -> None:
    for number in range(6):
        _accept(store, bytes([number]), source="external" if number % 2 else "local", sender=b"x" * 31 + b"y")
    _accept(store, b"z", sender=b"z" * 32)
    store.record_update(1, [b"\0", b"\1", b"\2"], [b"\3"])
    store.record_update(2, [b"\4"], [])
    store.reconcile(1, {1: [b"\0", b"\1", b"\2"]})
    assert store.counts() == {"accepted": 3, "consumed": 3, "stale": 1}
    assert store.accepted_by_sender() == {b"x" * 31 + b"y": 6, b"z" * 32: 1}
    assert store.consumed_external_by_sender() == {b"x" * 31 + b"y": 1}
    assert (store.updates(), store.staleness()) == (1, {-3: 2})


def test_a_ledger_without_a_tally_gets_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    _accept(store, b"a")
    store._db.execute("DELETE FROM tally")
    store.close()
    store = Store(tmp_path / "state.sqlite")
    assert store.counts() == {"accepted": 1}
    store.close()


def test_groups_whose_bodies_are_gone_are_stale_when_their_update_is_undone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checkpoints were lost: what the ledger cannot hand over again must not stop the start."""
    monkeypatch.setattr("swarmnode.store.KEEP_BODIES", 2)
    names = [bytes([number]) for number in range(6)]
    for name in names:
        _accept(store, name)
    store.record_update(1, names, [])
    assert store.reconcile(0, {}) == (3, 0)
    assert [group.id for group in store.waiting()] == names[3:]
    assert store.counts() == {"accepted": 3, "stale": 3}


def test_published_versions_are_counted_once_each(store: Store) -> None:
    assert [store.record_published(version) for version in (0, 1, 1, 3)] == [1, 2, 2, 3]
    assert store.published_versions() == 3
