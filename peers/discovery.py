"""Finding the swarm and staying in it: seeds, address cache, hello, peer exchange, reconnection, who is a
member.

No seed is ever fatal: each is tried for ever with back-off, and its last error is kept to be shown. A peer
counts as connected once it has said hello, not when a port is open.
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from peers.address_book import AddressBook
from peers.address_cache import load_addresses, save_addresses
from peers.base import PeerEvent, PeerId, TransportError
from peers.greeting import Greeter
from peers.membership import MemberInfo, Membership
from peers.swarm import Swarm
from protocol import limits
from protocol.base import Message
from protocol.identity import NodeKey, node_name
from protocol.messages import Hello, PeerAddresses, PeersReply, PeersRequest, Presence
from protocol.refusals import Refused

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 10.0
MAX_DIALS = 8
"""Dials at once, over all peers: a list of a thousand false addresses cannot make a storm."""
MAX_DIALS_PER_PEER = 3

CHECK_EVERY_S = 5.0
"""The upkeep loop looks at everything this often even when nothing wakes it."""
DEBOUNCE_S = 0.05
EXCHANGE_EVERY_S = 60.0
EXCHANGE_WHEN_LACKING_S = 5.0
PING_AFTER_S = 30.0
"""A peer that has not spoken to this node directly for so long is asked for its hello again."""
PRESENCE_EVERY_S = 5.0
PRESENCE_FULL_RATE_MEMBERS = 64
"""Above this many live members presence is announced less often in proportion: its cost stays level."""
SAVE_EVERY_S = 10.0
LEAVE_LINGER_S = 0.2
LEAST_TRUST_TO_DIAL = 0.1

MAX_REQUEST_BYTES = 4 * 1024


@dataclass(frozen=True)
class SeedStatus:
    """What became of one configured address."""

    address: str
    key: NodeKey | None
    """None when the address is malformed."""
    connected: bool
    failures: int
    last_error: str
    next_try_in_s: float

    def __str__(self) -> str:
        if self.connected:
            return f"{self.address}: connected"
        if not self.last_error:
            return f"{self.address}: not tried yet"
        trouble = self.last_error.removeprefix(self.address).strip()
        return f"{self.address}: {trouble} (failed {self.failures} times, retrying)"


class Discovery:
    """Keeps this node connected. `run` is the service; everything else may be called before and during it.

    `hello` gives this node's own words. `presence`, if given, is announced every few seconds. `path` is
    where the address cache lives (written to a temporary name, flushed, renamed); it is a help, and a
    broken one is ignored.
    """

    def __init__(
        self,
        swarm: Swarm,
        *,
        seeds: Iterable[str] = (),
        hello: Callable[[], Hello],
        presence: Callable[[], Presence] | None = None,
        path: Path | None = None,
        target_connections: int = 8,
        presence_every_s: float = PRESENCE_EVERY_S,
        rng: random.Random | None = None,
    ) -> None:
        self._swarm = swarm
        self._transport = swarm.transport
        self._presence = presence
        self._path = path
        self._target = target_connections
        self._presence_every_s = presence_every_s
        self._rng = rng or random.Random()
        self._own = PeerId(swarm.identity.key)
        self.book = AddressBook(self._own, self._rng)
        self.membership = Membership(swarm.identity.key)
        self._seeds: dict[str, PeerId | None] = {}
        self._malformed: dict[str, str] = {}
        self._required: set[PeerId] = set()
        self._greeter = Greeter(swarm, hello, self._heard_hello)
        self._dialing: dict[str, PeerId] = {}
        self._wake = trio.Event()
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        for address in seeds:
            self.add_seed(address)
        if path is not None:
            load_addresses(path, self.book)
        swarm.serve("peers_request", self._on_peers_request, max_bytes=MAX_REQUEST_BYTES)
        self._presences = swarm.announcements("presence")

    # What the node asks.

    def add_seed(self, address: str) -> None:
        """Add a configured address; a malformed one is only reported (`seed_status`)."""
        try:
            self._seeds[address] = self.book.add_seed(address)
        except ValueError as error:
            self._seeds[address], self._malformed[address] = None, str(error)
            log.warning("seed %s cannot be used: %s", address, error)
        self._poke()

    def require(self, *keys: NodeKey) -> None:
        """Keep a connection to these peers whenever an address of theirs is known (e.g. the learner)."""
        self._required.update(PeerId(key) for key in keys if PeerId(key) != self._own)
        self.book.kept = self._required
        self._poke()

    def connected(self) -> list[PeerId]:
        """Peers that are connected and have said hello."""
        return sorted(self._greeter.greeted)

    def is_connected(self, key: NodeKey) -> bool:
        return PeerId(key) in self._greeter.greeted

    async def wait_connected(self, key: NodeKey | None = None) -> None:
        """Wait until `key` (any peer if None) is connected. Bound it with `trio.fail_after`."""
        while not (self.is_connected(key) if key is not None else self.connected()):
            await self._changed.wait()

    def members(self) -> Mapping[NodeKey, MemberInfo]:
        """Everybody heard of who is not this node: by hello, or by gossiped presence."""
        return self.membership.view(set(self.connected()))

    def member(self, key: NodeKey) -> MemberInfo | None:
        """One of `members`, found without building them all."""
        return self.membership.find(key, self._greeter.greeted)

    def seed_status(self) -> list[SeedStatus]:
        """What became of each configured address, in their order."""
        now_s = trio.current_time()
        result: list[SeedStatus] = []
        for address, key in self._seeds.items():
            if key is None:
                result.append(SeedStatus(address, None, False, 0, self._malformed[address], 0.0))
                continue
            record = next((r for r in self.book.records(key) if r.address == address), None)
            failures, error, wait_s = 0, "", 0.0
            if record is not None:
                failures, error = record.failures, record.last_error
                wait_s = max(0.0, record.next_try_s - now_s)
            connected = key == self._own or self.is_connected(NodeKey(key))
            result.append(SeedStatus(address, NodeKey(key), connected, failures, error, wait_s))
        return result

    async def leave(self, timeout_s: float = 2.0) -> None:
        """Tell the swarm that this node goes. Call before `run` is cancelled."""
        if self._presence is not None:
            with trio.move_on_after(timeout_s):
                await self._announce(self._presence().model_copy(update={"leaving": True}))
                # Gossip tells nobody when it has gone out, and a transport that stops now may not send it.
                await trio.sleep(LEAVE_LINGER_S)

    # The service.

    async def run(self) -> None:
        """Keep connections, membership and the address cache until cancelled: a service to supervise."""
        self._dialing.clear()
        self._greeter.reset()
        events = self._transport.events()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._watch, events)
                nursery.start_soon(self._read_presence)
                if self._presence is not None:
                    nursery.start_soon(self._publish_presence, self._presence)
                if self._path is not None:
                    nursery.start_soon(self._save_often, self._path)
                await self._keep_connections(nursery)
        finally:
            self._nursery = None
            if self._path is not None:
                save_addresses(self._path, self.book.dump())

    async def _watch(self, events: trio.MemoryReceiveChannel[PeerEvent]) -> None:
        async for event in events:
            if not event.connected:
                self._greeter.disconnected(event.peer)
                self._notify()
            self._poke()
        # Ends only with the transport: whoever runs both cancels this service too.

    async def _keep_connections(self, nursery: trio.Nursery) -> None:
        limiter = trio.CapacityLimiter(MAX_DIALS)
        next_exchange_s = next_forget_s = 0.0
        while True:
            wake = self._wake = trio.Event()
            now_s = trio.current_time()
            greeted = self._greeter.greeted
            for peer in self._transport.connected_peers():
                if not self._greeter.is_busy(peer) and (peer not in greeted or self._is_silent(peer, now_s)):
                    nursery.start_soon(self._greet, peer)
            for key, address in self._to_dial(now_s):
                self._dialing[address] = key
                self.book.trying(key, address, now_s)
                nursery.start_soon(self._dial, key, address, limiter)
            if now_s >= next_exchange_s and greeted:
                next_exchange_s = now_s + (
                    EXCHANGE_WHEN_LACKING_S if self._lacking() else EXCHANGE_EVERY_S
                ) * self._rng.uniform(0.8, 1.2)
                nursery.start_soon(self._ask_for_peers, self._rng.choice(sorted(greeted)))
            if now_s >= next_forget_s:
                next_forget_s = now_s + 60.0
                self.book.forget_failing(now_s)
                self.membership.trim(greeted | self._required)
            until_s = min(self._next_dial_s(now_s), now_s + CHECK_EVERY_S)
            with trio.move_on_at(until_s):
                await wake.wait()
            # Events come in bursts (a hello changes several things); one look is enough for all of them.
            await trio.sleep(DEBOUNCE_S)

    def _must(self) -> set[PeerId]:
        seeds = {key for key in self._seeds.values() if key is not None and key != self._own}
        return self._required | seeds

    def _lacking(self) -> bool:
        """Whether more addresses would help: too few connections, or no way to a required peer."""
        greeted = self._greeter.greeted
        if len(greeted) < self._target:
            return True
        return any(not self.book.addresses(key) for key in self._required - greeted)

    def _wanted(self, now_s: float) -> list[PeerId]:
        """Peers worth a dial, the required and the seeds first, the others in random order."""
        open_peers = self._transport.connected_peers()
        must = sorted(self._must() - open_peers)
        if len(open_peers) >= self._target:
            return must
        others = [
            key
            for key in self.book.peers()
            if key not in open_peers
            and key not in must
            and not self.membership.has_left(NodeKey(key))
            and self._swarm.reputation.score(key, now_s) >= LEAST_TRUST_TO_DIAL
        ]
        self._rng.shuffle(others)
        others.sort(key=lambda key: not self.book.is_own_word(key))
        return must + others

    def _to_dial(self, now_s: float) -> list[tuple[PeerId, str]]:
        """(peer, address) pairs to dial now, no more than places for dials and for connections are free."""
        must = self._must()
        dialed = list(self._dialing.values())
        free = MAX_DIALS - len(dialed)
        open_to_others = self._target - len(self._transport.connected_peers()) - len(set(dialed) - must)
        chosen: list[tuple[PeerId, str]] = []
        for key in self._wanted(now_s):
            if len(chosen) >= free:
                break
            if key not in must and open_to_others <= 0:
                continue
            trusted = key in must or self.book.is_own_word(key)
            places = (MAX_DIALS_PER_PEER if trusted else 1) - dialed.count(key)
            due = [address for address in self.book.due(key, now_s) if address not in self._dialing]
            picked = due[: max(0, min(places, free - len(chosen)))]
            chosen += [(key, address) for address in picked]
            if picked and key not in must:
                open_to_others -= 1
        return chosen

    def _next_dial_s(self, now_s: float) -> float:
        dialing = set(self._dialing.values())
        return self.book.next_due_s((key for key in self._wanted(now_s) if key not in dialing), now_s)

    async def _dial(self, key: PeerId, address: str, limiter: trio.CapacityLimiter) -> None:
        try:
            async with limiter:
                try:
                    await self._transport.connect(address, CONNECT_TIMEOUT_S)
                    error = await self._greeter.greet(key)
                except TransportError as failure:
                    error = str(failure)
            if error:
                self.book.failed(key, address, trio.current_time(), error)
                log.debug("dialing %s failed: %s", address, error)
            else:
                self.book.succeeded(key, address)
        finally:
            self._dialing.pop(address, None)
            self._poke()

    async def _greet(self, peer: PeerId) -> None:
        """Exchange hellos with a peer that dialed this node, or has been silent."""
        error = await self._greeter.greet(peer, again=True)
        if error:
            log.info("dropped the connection to %s: %s", node_name(peer), error)
            self.book.note_trouble(peer, error)
        self._notify()

    def _heard_hello(self, peer: PeerId, hello: Hello, round_trip_s: float | None) -> None:
        now_s = trio.current_time()
        first = self.membership.spoke_directly_s(NodeKey(peer)) < now_s - PING_AFTER_S
        self.membership.heard_hello(NodeKey(peer), hello, now_s, round_trip_s)
        self.book.learn(peer, hello.addresses, now_s, own_word=True)
        self._notify()
        if first and self._nursery is not None and self._lacking():
            self._nursery.start_soon(self._ask_for_peers, peer)

    def _is_silent(self, peer: PeerId, now_s: float) -> bool:
        """Whether a peer's last direct word is long ago: its connection may be dead unnoticed."""
        return now_s - self.membership.spoke_directly_s(NodeKey(peer)) >= PING_AFTER_S

    # Peer exchange.

    async def _ask_for_peers(self, peer: PeerId) -> None:
        try:
            reply = await self._swarm.call(peer, PeersRequest(), timeout_s=ASK_TIMEOUT_S, expect=PeersReply)
        except (TransportError, Refused) as error:
            log.debug("%s names no peers: %s", node_name(peer), error)
            return
        now_s = trio.current_time()
        news = [self.book.learn(PeerId(e.key), e.addresses, now_s, own_word=False) for e in reply.peers]
        if any(news):
            self._poke()

    async def _on_peers_request(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        """Peers that said hello or announced themselves lately: learners first, the others by chance."""
        recent = [key for key in self.membership.recent(trio.current_time()) if PeerId(key) != sender]
        self._rng.shuffle(recent)
        recent.sort(key=lambda key: self.membership.role(key) != "learner")
        named: list[PeerAddresses] = []
        for key in recent:
            addresses = self.book.addresses(PeerId(key))
            if addresses and self.book.is_own_word(PeerId(key)):
                named.append(PeerAddresses(key=key, addresses=addresses[: limits.MAX_ADDRESSES]))
            if len(named) == limits.MAX_PEERS_PER_REPLY:
                break
        return "peers_reply", PeersReply(peers=named)

    # Presence.

    async def _read_presence(self) -> None:
        async for author, message in self._presences:
            assert isinstance(message, Presence)
            now_s = trio.current_time()
            self.membership.heard_presence(author, message, now_s)
            if not message.leaving and self.book.learn(
                PeerId(author), message.addresses, now_s, own_word=True
            ):
                self._poke()

    async def _publish_presence(self, presence: Callable[[], Presence]) -> None:
        while True:
            await self._announce(presence())
            live = self.membership.count_recent(trio.current_time())
            wait_s = self._presence_every_s * max(1.0, live / PRESENCE_FULL_RATE_MEMBERS)
            had_nobody = not self._greeter.greeted
            with trio.move_on_after(wait_s * self._rng.uniform(0.9, 1.1)):
                if had_nobody:
                    # The first connection: nobody has heard this node yet, so it speaks up at once.
                    await self.wait_connected()
                    continue
                await trio.sleep_forever()

    async def _announce(self, presence: Presence) -> None:
        try:
            await self._swarm.announce(presence)
        except (TransportError, Refused) as error:
            log.warning("presence was not announced: %s", error)

    async def _save_often(self, path: Path) -> None:
        saved: dict[str, list[str]] = {}
        while True:
            await trio.sleep(SAVE_EVERY_S)
            addresses = self.book.dump()
            if addresses != saved and save_addresses(path, addresses):
                saved = addresses

    def _poke(self) -> None:
        self._wake.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self._poke()
