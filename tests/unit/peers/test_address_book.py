"""Whose word counts about addresses, how long a failing one waits, what is kept and what is forgotten."""

import random

import pytest

from peers.address_book import (
    FORGET_AFTER_FAILURES,
    FORGET_AFTER_S,
    MAX_ADDRESSES_PER_PEER,
    MAX_PEERS,
    AddressBook,
    valid_address,
)
from peers.base import PeerId
from peers.libp2p_address import peer_id_to_text

OWN, A, B = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def at(peer: PeerId, port: int = 4001, host: str = "10.0.0.2") -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{peer_id_to_text(peer)}"


def book() -> AddressBook:
    return AddressBook(OWN, random.Random(1))


def fail(addresses: AddressBook, peer: PeerId, address: str, times: int = 1, now_s: float = 0.0) -> None:
    for _ in range(times):
        addresses.failed(peer, address, now_s, "refused")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "10.0.0.2:4001",
        at(B),
        "/p2p/" + peer_id_to_text(A),
        at(A, host="0.0.0.0"),
        at(A) + "\n",
        "/dns4/" + "a" * 250 + "/tcp/1/p2p/" + peer_id_to_text(A),
    ],
)
def test_addresses_that_lead_nowhere_or_to_others_are_left_out(address):
    assert not valid_address(A, address)
    addresses = book()
    assert not addresses.learn(A, [address], 0.0, own_word=True)
    assert addresses.peers() == []


def test_this_node_s_own_addresses_are_left_out():
    addresses = book()
    assert not addresses.learn(OWN, [at(OWN)], 0.0, own_word=False)
    addresses.add_seed(at(OWN))
    assert len(addresses) == 0


def test_a_peer_s_own_word_replaces_hearsay_and_older_words():
    addresses = book()
    assert addresses.learn(A, [at(A, 1)], 0.0, own_word=False)
    assert addresses.learn(A, [at(A, 2)], 1.0, own_word=False)
    assert addresses.addresses(A) == [at(A, 1), at(A, 2)]
    assert addresses.learn(A, [at(A, 3)], 2.0, own_word=True)
    assert addresses.addresses(A) == [at(A, 3)]
    assert not addresses.learn(A, [at(A, 4)], 3.0, own_word=False), "its own word stands"
    assert not addresses.learn(A, [at(A, 3)], 4.0, own_word=True), "nothing new"


def test_hearsay_counts_again_when_a_peer_s_own_addresses_all_fail():
    addresses = book()
    addresses.learn(A, [at(A, 1)], 0.0, own_word=True)
    fail(addresses, A, at(A, 1))
    assert addresses.learn(A, [at(A, 2)], 1.0, own_word=False)
    assert addresses.due(A, 0.0) == [at(A, 2)]


def test_back_off_doubles_to_half_a_minute_with_jitter():
    addresses = book()
    addresses.learn(A, [at(A)], 0.0, own_word=True)
    for failures in range(1, 12):
        addresses.failed(A, at(A), 100.0, f"error {failures}")
        (record,) = addresses.records(A)
        full_s = min(30.0, 0.5 * 2 ** (failures - 1))
        assert full_s / 2 <= record.next_try_s - 100.0 <= full_s
        assert record.last_error == f"error {failures}"
    assert addresses.due(A, 114.0) == []
    assert addresses.due(A, 130.0) == [at(A)]
    assert addresses.next_due_s([A], 100.0) == record.next_try_s
    assert addresses.next_due_s([A], 200.0) == float("inf")
    addresses.succeeded(A, at(A))
    assert addresses.due(A, 100.0) == [at(A)]


def test_a_peer_just_heard_of_is_tried_soon_whatever_its_back_off():
    addresses = book()
    addresses.learn(A, [at(A)], 0.0, own_word=True)
    addresses.trying(A, at(A), 100.0)
    fail(addresses, A, at(A), 10, now_s=100.0)
    addresses.learn(A, [at(A)], 101.0, own_word=True)
    assert addresses.records(A)[0].next_try_s == 102.0


def test_an_address_that_fails_long_is_forgotten_but_never_a_seed_or_a_required_peer_s():
    addresses = book()
    addresses.add_seed(at(A, 1))
    addresses.learn(A, [at(A, 1), at(A, 2)], 0.0, own_word=True)
    addresses.learn(B, [at(B, 1)], 0.0, own_word=True)
    for peer, address in ((A, at(A, 1)), (A, at(A, 2)), (B, at(B, 1))):
        fail(addresses, peer, address, FORGET_AFTER_FAILURES - 1)
    addresses.forget_failing(FORGET_AFTER_S)
    assert len(addresses.addresses(A)) == 2, "not often enough"
    for peer, address in ((A, at(A, 1)), (A, at(A, 2)), (B, at(B, 1))):
        fail(addresses, peer, address)
    addresses.forget_failing(FORGET_AFTER_S - 1)
    assert len(addresses.addresses(A)) == 2, "not long enough"
    addresses.kept = {B}
    addresses.forget_failing(FORGET_AFTER_S)
    assert addresses.addresses(A) == [at(A, 1)]
    assert addresses.addresses(B) == [at(B, 1)]
    addresses.kept = set()
    addresses.forget_failing(FORGET_AFTER_S)
    assert addresses.peers() == [A]


def test_a_peer_s_own_word_does_not_remove_a_seed():
    addresses = book()
    addresses.add_seed(at(A, 1))
    addresses.learn(A, [at(A, 2)], 0.0, own_word=True)
    assert addresses.addresses(A) == [at(A, 1), at(A, 2)]


def test_addresses_per_peer_are_bounded_and_a_failing_one_makes_room():
    addresses = book()
    addresses.learn(A, [at(A, port) for port in range(1, 16)], 0.0, own_word=True)
    assert addresses.addresses(A) == [at(A, port) for port in range(1, MAX_ADDRESSES_PER_PEER + 1)]
    for port in range(1, MAX_ADDRESSES_PER_PEER + 1):
        fail(addresses, A, at(A, port), port)
    addresses.learn(A, [at(A, 99)], 1.0, own_word=False)
    assert at(A, 99) in addresses.addresses(A)
    assert at(A, MAX_ADDRESSES_PER_PEER) not in addresses.addresses(A), "the worst went"


def test_a_flood_of_hearsay_displaces_only_hearsay():
    addresses = book()
    addresses.add_seed(at(A))
    addresses.learn(B, [at(B)], 0.0, own_word=True)
    for number in range(1_000, 1_000 + MAX_PEERS + 10):
        peer = PeerId(number.to_bytes(32, "big"))
        addresses.learn(peer, [at(peer)], float(number), own_word=False)
    assert len(addresses) == MAX_PEERS
    assert addresses.addresses(A) and addresses.addresses(B)


def test_the_cache_holds_what_peers_said_themselves_and_comes_back_as_hearsay():
    addresses = book()
    addresses.learn(A, [at(A)], 0.0, own_word=True)
    addresses.learn(B, [at(B)], 0.0, own_word=False)
    dumped = addresses.dump()
    assert dumped == {A.hex(): [at(A)]}
    again = book()
    assert again.load(dumped) == 1
    assert again.addresses(A) == [at(A)] and not again.is_own_word(A)
    assert again.load({"zz": [], "00": [at(A)], B.hex(): "x", A.hex(): [3, None]}) == 0
