"""Last words per member: how they came, who has left, and a bound that connected members do not fall to."""

from peers.base import PeerId
from peers.membership import MAX_MEMBERS, RECENT_S, Membership
from protocol.identity import NodeKey
from protocol.messages import Hello, Presence

OWN, A, B = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
HELLO = Hello(name="a", role="worker", software="test")
PRESENCE = Presence(name="a", role="learner", software="test", updates=7)


def test_gossip_makes_a_member_that_is_not_direct_and_a_hello_makes_it_direct():
    members = Membership(OWN)
    members.heard_presence(A, PRESENCE, 1.0)
    info = members.view(set())[A]
    assert (info.direct, info.connected, info.presence, info.last_heard_s) == (False, False, PRESENCE, 1.0)
    members.heard_hello(A, HELLO, 2.0, 0.25)
    info = members.view({PeerId(A)})[A]
    assert (info.direct, info.connected, info.hello, info.presence) == (True, True, HELLO, PRESENCE)
    assert (info.round_trip_s, info.last_heard_s) == (0.25, 2.0)
    members.heard_presence(A, PRESENCE, 3.0)
    assert members.view(set())[A].direct, "it was once"
    assert members.role(A) == "learner"
    assert members.find(A, set()) == members.view(set())[A]


def test_this_node_is_not_a_member_of_its_own_view():
    members = Membership(OWN)
    members.heard_presence(OWN, PRESENCE, 1.0)
    members.heard_hello(OWN, HELLO, 1.0, None)
    assert members.view(set()) == {} and members.find(OWN, set()) is None


def test_a_member_that_left_is_back_when_it_speaks_again():
    members = Membership(OWN)
    members.heard_presence(A, PRESENCE.model_copy(update={"leaving": True}), 1.0)
    assert members.has_left(A) and members.recent(1.0) == []
    members.heard_presence(A, PRESENCE, 2.0)
    assert not members.has_left(A) and members.recent(2.0) == [A]


def test_recent_ends_with_silence():
    members = Membership(OWN)
    members.heard_hello(A, HELLO, 100.0, None)
    members.heard_presence(B, PRESENCE, 100.0 + RECENT_S)
    assert members.recent(100.0 + RECENT_S) == [A, B]
    assert members.recent(101.0 + RECENT_S) == [B]
    assert members.count_recent(100.0 + 2 * RECENT_S) == 1
    assert members.spoke_directly_s(A) == 100.0
    assert members.spoke_directly_s(B) == float("-inf")


def test_a_flood_of_members_is_bounded_and_the_longest_silent_go_first():
    members = Membership(OWN)
    members.heard_hello(A, HELLO, 0.0, None)
    for number in range(2 * MAX_MEMBERS):
        members.heard_presence(NodeKey((1_000 + number).to_bytes(32, "big")), PRESENCE, 1.0 + number)
    assert len(members.view(set())) == MAX_MEMBERS + MAX_MEMBERS // 2
    members.heard_hello(B, HELLO, 9e9, None)
    members.trim({PeerId(A)})
    assert len(members.view(set())) == MAX_MEMBERS
    assert {A, B} <= set(members.view(set())), "connected members stay, new ones come in"
