"""Which chunk is asked of whom: rarest first, within bounds, moved or doubled where that helps."""

import random

import numpy as np

from peers.base import PeerId
from peers.chunk_frames import ANY
from peers.chunk_neighbour import BUSY_LOAD
from peers.chunk_plan import (
    FIRST_TIMEOUT_S,
    LEAST_TIMEOUT_S,
    RELIEF_EVERY_S,
    ChunkPlan,
    Request,
    Withdrawal,
)

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def mask(held, count=8):
    bits = np.zeros(count, dtype=np.bool_)
    bits[list(held)] = True
    return bits


def plan(count=8, already=(), max_bytes=10_000, size=100, **held) -> ChunkPlan:
    """A plan with neighbours A, B, C that hold the given chunks."""
    chunks = ChunkPlan([size] * count, set(already), random.Random(5), max_in_flight_bytes=max_bytes)
    for name, indices in held.items():
        peer = {"a": A, "b": B, "c": C}[name]
        chunks.join(peer)
        chunks.heard_holdings(peer, mask(indices, count), giving=False)
    return chunks


def requests(steps):
    return [(step.peer, step.index) for step in steps if isinstance(step, Request)]


def deliver(
    chunks: ChunkPlan, peer: PeerId, index: int, now_s: float, took_s: float = 0.5
) -> list[Withdrawal]:
    """The whole chunk comes in two pieces, the last one at `now_s`."""
    others = chunks.begun(peer, index, now_s - took_s / 2)
    assert others is not None
    chunks.received(peer, index, 50, now_s - took_s / 2)
    chunks.received(peer, index, 50, now_s)
    return others + chunks.arrived(peer, index, now_s)


def test_each_peer_gets_two_requests_and_each_chunk_is_asked_of_one():
    chunks = plan(a=range(8), b=range(8), c=range(8))
    begun = requests(chunks.steps(0.0))
    assert sorted(peer for peer, _ in begun) == [A, A, B, B, C, C]
    assert len({index for _, index in begun}) == 6
    assert chunks.in_flight_bytes == 600


def test_a_peer_with_enough_to_do_gets_one_request():
    chunks = plan(a=range(8), b=range(8))
    chunks.heard_load(A, BUSY_LOAD, 0.0)
    assert sorted(peer for peer, _ in requests(chunks.steps(0.0))) == [A, B, B]


def test_a_long_round_trip_is_filled_with_requests():
    chunks = plan(count=40, a=range(40))
    chunks.neighbours[A].round_trip_s = 1.0
    first = requests(chunks.steps(0.0))
    deliver(chunks, A, first[0][1], 1.0)
    deliver(chunks, A, first[1][1], 1.1, took_s=0.1)
    # A chunk comes every 0.7 × 1.0 + 0.3 × 0.1 s: one more fits into a round trip.
    assert len(requests(chunks.steps(1.1))) == 3


def test_the_bytes_in_flight_are_bounded_but_one_chunk_may_always_be_asked_for():
    assert len(plan(max_bytes=350, a=range(8), b=range(8)).steps(0.0)) == 3
    assert len(plan(max_bytes=50, a=range(8), b=range(8)).steps(0.0)) == 1


def test_what_is_not_yet_written_counts_as_in_flight():
    chunks = plan(max_bytes=100, a=range(8))
    ((_, index),) = requests(chunks.steps(0.0))
    deliver(chunks, A, index, 1.0)
    assert chunks.steps(1.0) == []
    chunks.kept(index)
    assert len(requests(chunks.steps(1.0))) == 1


def test_a_peer_is_asked_for_what_it_has_and_as_it_gets_more():
    chunks = plan(a=[2, 5])
    assert sorted(requests(chunks.steps(0.0))) == [(A, 2), (A, 5)]
    deliver(chunks, A, 2, 1.0)
    assert chunks.steps(1.0) == []
    chunks.heard_have(A, [7])
    assert requests(chunks.steps(1.0)) == [(A, 7)]


