"""How nodes of preset `swarm` learn from each other: announce own groups, pull a random few of others',
serve on request."""

import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import trio

from peers.base import PeerId, TransportError
from peers.swarm import Swarm
from protocol.base import Message
from protocol.envelope import open_envelope
from protocol.identity import node_name
from protocol.messages import (
    GroupReply,
    GroupRequest,
    Receipt,
    RolloutAnnouncement,
    RolloutGroup,
    group_id,
)
from protocol.refusals import RefusalReason, Refused
from swarmnode.config import SharingConfig
from swarmnode.runtime.learner_role import LearnerRole
from swarmnode.runtime.store_thread import StoreThread

log = logging.getLogger(__name__)

MAX_CANDIDATES = 512
"""Announced groups remembered; of the author with the most, the oldest is forgotten first."""
MAX_TRIED = 8_192
"""Pulled groups remembered, so that announcing one again costs nothing here."""
PULL_TIMEOUT_S = 10.0
LOOK_AGAIN_S = 0.5
MAX_REPLY_BYTES = 3 * 1024 * 1024


class Candidates:
    """Groups that others announced. One who announces much can neither push out the others' groups nor make
    it likelier that one of its own is drawn."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._by_author: dict[bytes, OrderedDict[bytes, RolloutAnnouncement]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, announcement: RolloutAnnouncement) -> None:
        """Remember an announcement of its policy's own node."""
        groups = self._by_author.setdefault(announcement.policy, OrderedDict())
        self._count += announcement.group not in groups
        groups[announcement.group] = announcement
        if self._count > MAX_CANDIDATES:
            author = max(self._by_author, key=lambda author: len(self._by_author[author]))
            self._take(author, next(iter(self._by_author[author])))

    def draw(self, connected: AbstractSet[PeerId]) -> RolloutAnnouncement | None:
        """Take one of a connected author: authors uniformly, then their groups. None when there is none."""
        authors = [author for author in self._by_author if PeerId(author) in connected]
        if not authors:
            return None
        author = self._random.choice(authors)
        return self._take(author, self._random.choice(list(self._by_author[author])))

    def _take(self, author: bytes, group: bytes) -> RolloutAnnouncement:
        groups = self._by_author[author]
        taken = groups.pop(group)
        self._count -= 1
        if not groups:
            del self._by_author[author]
        return taken


class Sharing:
    """Pulls only what is sampled, never everything that everyone makes: that keeps traffic flat in the
    number of nodes.

    A pulled group must be signed by the node that announced it, and is scored by this node's own environment.
    """

    def __init__(
        self,
        *,
        swarm: Swarm,
        store: StoreThread,
        learner: LearnerRole,
        external_groups: int,
        config: SharingConfig,
        on_refusal: Callable[[bytes, RefusalReason, str], None],
        seed: int,
    ) -> None:
        self.pulled = 0
        self.uninformative = 0
        self._swarm = swarm
        self._store = store
        self._learner = learner
        self._target = external_groups * config.candidates_per_group
        self._config = config
        self._on_refusal = on_refusal
        self._candidates = Candidates(random.Random(seed))
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        swarm.serve("group_request", self._serve)

    async def share(self, envelope: bytes, group: RolloutGroup, receipt: Receipt) -> None:
        """Announce an own group that this node's learner accepted."""
        informative = max(group.rewards) > min(group.rewards)
        if not receipt.accepted or self._config.announce == "none":
            return
        if self._config.announce == "informative" and not informative:
            return
        announcement = RolloutAnnouncement(
            group=receipt.group,
            policy=group.policy,
            version=group.version,
            size_bytes=len(envelope),
            mean_reward=sum(group.rewards) / len(group.rewards),
            informative=informative,
        )
        try:
            await self._swarm.announce(announcement)
        except (TransportError, Refused) as error:
            log.info("a group was not announced: %s", error)

    async def listen(self) -> None:
        """Remember what others announce, until cancelled."""
        async for author, message in self._swarm.announcements("rollout_announcement"):
            assert isinstance(message, RolloutAnnouncement)
            if message.policy != author:
                self._on_refusal(
                    author, RefusalReason.UNKNOWN_POLICY, "announced a group of a policy not its own"
                )
                continue
            if message.group not in self._tried:
                self._candidates.add(message)

    async def pull(self) -> None:
        """Keep enough external groups ready for the learner, until cancelled."""
        while True:
            wants = self._learner.is_up and self._learner.waiting_external < self._target
            chosen = self._candidates.draw(self._swarm.transport.connected_peers()) if wants else None
            if chosen is None:
                await trio.sleep(LOOK_AGAIN_S)
                continue
            self._tried[chosen.group] = None
            while len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)
            try:
                await self._pull_one(chosen)
            except Refused as refused:
                if refused.reason not in (RefusalReason.NOT_FOUND, RefusalReason.BUSY):
                    self._on_refusal(chosen.policy, refused.reason, refused.detail)
            except TransportError as error:
                log.info("group %s of %s: %s", chosen.group.hex()[:12], node_name(chosen.policy), error)

    async def _pull_one(self, announcement: RolloutAnnouncement) -> None:
        reply = await self._swarm.call(
            PeerId(announcement.policy),
            GroupRequest(groups=[announcement.group]),
            timeout_s=PULL_TIMEOUT_S,
            expect=GroupReply,
        )
        if len(reply.groups) != 1:
            raise Refused(RefusalReason.MALFORMED, f"{len(reply.groups)} groups came, one was asked for")
        envelope = open_envelope(reply.groups[0], run_id=self._swarm.run_id)
        if envelope.kind != "rollout_group" or envelope.sender != announcement.policy:
            raise Refused(RefusalReason.WRONG_SENDER, "the group is not signed by the node that announced it")
        if group_id(envelope.sender, envelope.body) != announcement.group:
            raise Refused(RefusalReason.WRONG_HASH, "the group is not the one that was announced")
        self.pulled += 1
        if not await self._learner.receive_external(envelope):
            self.uninformative += 1

    async def _serve(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        assert isinstance(message, GroupRequest)
        reply = await self._store.run(lambda store: store.envelopes(message.groups, MAX_REPLY_BYTES))
        if not reply:
            raise Refused(RefusalReason.NOT_FOUND, "none of these groups is held here")
        return "group_reply", GroupReply(groups=reply)
