"""Trust falls with faults by reason, heals slowly, and steers choices without shutting anybody out."""

import math
import random
from collections import Counter

import pytest

from peers.base import PeerId
from peers.reputation import HEAL_TIME_S, PENALTIES, Reputation
from protocol.refusals import RefusalReason

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def test_a_stranger_is_trusted_and_has_no_rate():
    reputation = Reputation()
    assert reputation.score(A, 0.0) == 1.0
    assert reputation.rate_bytes_per_s(A) is None


def test_a_fault_takes_its_share_of_the_trust():
    reputation = Reputation()
    assert reputation.penalize(A, RefusalReason.BAD_SIGNATURE, 0.0) == 0.5
    assert reputation.penalize(A, RefusalReason.BAD_SIGNATURE, 0.0) == 0.25
    assert reputation.penalize(A, RefusalReason.MALFORMED, 0.0) == pytest.approx(0.225)
    assert reputation.score(B, 0.0) == 1.0


@pytest.mark.parametrize("reason", ["too_stale", "busy", "not_found", "no_credit", "future_version"])
def test_what_honest_peers_do_costs_nothing(reason):
    reputation = Reputation()
    assert reputation.penalize(A, RefusalReason(reason), 0.0) == 1.0


def test_every_penalty_is_a_share():
    assert all(0 < penalty < 1 for penalty in PENALTIES.values())


def test_trust_heals_by_its_time_constant_and_never_beyond_one():
    reputation = Reputation()
    reputation.penalize(A, RefusalReason.WRONG_HASH, 100.0)
    assert reputation.score(A, 100.0) == 0.5
    assert reputation.score(A, 100.0 + HEAL_TIME_S) == pytest.approx(1 - 0.5 / math.e)
    assert reputation.score(A, 1e9) == 1.0
    assert reputation.score(A, 50.0) == 0.5, "a clock that seems to run backwards changes nothing"


def test_healing_counts_between_two_faults():
    reputation = Reputation()
    reputation.penalize(A, RefusalReason.WRONG_HASH, 0.0)
    healed = 1 - 0.5 / math.e
    assert reputation.penalize(A, RefusalReason.WRONG_HASH, HEAL_TIME_S) == pytest.approx(healed / 2)


def test_the_rate_is_a_moving_average():
    reputation = Reputation()
    reputation.record_success(A, 1_000, 1.0, 0.0)
    assert reputation.rate_bytes_per_s(A) == 1_000
    reputation.record_success(A, 2_000, 1.0, 1.0)
    assert reputation.rate_bytes_per_s(A) == pytest.approx(1_200)
    reputation.record_success(A, 1_000, 0.0, 2.0)
    assert reputation.rate_bytes_per_s(A) > 1_200, "an answer in no time is no division by zero"


def test_weights_are_trust_times_success_times_rate():
    reputation = Reputation()
    reputation.record_success(A, 4_000, 1.0, 0.0)
    reputation.record_success(B, 2_000, 1.0, 0.0)
    assert reputation.weights([A, B, C], 0.0) == [4_000, 2_000, 3_000], "the unmeasured counts as average"
    reputation.record_failure(A, 0.0)
    reputation.penalize(B, RefusalReason.WRONG_HASH, 0.0)
    assert reputation.weights([A, B], 0.0) == pytest.approx([3_200, 1_000])


def test_choices_follow_the_weights_and_still_try_the_worst():
    reputation = Reputation()
    reputation.record_success(A, 9_000, 1.0, 0.0)
    reputation.record_success(B, 1_000, 1.0, 0.0)
    for _ in range(50):
        reputation.penalize(C, RefusalReason.WRONG_HASH, 0.0)
    rng = random.Random(1)
    drawn = Counter(reputation.choose([A, B, C], rng, 0.0) for _ in range(10_000))
    # Weights 9000 : 1000 : 180 (the floor: 2 % of the best).
    assert drawn[A] / 10_000 == pytest.approx(9_000 / 10_180, abs=0.02)
    assert drawn[B] / 10_000 == pytest.approx(1_000 / 10_180, abs=0.02)
    assert drawn[C] / 10_000 == pytest.approx(180 / 10_180, abs=0.01)


def test_records_are_bounded_and_the_longest_untouched_goes_first():
    reputation = Reputation(max_peers=2)
    for peer in (A, B):
        reputation.penalize(peer, RefusalReason.WRONG_HASH, 0.0)
    reputation.record_failure(A, 1.0)
    reputation.penalize(C, RefusalReason.WRONG_HASH, 2.0)
    assert reputation.score(A, 2.0) < 0.6
    assert reputation.score(B, 2.0) == 1.0, "forgotten"
