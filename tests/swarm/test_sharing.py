"""Groups shared between policies: what comes is what was announced, by whom it was announced; a flood of one
node neither fills memory nor crowds out the others. Virtual time, in memory."""

import random
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peers.base import PeerId
from peers.memory_transport import MemoryNetwork
from protocol.base import Message
from protocol.envelope import Envelope
from protocol.messages import GroupReply, GroupRequest, Receipt, RolloutAnnouncement, RolloutGroup
from protocol.refusals import RefusalReason
from swarmnode.config import SharingConfig
from swarmnode.runtime.sharing import MAX_CANDIDATES, MAX_TRIED, Candidates, Sharing
from tests.swarm.small_swarm import SmallNode, connect, running, until
from tests.unit.swarmnode.role_parts import InlineStore, make_group, make_spec, name_of, sealed

SPEC = make_spec(preset="swarm", learners=[], external_groups=4)


class Taker:
    """The learner's side as far as sharing sees it."""

    def __init__(self) -> None:
        self.is_up = True
        self.taken: list[Envelope] = []
        self.waiting_external = 0

    async def receive_external(self, envelope: Envelope) -> bool:
        await trio.lowlevel.checkpoint()
        rewards = RolloutGroup.decode(envelope.body).rewards
        if max(rewards) == min(rewards):
            return False
        self.taken.append(envelope)
        self.waiting_external += 1
        return True


