"""Calls and announcements between nodes; one test per attack: refused, counted, named, nothing changed."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from peers.base import GossipMessage, PeerId, RequestTimeout, TransportError
from peers.memory_transport import MemoryNetwork
from peers.swarm import MAX_CALLS_PER_PEER, RPC_PROTOCOL, InvalidResponse, ReplayGuard, kind_of
from protocol import limits
from protocol.base import Message
from protocol.encoding import encode
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Credit, CreditRequest, Hello, Presence, Receipt, Refusal
from protocol.refusals import RefusalReason, Refused
from tests.swarm.small_swarm import RUN, SmallNode, connect, running

REQUEST = CreditRequest(policy=b"p" * 32, version=3, wanted=2)
PRESENCE = Presence(name="n", role="worker", software="test")


class Learner(SmallNode):
    """Answers credit requests; `state` is what an attack must not change."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        super().__init__(network, number)
        self.state: list[tuple[PeerId, Message]] = []
        self.swarm.serve("credit_request", self._on_credit_request)
        self.announced = self.swarm.announcements("presence")

    async def _on_credit_request(self, sender: PeerId, message: Message) -> tuple[str, Message]:
        self.state.append((sender, message))
        return "credit", Credit(granted=2, version=3, retry_after_s=0)


@asynccontextmanager
async def a_learner_and_a_peer() -> AsyncIterator[tuple[Learner, SmallNode]]:
    network = MemoryNetwork()
    learner, peer = Learner(network, 1), SmallNode(network, 2)
    async with running(learner, peer):
        await connect(peer, learner)
        yield learner, peer


async def raw_call(peer: SmallNode, learner: SmallNode, data: bytes) -> Refusal:
    """Send bytes as a call and return the refusal that must be the answer."""
    answer = await peer.transport.request(
        learner.peer, RPC_PROTOCOL, data, timeout_s=10, max_response_bytes=limits.MAX_ENVELOPE_BYTES
    )
    envelope = open_envelope(answer, run_id=RUN)
    assert (envelope.sender, envelope.kind) == (learner.key, "refusal")
    return Refusal.decode(envelope.body)


async def assert_refused(data: bytes, reason: RefusalReason, *, penalized: bool = True) -> None:
    """`data` sent as a call is refused with `reason`: named to the sender, counted, and without effect."""
    async with a_learner_and_a_peer() as (learner, peer):
        refusal = await raw_call(peer, learner, data)
        assert refusal.reason == reason.value
        assert learner.refusals == [(peer.peer, reason)]
        assert learner.state == []
        assert (learner.swarm.reputation.score(peer.peer, trio.current_time()) < 1) == penalized
        assert (await peer.swarm.call(learner.peer, REQUEST, timeout_s=10, expect=Credit)).granted == 2, (
            "an honest call still works"
        )


def sealed(
    identity_number: int = 2,
    *,
    run_id: bytes = RUN,
    kind: str = "credit_request",
    sequence: int = 500,
    body: bytes = REQUEST.encode(),
) -> bytes:
    identity = Identity.from_seed(identity_number.to_bytes(32, "big"))
    return seal(identity, run_id, kind, sequence, body)


async def test_a_call_is_answered(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        answer = await peer.swarm.call(learner.peer, REQUEST, timeout_s=10)
        assert answer == Credit(granted=2, version=3, retry_after_s=0)
        assert learner.state == [(peer.peer, REQUEST)]
        assert learner.refusals == peer.refusals == []


async def test_an_oversized_call_is_refused(autojump_clock: object) -> None:
    await assert_refused(bytes(limits.MAX_ENVELOPE_BYTES + 1), RefusalReason.OVERSIZED)


async def test_a_hugely_oversized_call_ends_with_its_stream(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        with pytest.raises(TransportError):
            await raw_call(peer, learner, bytes(2 * limits.MAX_ENVELOPE_BYTES))
        assert learner.state == []


async def test_a_call_larger_than_its_kind_allows_is_refused(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):

        async def never(sender: PeerId, message: Message) -> tuple[str, Message]:
            raise AssertionError("must not be reached")

        learner.swarm.serve("hello", never, max_bytes=200)
        hello = Hello(name="n", role="worker", software="s", addresses=["/memory/" + "x" * 200])
        with pytest.raises(Refused) as refused:
            await peer.swarm.call(learner.peer, hello, timeout_s=10)
        assert refused.value.reason is RefusalReason.OVERSIZED


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"GET / HTTP/1.1\r\n", bytes(range(256)), encode([1, 2, 3]), encode({"kind": "hello"})],
)
async def test_an_unsigned_call_is_refused(autojump_clock: object, data: bytes) -> None:
    await assert_refused(data, RefusalReason.MALFORMED)


