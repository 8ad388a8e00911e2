"""Which addresses lead to which peer, and when each may be dialed again. Pure: no clock, no I/O."""

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.base import PeerId
from peers.libp2p_address import split_peer_id
from protocol import limits

MAX_PEERS = 4_096
MAX_ADDRESSES_PER_PEER = 8
MAX_CACHED_PEERS = 512
"""Peers written to the cache: enough to find the swarm again, small enough to read by eye."""

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0
RETRY_WHEN_HEARD_S = 2.0
"""A peer just heard of through others is dialed again after this long at most, whatever its back-off."""

FORGET_AFTER_FAILURES = 8
FORGET_AFTER_S = 600.0

_NOWHERE = ("/ip4/0.0.0.0/", "/ip6/::/")


def valid_address(key: PeerId, address: str) -> bool:
    """Whether `address` is short printable text that names a place to dial and ends in the id of `key`."""
    if len(address) > limits.MAX_ADDRESS_CHARS or not address.isprintable() or address.startswith(_NOWHERE):
        return False
    try:
        return split_peer_id(address)[1] == key
    except ValueError:
        return False


@dataclass
class AddressRecord:
    """One address and how dialing it went."""

    address: str
    seed: bool = False
    """Configured by a person: never forgotten, tried for ever."""
    failures: int = 0
    """In a row."""
    tried_s: float | None = None
    next_try_s: float = 0.0
    failing_since_s: float | None = None
    last_error: str = ""


@dataclass
class _Entry:
    records: dict[str, AddressRecord] = field(default_factory=dict)
    own_word: bool = False
    """The peer itself named these addresses (signed), or one of them worked; else it is hearsay."""
    learned_s: float = 0.0