class SharingNode(SmallNode):
    def __init__(
        self, network: MemoryNetwork, number: int, path: Path, *, config: SharingConfig | None = None
    ) -> None:
        super().__init__(network, number, run_id=SPEC.run_id)
        self.store = InlineStore(path / f"{number}.sqlite")
        self.learner = Taker()
        self.sharing = Sharing(
            swarm=self.swarm,
            store=self.store,  # type: ignore[arg-type]
            learner=self.learner,  # type: ignore[arg-type]
            external_groups=SPEC.external_groups,
            config=config or SharingConfig(),
            on_refusal=lambda peer, reason, detail: self.refusals.append((PeerId(peer), reason)),
            seed=number,
        )
        self.services += [self.sharing.listen, self.sharing.pull]

    def make(self, counter: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> tuple[Envelope, RolloutGroup]:
        """A group of this node's own policy, in its ledger."""
        group = make_group(SPEC, self.identity, counter, policy=self.key, rewards=rewards)
        envelope = sealed(SPEC, self.identity, group)
        self.store.store.accept(
            name_of(envelope),
            sender=self.key,
            policy=self.key,
            counter=counter,
            oldest_version=0,
            source="local",
            tokens=1,
            mean_reward=0.5,
            envelope=envelope.encoded,
            checked={},
        )
        return envelope, group

    async def share(self, counter: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Envelope:
        envelope, group = self.make(counter, rewards)
        receipt = Receipt(group=name_of(envelope), accepted=True)
        await self.sharing.share(envelope.encoded, group, receipt)
        return envelope

    def announcement(self, group: bytes, **changes: Any) -> RolloutAnnouncement:
        fields: dict[str, Any] = {
            "group": group,
            "policy": self.key,
            "version": 0,
            "size_bytes": 100,
            "mean_reward": 0.5,
            "informative": True,
        }
        return RolloutAnnouncement(**{**fields, **changes})

    @property
    def taken(self) -> list[bytes]:
        return [name_of(envelope) for envelope in self.learner.taken]


@pytest.fixture
def nodes(tmp_path: Path) -> list[SharingNode]:
    network = MemoryNetwork()
    return [SharingNode(network, number, tmp_path) for number in (1, 2, 3)]


async def test_groups_of_others_are_pulled_until_enough_wait(
    nodes: list[SharingNode], autojump_clock: trio.testing.MockClock
) -> None:
    node, *others = nodes
    async with running(*nodes):
        await connect(node, *others)
        for counter in range(8):
            for other in others:
                await other.share(counter)
        await until(lambda: len(node.learner.taken) == 8)
        await trio.sleep(20)
    assert len(node.learner.taken) == 8, "twice the four that a batch uses, and no more"
    assert {envelope.sender for envelope in node.learner.taken} == {other.key for other in others}
    assert node.refusals == []


async def test_nothing_is_pulled_while_the_learner_is_down(
    nodes: list[SharingNode], autojump_clock: trio.testing.MockClock
) -> None:
    node, other, _ = nodes
    node.learner.is_up = False
    async with running(node, other):
        await connect(node, other)
        await other.share(1)
        await trio.sleep(20)
        assert node.sharing.pulled == 0
        node.learner.is_up = True
        await until(lambda: len(node.learner.taken) == 1)


async def test_what_teaches_nothing_is_dropped_and_not_pulled_again(
    nodes: list[SharingNode], autojump_clock: trio.testing.MockClock
) -> None:
    node, other, _ = nodes
    async with running(node, other):
        await connect(node, other)
        envelope = await other.share(1, rewards=(1.0, 1.0))
        await until(lambda: node.sharing.uninformative == 1)
        for _ in range(5):
            await other.swarm.announce(other.announcement(name_of(envelope)))
        await trio.sleep(20)
    assert (node.sharing.pulled, node.sharing.uninformative, node.taken) == (1, 1, [])


@pytest.mark.parametrize("kind", ["none", "informative"])
async def test_a_node_announces_what_its_configuration_says(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, kind: str
) -> None:
    network = MemoryNetwork()
    node = SharingNode(network, 1, tmp_path)
    other = SharingNode(network, 2, tmp_path, config=SharingConfig(announce=kind))  # type: ignore[arg-type]
    async with running(node, other):
        await connect(node, other)
        await other.share(1, rewards=(1.0, 1.0))
        told = await other.share(2)
        await trio.sleep(20)
    assert node.taken == ([] if kind == "none" else [name_of(told)])
    assert node.sharing.pulled == len(node.taken)


class Liar(SharingNode):
    """Answers every request with the envelopes that it is told to."""

    def lie(self, *envelopes: Envelope) -> None:
        async def handle(sender: PeerId, message: Message) -> tuple[str, Message]:
            assert isinstance(message, GroupRequest)
            return "group_reply", GroupReply(groups=[envelope.encoded for envelope in envelopes])

        self.swarm.serve("group_request", handle)


@pytest.mark.parametrize(
    ("delivered", "reason"),
    [
        ("another group", RefusalReason.WRONG_HASH),
        ("a third node's group", RefusalReason.WRONG_SENDER),
        ("twice", RefusalReason.MALFORMED),
        ("nothing", RefusalReason.MALFORMED),
    ],
)
async def test_what_comes_must_be_what_was_announced_by_its_author(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, delivered: str, reason: RefusalReason
) -> None:
    network = MemoryNetwork()
    node, liar, third = (
        SharingNode(network, 1, tmp_path),
        Liar(network, 2, tmp_path),
        SharingNode(network, 3, tmp_path),
    )
    announced, _ = liar.make(1)
    another, _ = liar.make(2)
    foreign, _ = third.make(1)
    liar.lie(
        *{
            "another group": [another],
            "a third node's group": [foreign],
            "twice": [announced, announced],
            "nothing": [],
        }[delivered]
    )
    async with running(node, liar):
        await connect(node, liar)
        await liar.swarm.announce(liar.announcement(name_of(announced)))
        await until(lambda: node.refusals != [])
    assert node.refusals == [(liar.peer, reason)]
    assert node.taken == []


async def test_a_group_of_another_policy_than_ones_own_cannot_be_announced(
    nodes: list[SharingNode], autojump_clock: trio.testing.MockClock
) -> None:
    node, other, third = nodes
    async with running(node, other):
        await connect(node, other)
        await other.swarm.announce(other.announcement(b"g" * 32, policy=third.key))
        await until(lambda: node.refusals != [])
    assert node.refusals == [(other.peer, RefusalReason.UNKNOWN_POLICY)]


async def test_a_reply_is_cut_to_what_one_answer_may_hold(
    nodes: list[SharingNode], autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other, _ = nodes
    made = [other.make(counter)[0] for counter in range(4)]
    monkeypatch.setattr("swarmnode.runtime.sharing.MAX_REPLY_BYTES", 2 * len(made[0].encoded) + 10)
    async with running(node, other):
        await connect(node, other)
        request = GroupRequest(groups=[name_of(envelope) for envelope in made])
        reply = await node.swarm.call(other.peer, request, timeout_s=5, expect=GroupReply)
    assert reply.groups == [envelope.encoded for envelope in made[:2]]


# Candidates


def announcements(author: int, count: int) -> list[RolloutAnnouncement]:
    return [
        RolloutAnnouncement(
            group=author.to_bytes(16, "big") + number.to_bytes(16, "big"),
            policy=author.to_bytes(32, "big"),
            version=0,
            size_bytes=1,
            mean_reward=0.0,
            informative=True,
        )
        for number in range(count)
    ]


def test_a_flood_of_one_author_pushes_out_only_its_own() -> None:
    candidates = Candidates(random.Random(0))
    honest = [*announcements(1, 3), *announcements(2, 3)]
    for announcement in [*honest, *announcements(9, 20 * MAX_CANDIDATES)]:
        candidates.add(announcement)
    assert len(candidates) == MAX_CANDIDATES
    everybody = {PeerId(number.to_bytes(32, "big")) for number in (1, 2)}
    drawn = [candidates.draw(everybody) for _ in range(6)]
    assert {one.group for one in drawn if one is not None} == {one.group for one in honest}
    assert candidates.draw(everybody) is None
    assert len(candidates) == MAX_CANDIDATES - 6


def test_who_announces_much_is_not_drawn_more_often() -> None:
    candidates = Candidates(random.Random(0))
    for announcement in [*announcements(1, 60), *announcements(9, 400)]:
        candidates.add(announcement)
    everybody = {PeerId(number.to_bytes(32, "big")) for number in (1, 9)}
    drawn = [candidates.draw(everybody) for _ in range(100)]
    of_the_loud = sum(one is not None and one.policy[-1] == 9 for one in drawn)
    assert 35 <= of_the_loud <= 65


def test_the_same_announcement_again_is_one_candidate() -> None:
    candidates = Candidates(random.Random(0))
    for announcement in announcements(1, 3) * 10:
        candidates.add(announcement)
    assert len(candidates) == 3
    assert MAX_TRIED > MAX_CANDIDATES