async def test_a_bad_signature_is_refused(autojump_clock: object) -> None:
    good = sealed()
    await assert_refused(good[:-1] + bytes([good[-1] ^ 1]), RefusalReason.BAD_SIGNATURE)


async def test_a_changed_body_is_refused(autojump_clock: object) -> None:
    other = CreditRequest(policy=b"q" * 32, version=3, wanted=2).encode()
    await assert_refused(sealed().replace(REQUEST.encode(), other), RefusalReason.BAD_SIGNATURE)


async def test_a_call_of_another_run_is_refused(autojump_clock: object) -> None:
    await assert_refused(sealed(run_id=b"x" * 32), RefusalReason.WRONG_RUN)


async def test_anothers_words_are_refused(autojump_clock: object) -> None:
    await assert_refused(sealed(3), RefusalReason.WRONG_SENDER)


async def test_a_kind_that_is_not_served_is_refused(autojump_clock: object) -> None:
    await assert_refused(sealed(kind="receipt"), RefusalReason.WRONG_KIND)


async def test_a_kind_that_does_not_exist_is_refused(autojump_clock: object) -> None:
    await assert_refused(sealed(kind="give_me_root"), RefusalReason.WRONG_KIND)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"policy": b"p" * 31, "version": 3, "wanted": 2},
        {"policy": b"p" * 32, "version": -1, "wanted": 2},
        {"policy": b"p" * 32, "version": 3, "wanted": 10**6},
        {"policy": b"p" * 32, "version": 3.0, "wanted": 2},
        {"policy": b"p" * 32, "version": 3, "wanted": 2, "extra": 1},
        [1, 2],
    ],
)
async def test_a_malformed_body_is_refused(autojump_clock: object, fields: object) -> None:
    await assert_refused(sealed(body=encode(fields)), RefusalReason.MALFORMED)


