"""Who is in the swarm as this node sees it: the last words of every member and how they came. No clock."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from peers.base import PeerId
from protocol.identity import NodeKey
from protocol.messages import Hello, Presence

MAX_MEMBERS = 4_096
RECENT_S = 60.0
"""Members heard of within this time are named to others and counted as live."""


@dataclass(frozen=True)
class MemberInfo:
    """One member. Times are this node's monotonic seconds (trio's clock)."""

    key: NodeKey
    hello: Hello
    """Its latest word: a `Hello` said directly, or a `Presence` (which has more fields) from gossip."""
    presence: Presence | None
    """Its latest gossiped presence."""
    last_heard_s: float
    connected: bool
    """A connection is open and both sides have exchanged hellos on it."""
    direct: bool
    """It has spoken to this node itself at some time; False: known by relayed gossip only."""
    round_trip_s: float | None
    """How long its last hello took to be answered."""
    left: bool
    """It said that it leaves, and nothing since."""


@dataclass
class _Record:
    hello: Hello
    last_heard_s: float
    presence: Presence | None = None
    spoke_directly_s: float | None = None
    round_trip_s: float | None = None
    left: bool = False


class Membership:
    """Last words per member, bounded: the one silent for longest is dropped first, connected ones never."""

    def __init__(self, own_key: NodeKey) -> None:
        self._own_key = own_key
        self._records: dict[NodeKey, _Record] = {}

    def heard_hello(self, key: NodeKey, hello: Hello, now_s: float, round_trip_s: float | None) -> None:
        """A member said hello on a connection of its own."""
        record = self._record(key, hello, now_s, force=True)
        if record is None:
            return
        record.spoke_directly_s = now_s
        record.left = False
        if round_trip_s is not None:
            record.round_trip_s = round_trip_s

    def heard_presence(self, key: NodeKey, presence: Presence, now_s: float) -> None:
        """A member's signed presence came by gossip."""
        record = self._record(key, presence, now_s)
        if record is None:
            return
        record.presence = presence
        record.left = presence.leaving

    def has_left(self, key: NodeKey) -> bool:
        record = self._records.get(key)
        return record is not None and record.left

    def spoke_directly_s(self, key: NodeKey) -> float:
        """When the member last spoke to this node itself, minus infinity if never."""
        record = self._records.get(key)
        if record is None or record.spoke_directly_s is None:
            return float("-inf")
        return record.spoke_directly_s

    def role(self, key: NodeKey) -> str:
        record = self._records.get(key)
        return "" if record is None else record.hello.role

    def recent(self, now_s: float) -> list[NodeKey]:
        """Members heard of lately that have not left."""
        return [
            key
            for key, record in self._records.items()
            if not record.left and now_s - record.last_heard_s <= RECENT_S
        ]

    def count_recent(self, now_s: float) -> int:
        return len(self.recent(now_s))

    def view(self, connected: AbstractSet[PeerId]) -> dict[NodeKey, MemberInfo]:
        """All members; `connected` are the peers that a greeted connection leads to."""
        return {key: self._info(key, record, connected) for key, record in self._records.items()}

    def find(self, key: NodeKey, connected: AbstractSet[PeerId]) -> MemberInfo | None:
        """One member, as in `view`."""
        record = self._records.get(key)
        return None if record is None else self._info(key, record, connected)

    def _info(self, key: NodeKey, record: _Record, connected: AbstractSet[PeerId]) -> MemberInfo:
        return MemberInfo(
            key=key,
            hello=record.hello,
            presence=record.presence,
            last_heard_s=record.last_heard_s,
            connected=PeerId(key) in connected,
            direct=record.spoke_directly_s is not None,
            round_trip_s=record.round_trip_s,
            left=record.left,
        )

    def trim(self, keep: AbstractSet[PeerId]) -> None:
        """Drop the longest silent above the bound, but none of `keep`."""
        excess = len(self._records) - MAX_MEMBERS
        if excess <= 0:
            return
        droppable = [key for key in self._records if PeerId(key) not in keep]
        droppable.sort(key=lambda key: self._records[key].last_heard_s)
        for key in droppable[:excess]:
            del self._records[key]

    def _record(self, key: NodeKey, hello: Hello, now_s: float, *, force: bool = False) -> _Record | None:
        """The member's record with the new words in it; None when there is no place and no `force`."""
        if key == self._own_key:
            return None
        record = self._records.get(key)
        if record is None:
            # Between two trims a flood of new keys may only add half as many again.
            if len(self._records) >= MAX_MEMBERS + MAX_MEMBERS // 2 and not force:
                return None
            record = self._records[key] = _Record(hello, now_s)
        record.hello, record.last_heard_s = hello, now_s
        return record