def test_a_peer_of_which_nothing_is_known_is_asked_for_nothing():
    chunks = plan()
    chunks.join(A)
    assert chunks.steps(0.0) == []


def test_rare_chunks_come_first():
    chunks = plan(a=range(8), b=range(6), c=range(6))
    asked_of_a = {index for peer, index in requests(chunks.steps(0.0)) if peer == A}
    assert asked_of_a == {6, 7}


def test_what_arrived_is_never_asked_for():
    chunks = plan(count=3, already=[0], a=range(3))
    assert sorted(requests(chunks.steps(0.0))) == [(A, 1), (A, 2)]
    deliver(chunks, A, 1, 1.0)
    deliver(chunks, A, 2, 1.0)
    assert chunks.steps(1.0) == [] and not chunks.missing.any()
    assert chunks.in_flight_bytes == 0


def test_what_was_asked_of_a_peer_that_left_is_asked_of_another():
    chunks = plan(count=2, a=range(2))
    assert len(chunks.steps(0.0)) == 2
    chunks.join(B)
    chunks.heard_holdings(B, mask(range(2), 2), giving=False)
    assert requests(chunks.steps(0.01)) == []
    chunks.leave(A)
    assert sorted(requests(chunks.steps(0.01))) == [(B, 0), (B, 1)]


def test_what_a_peer_lacks_after_all_is_asked_of_another():
    chunks = plan(count=1, a=[0])
    assert requests(chunks.steps(0.0)) == [(A, 0)]
    chunks.lack(A, [0], 0.1)
    assert chunks.steps(0.1) == []
    chunks.join(B)
    chunks.heard_holdings(B, mask([0], 1), giving=False)
    assert requests(chunks.steps(0.1)) == [(B, 0)]


def test_a_giver_is_asked_for_chunks_of_its_choice():
    chunks = plan(b=[1])
    chunks.join(A)
    chunks.heard_holdings(A, mask(range(8)), giving=True)
    steps = requests(chunks.steps(0.0))
    assert sorted(steps) == [(A, ANY), (A, ANY), (B, 1)]
    assert chunks.begun(A, 6, 1.0) == []
    assert chunks.in_flight_bytes == 300
    chunks.received(A, 6, 100, 1.0)
    assert chunks.arrived(A, 6, 1.0) == []
    assert requests(chunks.steps(1.0)) == [(A, ANY)]
    chunks.lack(A, [ANY, ANY], 2.0)
    chunks.heard_holdings(A, mask(range(8)), giving=False)
    asked = requests(chunks.steps(2.0))
    assert [peer for peer, _ in asked] == [A, A] and ANY not in {index for _, index in asked}


def test_a_giver_that_has_nothing_for_us_now_is_asked_again_later():
    chunks = plan(b=[])
    chunks.join(A)
    chunks.heard_holdings(A, mask(range(8)), giving=True)
    assert len(chunks.steps(0.0)) == 2
    chunks.lack(A, [ANY, ANY], 1.0)
    assert chunks.steps(1.5) == []
    assert len(chunks.steps(2.1)) == 2


def test_no_more_is_asked_of_a_giver_than_is_missing():
    chunks = plan(count=3, already=[0, 1], b=[])
    chunks.join(A)
    chunks.heard_holdings(A, mask(range(3), 3), giving=True)
    assert requests(chunks.steps(0.0)) == [(A, ANY)]


def test_givers_that_all_have_everything_are_asked_by_index():
    chunks = plan()
    for peer in (A, B):
        chunks.join(peer)
        chunks.heard_holdings(peer, mask(range(8)), giving=True)
    asked = [index for _, index in requests(chunks.steps(0.0))]
    assert len(set(asked)) == 4 and ANY not in asked


def test_a_chunk_given_that_was_asked_of_another_comes_from_whoever_began():
    chunks = plan(b=[1])
    chunks.join(A)
    chunks.heard_holdings(A, mask(range(8)), giving=True)
    assert (B, 1) in requests(chunks.steps(0.0))
    assert chunks.begun(A, 1, 1.0) == [Withdrawal(B, 1)]