async def test_a_replayed_call_is_refused(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        data = sealed()
        for _ in range(2):
            answer = await peer.transport.request(
                learner.peer, RPC_PROTOCOL, data, timeout_s=10, max_response_bytes=10_000
            )
        assert Refusal.decode(open_envelope(answer, run_id=RUN).body).reason == "replayed"
        assert len(learner.state) == 1
        assert learner.refusals == [(peer.peer, RefusalReason.REPLAYED)]


async def test_sequence_numbers_far_behind_are_refused(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        await peer.transport.request(
            learner.peer, RPC_PROTOCOL, sealed(sequence=9_000), timeout_s=10, max_response_bytes=10_000
        )
        within = sealed(sequence=9_000 - limits.REPLAY_WINDOW + 1)
        answer = await peer.transport.request(
            learner.peer, RPC_PROTOCOL, within, timeout_s=10, max_response_bytes=10_000
        )
        assert open_envelope(answer, run_id=RUN).kind == "credit"
        refusal = await raw_call(peer, learner, sealed(sequence=9_000 - limits.REPLAY_WINDOW))
        assert refusal.reason == "replayed"


async def test_one_peer_cannot_take_all_places(autojump_clock: object) -> None:
    network = MemoryNetwork()
    learner, greedy, modest = Learner(network, 1), SmallNode(network, 2), SmallNode(network, 3)
    release = trio.Event()

    async def slow(sender: PeerId, message: Message) -> tuple[str, Message]:
        await release.wait()
        return "credit", Credit(granted=1, version=0, retry_after_s=0)

    learner.swarm.serve("credit_request", slow)
    outcomes: list[str] = []

    async def ask(node: SmallNode) -> None:
        try:
            await node.swarm.call(learner.peer, REQUEST, timeout_s=30)
            outcomes.append("answered")
        except Refused as refused:
            outcomes.append(refused.reason.value)

    async with running(learner, greedy, modest):
        await connect(learner, greedy, modest)
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_CALLS_PER_PEER + 3):
                nursery.start_soon(ask, greedy)
            await trio.sleep(1)
            assert outcomes == ["busy"] * 3
            nursery.start_soon(ask, modest)
            await trio.sleep(1)
            release.set()
    assert sorted(outcomes) == ["answered"] * (MAX_CALLS_PER_PEER + 1) + ["busy"] * 3


async def test_a_handler_that_hangs_or_fails_hurts_only_its_call(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):

        async def hang(sender: PeerId, message: Message) -> tuple[str, Message]:
            await trio.sleep_forever()
            raise AssertionError

        async def fail(sender: PeerId, message: Message) -> tuple[str, Message]:
            raise ZeroDivisionError

        learner.swarm.serve("credit_request", hang, timeout_s=5)
        with pytest.raises(Refused) as refused:
            await peer.swarm.call(learner.peer, REQUEST, timeout_s=30)
        assert refused.value.reason is RefusalReason.BUSY
        learner.swarm.serve("credit_request", fail)
        with pytest.raises(TransportError):
            await peer.swarm.call(learner.peer, REQUEST, timeout_s=30)
        learner.swarm.serve("credit_request", learner._on_credit_request)
        assert await peer.swarm.call(learner.peer, REQUEST, timeout_s=10, expect=Credit)


async def test_a_handlers_refusal_reaches_the_caller_with_its_reason(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):

        async def refuse(sender: PeerId, message: Message) -> tuple[str, Message]:
            raise Refused(RefusalReason.TOO_STALE, "6 versions behind\x1b[31m, the bound is 4")

        learner.swarm.serve("credit_request", refuse)
        with pytest.raises(Refused) as refused:
            await peer.swarm.call(learner.peer, REQUEST, timeout_s=10)
        assert refused.value.reason is RefusalReason.TOO_STALE
        assert refused.value.detail == "6 versions behind [31m, the bound is 4", "no control characters"
        assert learner.refusals == [(peer.peer, RefusalReason.TOO_STALE)]
        assert learner.swarm.reputation.score(peer.peer, trio.current_time()) == 1, "being late is no fault"


# What a peer may answer wrongly.


async def answered_with(answer: bytes) -> tuple[SmallNode, SmallNode, BaseException]:
    """Call a peer that answers with these bytes; (caller, peer, what the call raised)."""
    network = MemoryNetwork()
    caller, liar = SmallNode(network, 1), SmallNode(network, 2)

    async def lie(peer: PeerId, data: bytes) -> bytes:
        return answer

    liar.transport._served.clear()
    liar.transport.serve(RPC_PROTOCOL, lie, max_request_bytes=10_000, max_concurrent=1)
    async with running(caller, liar):
        await connect(caller, liar)
        with pytest.raises((Refused, TransportError)) as caught:
            await caller.swarm.call(liar.peer, REQUEST, timeout_s=10, expect=Credit)
        return caller, liar, caught.value


CREDIT = Credit(granted=1, version=1, retry_after_s=0).encode()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"garbage", RefusalReason.MALFORMED),
        (sealed(3, kind="credit", body=CREDIT), RefusalReason.WRONG_SENDER),
        (sealed(kind="credit", body=CREDIT, run_id=b"x" * 32), RefusalReason.WRONG_RUN),
        (
            sealed(kind="receipt", body=Receipt(group=b"g" * 32, accepted=True).encode()),
            RefusalReason.WRONG_KIND,
        ),
        (sealed(kind="credit", body=b"\x80"), RefusalReason.MALFORMED),
        (sealed(kind="credit", body=CREDIT)[:-1] + b"?", RefusalReason.BAD_SIGNATURE),
    ],
)
async def test_a_bad_answer_is_counted_and_is_not_an_answer(
    autojump_clock: object, answer: bytes, reason: RefusalReason
) -> None:
    caller, liar, error = await answered_with(answer)
    assert isinstance(error, InvalidResponse)
    assert caller.refusals == [(liar.peer, reason)]


async def test_a_refusal_in_unknown_words_keeps_the_word(autojump_clock: object) -> None:
    refusal = Refusal(reason="bad_weather", detail="rain")
    caller, _, error = await answered_with(sealed(kind="refusal", body=refusal.encode()))
    assert isinstance(error, Refused)
    assert error.reason is RefusalReason.WRONG_PROTOCOL
    assert "bad_weather" in error.detail and "rain" in error.detail
    assert caller.refusals == []


async def test_a_node_of_another_run_says_so(autojump_clock: object) -> None:
    network = MemoryNetwork()
    here, there = SmallNode(network, 1), SmallNode(network, 2, run_id=b"x" * 32)
    async with running(here, there):
        await connect(here, there)
        with pytest.raises(Refused) as refused:
            await here.swarm.call(there.peer, REQUEST, timeout_s=10)
        assert refused.value.reason is RefusalReason.WRONG_RUN