class AddressBook:
    """Addresses per peer with back-off per address. Bounded; hearsay goes first when it is full.

    What a peer says of itself replaces what others say of it; hearsay is only ever added to hearsay.
    """

    def __init__(self, own_key: PeerId, rng: random.Random) -> None:
        self._own_key = own_key
        self._rng = rng
        self._entries: dict[PeerId, _Entry] = {}
        self.kept: set[PeerId] = set()
        """Peers whose addresses are not forgotten for failing (their connection is required)."""

    def __len__(self) -> int:
        return len(self._entries)

    def peers(self) -> list[PeerId]:
        return list(self._entries)

    def addresses(self, key: PeerId) -> list[str]:
        """All known addresses of a peer."""
        entry = self._entries.get(key)
        return [] if entry is None else list(entry.records)

    def records(self, key: PeerId) -> list[AddressRecord]:
        entry = self._entries.get(key)
        return [] if entry is None else list(entry.records.values())

    def is_own_word(self, key: PeerId) -> bool:
        """Whether the peer's addresses come from itself."""
        entry = self._entries.get(key)
        return entry is not None and entry.own_word

    def add_seed(self, address: str) -> PeerId:
        """Add a configured address. Raises `ValueError` with what is wrong with it."""
        _, key = split_peer_id(address)
        if key != self._own_key:
            record = self._entries.setdefault(key, _Entry()).records.setdefault(
                address, AddressRecord(address)
            )
            record.seed = True
        return key

    def learn(self, key: PeerId, addresses: Iterable[str], now_s: float, *, own_word: bool) -> bool:
        """Take in addresses of a peer, invalid ones left out; whether there is now something new to dial.

        `own_word`: the peer itself says so. Its word replaces all but seeds, and brings the next try near.
        """
        if key == self._own_key:
            return False
        few = itertools.islice(dict.fromkeys(addresses), MAX_ADDRESSES_PER_PEER)
        valid = [address for address in few if valid_address(key, address)]
        entry = self._entries.get(key)
        if entry is None:
            if not valid or not self._make_room(own_word):
                return False
            entry = self._entries[key] = _Entry()
        elif entry.own_word and not own_word and any(r.failures == 0 for r in entry.records.values()):
            # Hearsay counts beside a peer's own word only when that leads nowhere (any more).
            return False
        entry.own_word = entry.own_word or own_word
        entry.learned_s = now_s
        fresh = [address for address in valid if address not in entry.records]
        if own_word:
            for record in list(entry.records.values()):
                if record.address not in valid and not record.seed:
                    del entry.records[record.address]
            for record in entry.records.values():
                if record.tried_s is not None:
                    soon_s = max(now_s, record.tried_s + RETRY_WHEN_HEARD_S)
                    record.next_try_s = min(record.next_try_s, soon_s)
        for address in fresh:
            if len(entry.records) >= MAX_ADDRESSES_PER_PEER:
                worst = max(entry.records.values(), key=lambda record: (not record.seed, record.failures))
                if worst.seed or worst.failures == 0:
                    break
                del entry.records[worst.address]
            entry.records[address] = AddressRecord(address)
        if not entry.records:
            del self._entries[key]
        return bool(fresh)

    def due(self, key: PeerId, now_s: float) -> list[str]:
        """Addresses of a peer that may be dialed now, the least troubled first."""
        records = [record for record in self.records(key) if record.next_try_s <= now_s]
        return [record.address for record in sorted(records, key=lambda record: record.failures)]

    def next_due_s(self, keys: Iterable[PeerId], now_s: float) -> float:
        """When the next back-off of an address of `keys` ends; infinity if none is running."""
        times = (record.next_try_s for key in keys for record in self.records(key))
        return min((time_s for time_s in times if time_s > now_s), default=float("inf"))

    def trying(self, key: PeerId, address: str, now_s: float) -> None:
        """Note that a dial has begun."""
        record = self._record(key, address)
        if record is not None:
            record.tried_s = now_s

    def failed(self, key: PeerId, address: str, now_s: float, error: str) -> None:
        """A dial failed: back off (0.5 s, doubling, at most 30 s, half of it jitter)."""
        record = self._record(key, address)
        if record is None:
            return
        record.failures += 1
        record.last_error = error
        if record.failing_since_s is None:
            record.failing_since_s = now_s
        delay_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(record.failures - 1, 30))
        record.next_try_s = now_s + delay_s * self._rng.uniform(0.5, 1.0)

    def note_trouble(self, key: PeerId, error: str) -> None:
        """A connection to the peer was given up: no back-off, but the reason is shown."""
        for record in self.records(key):
            record.last_error = error

    def succeeded(self, key: PeerId, address: str) -> None:
        """A dial led to the peer and it said hello."""
        entry, record = self._entries.get(key), self._record(key, address)
        if entry is not None and record is not None:
            entry.own_word = True
            record.failures, record.next_try_s, record.failing_since_s = 0, 0.0, None
            record.last_error = ""

    def forget_failing(self, now_s: float) -> None:
        """Drop addresses that have failed often and long; never seeds, never those of `kept` peers."""
        for key, entry in list(self._entries.items()):
            if key in self.kept:
                continue
            for record in list(entry.records.values()):
                since = record.failing_since_s
                if (
                    not record.seed
                    and record.failures >= FORGET_AFTER_FAILURES
                    and since is not None
                    and now_s - since >= FORGET_AFTER_S
                ):
                    del entry.records[record.address]
            if not entry.records:
                del self._entries[key]

    def dump(self) -> dict[str, list[str]]:
        """Addresses that peers named themselves or that worked, newest first: {key in hex: addresses}."""
        known = [(key, entry) for key, entry in self._entries.items() if entry.own_word]
        known.sort(key=lambda item: item[1].learned_s, reverse=True)
        return {key.hex(): list(entry.records) for key, entry in known[:MAX_CACHED_PEERS]}

    def load(self, dumped: Mapping[str, Any]) -> int:
        """Take in what `dump` gave; entries that make no sense are left out. The number of peers taken in."""
        before = len(self._entries)
        for text, addresses in list(dumped.items())[:MAX_CACHED_PEERS]:
            try:
                key = PeerId(bytes.fromhex(text))
            except ValueError:
                continue
            if len(key) == 32 and isinstance(addresses, list):
                self.learn(key, [a for a in addresses if isinstance(a, str)], 0.0, own_word=False)
        return len(self._entries) - before

    def _record(self, key: PeerId, address: str) -> AddressRecord | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.records.get(address)

    def _make_room(self, own_word: bool) -> bool:
        if len(self._entries) < MAX_PEERS:
            return True
        hearsay = (key for key, entry in self._entries.items() if not entry.own_word and self._droppable(key))
        oldest = next(hearsay, None)
        if oldest is None and own_word:
            oldest = next((key for key in self._entries if self._droppable(key)), None)
        if oldest is None:
            return False
        del self._entries[oldest]
        return True

    def _droppable(self, key: PeerId) -> bool:
        return key not in self.kept and not any(r.seed for r in self._entries[key].records.values())
