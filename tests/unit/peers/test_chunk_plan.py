"""Which chunk is asked of whom: by weight, rarest first, within bounds, with pauses, probes and races."""

import itertools
import random

from peers.base import PeerId
from peers.chunk_plan import MISSES_BEFORE_PAUSE, RACE_AFTER_S, ChunkPlan
from peers.chunk_serving import bit_map
from peers.reputation import Reputation

A, B, C = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def plan(count=8, already=(), per_peer=2, max_bytes=10_000, size=100) -> ChunkPlan:
    return ChunkPlan(
        [size] * count,
        set(already),
        Reputation(),
        random.Random(5),
        per_peer_in_flight=per_peer,
        max_in_flight_bytes=max_bytes,
    )


def learn_holdings(chunks: ChunkPlan, peer: PeerId, held, count=8, now_s=0.0) -> None:
    """Let `peer` miss a chunk and answer with a map of `held`."""
    (request,) = [index for asked, index in chunks.begin([peer], now_s) if index not in held][:1]
    chunks.miss(peer, request, bit_map(count, held), now_s)
    for index in [index for index, work in list(chunks._work.items()) if peer in work.peers]:
        chunks.end(peer, index)


def test_each_peer_gets_its_places_and_each_chunk_is_asked_for_once():
    begun = plan().begin([A, B, C], 0.0)
    assert sorted(peer for peer, _ in begun) == [A, A, B, B, C, C]
    assert len({index for _, index in begun}) == 6


def test_the_bytes_in_flight_are_bounded_but_one_chunk_may_always_be_asked_for():
    assert len(plan(max_bytes=350).begin([A, B, C], 0.0)) == 3
    assert len(plan(max_bytes=50).begin([A, B, C], 0.0)) == 1


def test_a_chunk_that_did_not_arrive_is_asked_for_again_and_one_that_did_is_not():
    chunks = plan(count=2)
    (_, first), (_, second) = chunks.begin([A], 0.0)
    assert chunks.begin([B], 0.0) == [], "all are under way"
    assert chunks.arrive(A, first, 1.0, 1.0)
    chunks.end(A, first)
    chunks.end(A, second)
    assert chunks.begin([B], 1.0) == [(B, second)]
    assert chunks.arrived == {first}


def test_a_failing_peer_rests_and_a_dropped_one_is_never_asked_again():
    chunks = plan(per_peer=1)
    ((_, index),) = chunks.begin([A], 0.0)
    chunks.fail(A, "timed out", 0.0, timed_out=True)
    chunks.end(A, index)
    assert chunks.begin([A], 0.2) == []
    assert 0.25 <= chunks.next_look_s(0.2) <= 0.5
    ((_, index),) = chunks.begin([A], 0.5)
    assert chunks.peers[A].timeout_factor == 2.0
    chunks.drop(A, "wrong hash")
    chunks.end(A, index)
    assert chunks.begin([A], 1e6) == []


def test_a_peer_that_ran_out_of_time_or_is_slow_gets_one_request_at_a_time():
    chunks = plan()
    for _, index in chunks.begin([A], 0.0):
        chunks.fail(A, "timed out", 0.0, timed_out=True)
        chunks.end(A, index)
    assert len(chunks.begin([A], 100.0)) == 1
    slow = plan()
    slow._reputation.record_success(A, 100, 3.0, 0.0)
    assert len(slow.begin([A], 0.0)) == 1


def test_a_peer_is_asked_for_what_its_map_says_it_has():
    chunks = plan(per_peer=8)
    learn_holdings(chunks, A, [2, 5])
    assert sorted(index for _, index in chunks.begin([A], 0.0)) == [2, 5]


def test_rare_chunks_come_first():
    chunks = plan(per_peer=3)
    learn_holdings(chunks, B, [0, 1, 2, 3, 4])
    learn_holdings(chunks, C, [0, 1, 2, 3, 4])
    assert {index for _, index in chunks.begin([A], 0.0)} == {5, 6, 7}


def test_a_map_that_makes_no_sense_counts_as_empty():
    for held in (b"", b"\xff", b"\xff" * 5):
        chunks = plan(count=20)
        requests = chunks.begin([A], 0.0)
        chunks.miss(A, requests[0][1], held, 0.0)
        for _, index in requests:
            chunks.end(A, index)
        assert not any(chunks.peers[A].may_have(index) for index in range(20))


def test_a_peer_that_has_nothing_is_probed_ever_more_slowly():
    chunks = plan()
    learn_holdings(chunks, A, [])
    times = []
    now_s = 0.0
    for _ in range(8):
        (request,) = chunks.begin([A], now_s)
        times.append(now_s)
        assert chunks.begin([A], now_s) == [], "one probe at a time"
        chunks.miss(A, request[1], bit_map(8, []), now_s)
        chunks.end(A, request[1])
        now_s = chunks.next_look_s(now_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 0.2 <= gaps[0] <= 0.3 and 0.8 <= gaps[-1] <= 1.2


def test_a_peer_whose_maps_lie_is_paused():
    chunks = plan(per_peer=1)
    now_s = 0.0
    for _ in range(MISSES_BEFORE_PAUSE + 1):
        ((_, index),) = chunks.begin([A], now_s)
        everything_else = [other for other in range(8) if other != index]
        chunks.miss(A, index, bit_map(8, everything_else), now_s)
        chunks.end(A, index)
    assert chunks.begin([A], now_s) == []
    assert chunks.begin([A], now_s + 1.0) != []


def test_the_last_chunks_are_raced_when_they_take_too_long():
    chunks = plan(count=1)
    ((_, index),) = chunks.begin([A], 0.0)
    assert chunks.begin([A, B], RACE_AFTER_S - 0.1) == []
    assert chunks.begin([A, B], RACE_AFTER_S) == [(B, index)]
    assert chunks.begin([C], 100.0) == [], "two are enough"
    assert chunks.arrive(B, index, 1.0, 3.0)
    assert not chunks.arrive(A, index, 1.0, 3.0), "the slower one brings nothing new"
    chunks.end(B, index)
    chunks.end(A, index)
    assert chunks.begin([A, B, C], 200.0) == []
