"""Super-seeding: each chunk once first, to whoever passes it on soonest, whatever a liar says."""

import random

from peers.chunk_giving import PATIENCE_S, Giving


def giving(count=6, clients="ab"):
    chunks = Giving(count, random.Random(1))
    for client in clients:
        chunks.join(client)
    return chunks


def test_each_chunk_is_given_once():
    chunks = giving()
    given = [chunks.take("ab"[turn % 2], 0.0) for turn in range(6)]
    assert sorted(given) == list(range(6))
    assert not chunks.active
    assert chunks.take("a", 1.0) is None


def test_nobody_is_given_what_it_has():
    chunks = giving(count=2)
    chunks.reported("a", [0], 0.0)
    assert chunks.take("a", 0.0) == 1
    assert chunks.take("a", 0.0) is None


def test_what_somebody_has_already_is_not_given():
    chunks = giving()
    chunks.reported("a", [0, 1, 2], 0.0)
    chunks.reported("b", [0, 1, 2], 0.0)
    assert sorted(chunks.take("a", 0.0) for _ in range(3)) == [3, 4, 5]
    assert not chunks.active


def test_a_claim_that_nobody_confirms_is_doubted_after_a_while():
    chunks = giving(clients="ab!")
    chunks.reported("!", range(6), 0.0)
    assert chunks.active
    assert chunks.take("a", PATIENCE_S / 2) is None
    assert sorted(chunks.take("ab"[turn % 2], PATIENCE_S) for turn in range(6)) == list(range(6))


def test_what_only_one_that_left_was_given_is_given_again():
    chunks = giving(count=2, clients="abc")
    first, second = chunks.take("a", 0.0), chunks.take("b", 0.0)
    chunks.reported("a", [first], 1.0)
    chunks.reported("b", [second], 1.0)
    chunks.reported("c", [second], 2.0)
    assert not chunks.active
    chunks.leave("a")
    chunks.leave("b")
    assert chunks.take("c", 3.0) == first
    assert not chunks.active


def spread(chunks, client, other, given_s, spread_s):
    index = chunks.take(client, given_s)
    chunks.reported(client, [index], given_s)
    chunks.reported(other, [index], spread_s)


def test_who_passes_chunks_on_sooner_is_given_more():
    chunks = giving(count=100, clients="fs")
    spread(chunks, "f", "s", 0.0, 1.0)
    spread(chunks, "s", "f", 0.0, 4.0)
    given = {"f": 0, "s": 0}
    for _ in range(20):
        soonest = min("fs", key=lambda client: chunks.spread_s(client, 4.0))
        chunks.take(soonest, 4.0)
        given[soonest] += 1
    assert given == {"f": 16, "s": 4}


def test_who_keeps_a_chunk_to_itself_is_expected_to_go_on_so():
    chunks = giving(count=100)
    spread(chunks, "a", "b", 0.0, 1.0)
    spread(chunks, "b", "a", 0.0, 1.0)
    chunks.take("a", 2.0)
    assert chunks.spread_s("a", 2.0) == 2.0
    assert chunks.spread_s("a", 22.0) == 40.0
    assert chunks.spread_s("b", 22.0) == 1.0