async def test_a_silent_peer_costs_the_timeout_only(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        learner.swarm.serve("credit_request", lambda sender, message: trio.sleep_forever())  # type: ignore[arg-type,return-value]
        with pytest.raises(RequestTimeout):
            await peer.swarm.call(learner.peer, REQUEST, timeout_s=3)


# Announcements.


async def next_announcement(node: Learner) -> tuple[bytes, Message]:
    with trio.fail_after(10):
        return await node.announced.receive()


async def test_an_announcement_reaches_everybody_once_whoever_relays_it(autojump_clock: object) -> None:
    network = MemoryNetwork(duplicate=1.0)
    nodes = [Learner(network, number) for number in range(1, 5)]
    async with running(*nodes):
        for left, right in itertools.pairwise(nodes):
            await connect(left, right)
        await nodes[0].swarm.announce(PRESENCE)
        for node in nodes[1:]:
            assert await next_announcement(node) == (nodes[0].key, PRESENCE)
        await trio.sleep(5)
        for node in nodes:
            assert node.announced.statistics().current_buffer_used == 0
            assert node.refusals == []
        assert sum(node.swarm.duplicates for node in nodes) >= 3


async def test_bad_announcements_are_counted_against_who_is_to_blame(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        await learner.swarm.listening.wait()
        good = sealed(3, kind="presence", body=PRESENCE.encode())
        author = PeerId(Identity.from_seed((3).to_bytes(32, "big")).key)
        cases = [
            (b"garbage", peer.peer, RefusalReason.MALFORMED),
            (good[:-1] + bytes([good[-1] ^ 1]), peer.peer, RefusalReason.BAD_SIGNATURE),
            (
                sealed(3, kind="presence", run_id=b"x" * 32, body=PRESENCE.encode()),
                peer.peer,
                RefusalReason.WRONG_RUN,
            ),
            (sealed(3, kind="presence", sequence=1, body=b"\x80"), author, RefusalReason.MALFORMED),
            (sealed(3, kind="rubbish", sequence=2), author, RefusalReason.WRONG_KIND),
        ]
        for data, blamed, reason in cases:
            await peer.transport.publish(learner.swarm.topic, data)
            await trio.sleep(1)
            assert learner.refusals[-1:] == [(blamed, reason)]
        assert len(learner.refusals) == len(cases)
        now_s = trio.current_time()
        assert learner.swarm.reputation.score(peer.peer, now_s) == 1, "who only relays is not punished"
        assert learner.swarm.reputation.score(author, now_s) < 0.9
        assert learner.announced.statistics().current_buffer_used == 0
        await peer.transport.publish(learner.swarm.topic, good)
        assert await next_announcement(learner) == (author, PRESENCE)


async def test_an_oversized_announcement_is_not_sent_and_not_taken(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        large = PRESENCE.model_copy(update={"addresses": ["/memory/" + "x" * 240] * 40})
        with pytest.raises(Refused) as refused:
            await peer.swarm.announce(large)
        assert refused.value.reason is RefusalReason.OVERSIZED
        channel = await learner.transport.subscribe(learner.swarm.topic)
        channel.close()
        learner.transport._topics[learner.swarm.topic].send(
            GossipMessage(learner.swarm.topic, bytes(limits.MAX_ANNOUNCEMENT_BYTES + 1), peer.peer)
        )
        await trio.sleep(1)
        assert learner.refusals == [(peer.peer, RefusalReason.OVERSIZED)]


async def test_a_replayed_announcement_is_dropped_silently(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        data = sealed(3, kind="presence", body=PRESENCE.encode())
        for _ in range(3):
            await peer.transport.publish(learner.swarm.topic, data)
        await next_announcement(learner)
        await trio.sleep(5)
        assert learner.announced.statistics().current_buffer_used == 0
        assert learner.refusals == []
        assert learner.swarm.duplicates == 2


async def test_calls_and_announcements_of_one_author_may_overtake_each_other(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        late = peer.swarm.seal(PRESENCE)
        for _ in range(50):
            await peer.swarm.call(learner.peer, REQUEST, timeout_s=10)
        await peer.transport.publish(learner.swarm.topic, late)
        assert await next_announcement(learner) == (peer.key, PRESENCE)
        assert learner.refusals == []


async def test_a_slow_reader_loses_the_oldest_announcements(autojump_clock: object) -> None:
    async with a_learner_and_a_peer() as (learner, peer):
        for number in range(1_030):
            await peer.swarm.announce(PRESENCE.model_copy(update={"updates": number}))
            await trio.sleep(0.02)
        await trio.sleep(5)
        _, oldest = await next_announcement(learner)
        assert isinstance(oldest, Presence) and oldest.updates == 6
        assert learner.swarm.announcements_dropped == 6


def test_replay_windows_are_bounded_and_the_longest_silent_goes_first() -> None:
    guard = ReplayGuard(max_senders=3)
    keys = [Identity.from_seed(bytes([number]) * 32).key for number in range(4)]
    for key in keys[:3]:
        assert guard.accept(key, 7)
    assert not guard.accept(keys[0], 7)
    assert guard.accept(keys[3], 7)
    assert len(guard) == 3
    assert not guard.accept(keys[0], 7), "it spoke lately and is remembered"
    assert guard.accept(keys[1], 7), "it was silent for longest and is forgotten"


def test_every_message_class_has_one_kind() -> None:
    assert kind_of(REQUEST) == "credit_request"
    assert kind_of(PRESENCE) == "presence"
