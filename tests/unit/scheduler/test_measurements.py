"""What the learner measures: from what arrives, not from what is claimed."""

import pytest

from swarmnode.scheduler import measurements as module
from swarmnode.scheduler.capacity import Timing
from swarmnode.scheduler.measurements import Measurements


def work(measured: Measurements, worker: bytes, *, at_once: int, each_s: float, groups: int) -> None:
    """A worker that works on `at_once` groups at once, each of which takes `each_s`."""
    measured.credit_asked(worker, wanted=at_once, outstanding=0)
    for _ in range(groups):
        measured.group_arrived(worker, each_s)
        measured.credit_asked(worker, wanted=1, outstanding=at_once)


def test_a_claim_is_believed_until_groups_come() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=10.0)
    claim = measured.groups_per_s(b"w")
    assert claim is not None and claim.value == pytest.approx(10.0)
    work(measured, b"w", at_once=4, each_s=8.0, groups=100)
    seen = measured.groups_per_s(b"w")
    assert seen is not None and seen.value == pytest.approx(0.5, rel=0.05)
    assert not seen.excludes(0.5)


def test_idle_time_for_want_of_credit_is_not_held_against_a_worker() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=0.5)
    work(measured, b"w", at_once=4, each_s=8.0, groups=50)
    # It gets one group in ten minutes, and asks for the other three that it could work on.
    for _ in range(50):
        measured.credit_asked(b"w", wanted=3, outstanding=1)
        measured.group_arrived(b"w", 8.0)
    seen = measured.groups_per_s(b"w")
    assert seen is not None and seen.value == pytest.approx(0.5, rel=0.05)


def test_groups_on_their_way_are_not_taken_for_groups_in_hand() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=0.1)
    work(measured, b"w", at_once=1, each_s=10.0, groups=100)
    known = measured.worker(b"w")
    assert known is not None and known.at_once == 1
    assert known.rate.value == pytest.approx(0.1, rel=0.05)


def test_departures_are_pooled_by_kind_and_count_the_time_of_who_stays() -> None:
    measured = Measurements()
    for number in range(10):
        measured.joined(bytes([number]), 0.0, kind="rented", claimed_groups_per_s=1.0)
    measured.joined(b"volunteer", 0.0, kind="volunteer", claimed_groups_per_s=1.0)
    for number in range(5):
        measured.left(bytes([number]), 3600.0)
    rented = measured.departures_per_s(b"\x09", 2 * 3600.0)
    quiet = measured.departures_per_s(b"volunteer", 2 * 3600.0)
    assert rented is not None and quiet is not None
    # 5 departures in 5 × 1 + 5 × 2 hours, and half a one in ten hours of prior.
    assert rented.value * 3600 == pytest.approx(5.5 / 25)
    assert quiet.value < rented.low


def test_who_was_sent_away_did_not_depart() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=1.0)
    measured.left(b"w", 10.0, by_choice_of_ours=True)
    rate = measured.departures_per_s(b"w", 3600.0)
    assert rate is not None and rate.value <= module.DEPARTURES_PRIOR_PER_S


def test_who_comes_back_keeps_what_was_measured() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=10.0)
    work(measured, b"w", at_once=4, each_s=8.0, groups=100)
    measured.left(b"w", 800.0)
    measured.joined(b"w", 860.0, kind="rented", claimed_groups_per_s=10.0)
    seen = measured.groups_per_s(b"w")
    assert seen is not None and seen.value < 1.0


def test_timing_takes_measurements_over_words() -> None:
    measured = Measurements()
    measured.joined(b"w", 0.0, kind="rented", claimed_groups_per_s=1.0)
    word = Timing(1.0, broadcast_s=20.0, latency_s=5.0)
    assert measured.timing(b"w", word) == word
    measured.version_ready(b"w", 31.0)
    work(measured, b"w", at_once=4, each_s=8.0, groups=10)
    timing = measured.timing(b"w", word)
    assert timing.broadcast_s == 31.0 and timing.latency_s == pytest.approx(8.0)
    assert measured.timing(b"stranger", word) == word


def test_longer_answers_of_another_mix_are_known_before_it_comes() -> None:
    measured = Measurements()
    for _ in range(100):
        measured.completion("sums", 10)
        measured.completion("proofs", 1000)
    assert measured.tokens_per_completion({"sums": 1.0}) == pytest.approx(10, rel=0.2)
    mixed = measured.tokens_per_completion({"sums": 1.0, "proofs": 1.0})
    assert mixed == pytest.approx(505, rel=0.2)
    assert measured.tokens_per_completion({"unseen": 1.0}) is None


def test_any_number_of_workers_and_words_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORKERS", 10)
    monkeypatch.setattr(module, "MAX_KINDS", 3)
    monkeypatch.setattr(module, "MAX_FAMILIES", 3)
    measured = Measurements()
    for number in range(100):
        measured.joined(str(number).encode(), 0.0, kind=f"kind {number}", claimed_groups_per_s=1.0)
        measured.completion(f"family {number}", 5)
    assert sum(measured.worker(str(number).encode()) is not None for number in range(100)) == 10
    assert len(measured.lengths) <= 4