def test_a_piece_that_nobody_asked_for_is_noticed():
    chunks = plan(a=[1])
    assert chunks.begun(A, 1, 0.0) is None


def known(chunks: ChunkPlan, peer: PeerId, service_s: float) -> None:
    chunks.neighbours[peer].service_s = service_s


def test_what_waits_long_at_one_peer_moves_to_one_that_brings_it_much_sooner():
    chunks = plan(count=1, a=[0])
    known(chunks, A, 4.0)
    assert requests(chunks.steps(0.0)) == [(A, 0)]
    chunks.join(B)
    chunks.heard_holdings(B, mask([0], 1), giving=False)
    known(chunks, B, 0.5)
    assert chunks.steps(RELIEF_EVERY_S) == [Withdrawal(A, 0), Request(B, 0)]


def test_where_the_gain_is_doubtful_a_second_peer_brings_it_only_if_it_is_idle():
    chunks = plan(count=1, a=[0])
    known(chunks, A, 2.0)
    assert requests(chunks.steps(0.0)) == [(A, 0)]
    chunks.join(B)
    chunks.heard_holdings(B, mask([0], 1), giving=False)
    known(chunks, B, 0.5)
    chunks.heard_load(B, 2, 0.0)
    assert chunks.steps(RELIEF_EVERY_S) == [Request(B, 0, spare=True)]
    assert chunks.steps(2 * RELIEF_EVERY_S) == [], "two are enough"
    assert chunks.begun(B, 0, 0.5) == [Withdrawal(A, 0)], "whoever begins first"


def test_a_chunk_that_has_begun_to_come_is_raced_only_if_it_crawls():
    chunks = plan(count=1, size=1_000, a=[0], b=[0])
    ((first, _),) = requests(chunks.steps(0.0))
    second = B if first == A else A
    known(chunks, second, 0.5)
    chunks.begun(first, 0, 0.1)
    chunks.received(first, 0, 500, 0.1)
    chunks.received(first, 0, 100, 0.3)
    assert chunks.steps(0.3) == [], "0.13 s are left"
    assert chunks.steps(3.0) == [Request(second, 0, spare=True)], "nothing came for 2.7 s"
    chunks.begun(second, 0, 3.5)
    chunks.received(second, 0, 1_000, 3.6)
    assert chunks.arrived(second, 0, 3.6) == [Withdrawal(first, 0)]


def test_a_peer_that_brings_nothing_fails_rests_and_gets_one_request_after():
    chunks = plan(count=3, a=range(3))
    asked = requests(chunks.steps(0.0))
    assert chunks.steps(FIRST_TIMEOUT_S - 1) == []
    steps = chunks.steps(FIRST_TIMEOUT_S)
    assert sorted(step.index for step in steps) == sorted(index for _, index in asked)
    assert all(isinstance(step, Withdrawal) for step in steps)
    assert chunks.in_flight_bytes == 0
    assert chunks.steps(FIRST_TIMEOUT_S + 0.5) == []
    assert len(chunks.steps(FIRST_TIMEOUT_S + 2)) == 1


def test_the_time_out_follows_what_is_usual():
    chunks = plan(count=3, a=range(3))
    asked = requests(chunks.steps(0.0))
    deliver(chunks, A, asked[0][1], 4.0)
    chunks.steps(4.0)
    assert chunks.steps(4.0 + 8 * 4.0 - 1) == []
    assert chunks.steps(4.0 + 8 * 4.0) != []
    assert LEAST_TIMEOUT_S < 8 * 4.0


def test_a_load_is_taken_to_shrink_at_the_peers_own_pace():
    chunks = plan(a=range(8))
    known(chunks, A, 0.5)
    chunks.heard_load(A, 4, 10.0)
    assert chunks.neighbours[A].waiting(10.0) == 4
    assert chunks.neighbours[A].waiting(11.0) == 2
    assert chunks.neighbours[A].waiting(99.0) == 0
