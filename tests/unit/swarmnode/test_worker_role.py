"""The worker's side of a node: counters once, groups kept until their receipt, weights only forward; whatever
the learner answers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peers.base import TransportError
from protocol.envelope import open_envelope
from protocol.messages import Credit, Receipt, group_id
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.worker_role import HANGS_AFTER_S, MAX_OUTBOX, REFUSALS_BEFORE_DROP, WorkerRole
from tests.unit.swarmnode.role_parts import LEARNER, WORKER, FakeChild, InlineStore, make_group, make_spec
from tests.unit.swarmnode.stored_versions import stored

SPEC = make_spec()


class ScriptedLearner:
    """Grants what `grant` says and answers pushes by `answer`."""

    def __init__(self) -> None:
        self.grant: Callable[[int], int] = lambda wanted: 0
        self.asked: list[tuple[int, int]] = []
        self.pushed: list[bytes] = []
        self.answer: Callable[[bytes], Receipt] = lambda name: Receipt(group=name, accepted=True)

    async def credit(self, version: int, wanted: int) -> Credit:
        await trio.lowlevel.checkpoint()
        self.asked.append((version, wanted))
        return Credit(granted=self.grant(wanted), version=version, retry_after_s=1.0)

    async def push(self, envelope: bytes) -> Receipt:
        await trio.sleep(0.01)
        opened = open_envelope(envelope, run_id=SPEC.run_id)
        name = group_id(opened.sender, opened.body)
        self.pushed.append(name)
        return self.answer(name)


class WorkerParts:
    def __init__(self, path: Path) -> None:
        self.store = InlineStore(path / "state.sqlite")
        self.link = ScriptedLearner()
        self.engine = FakeChild()
        self.events: list[str] = []
        self.accepted: list[bytes] = []
        numbers = iter(range(10**6))
        self.role = WorkerRole(
            policy=LEARNER.key,
            run_id=SPEC.run_id,
            identity=WORKER,
            link=self.link,
            store=self.store,  # type: ignore[arg-type]
            next_sequence=lambda: next(numbers),
            groups_in_hand=4,
            on_event=lambda level, text, kind=None: self.events.append(text),
            on_accepted=lambda envelope, group, receipt: self.accepted.append(receipt.group),
        )
        self.role.process = self.engine  # type: ignore[assignment]

    async def ready(self, version: int = 0) -> None:
        await self.say("ready")
        self.role.offer_version(stored(version))
        await self.say("loaded", version=version)

    async def say(self, kind: str, **fields: Any) -> None:
        await self.role.on_message({"type": kind, **fields})

    async def generated(self, counter: int, version: int = 0) -> bytes:
        """The engine made a group; its name."""
        body = make_group(SPEC, WORKER, counter, version=version).encode()
        await self.say("group", counter=counter, version=version, body=body, tokens=4)
        return group_id(WORKER.key, body)

    @property
    def asked_of_engine(self) -> list[int]:
        return [message["counter"] for message in self.engine.of("generate")]


@pytest.fixture
async def parts(tmp_path: Path):
    made = WorkerParts(tmp_path)
    yield made
    made.store.store.close()


async def test_what_is_granted_is_generated_pushed_and_forgotten(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    grants = [3]
    parts.link.grant = lambda wanted: grants.pop() if grants else 0
    await parts.ready()
    nursery.start_soon(parts.role.run)
    await trio.sleep(0.5)
    assert parts.asked_of_engine == [0, 1, 2]
    names = [await parts.generated(counter) for counter in (0, 1)]
    assert len(parts.store.store.outbox()) == 2, "on disk before anything is sent"
    await trio.sleep(2)
    assert sorted(parts.link.pushed) == sorted(names) == sorted(parts.accepted)
    assert parts.store.store.outbox() == [] and parts.role.in_outbox == 0
    assert parts.role.receipts == {"accepted": 2} == parts.store.store.receipts()
    assert parts.link.asked[-1] == (0, 3), "one of four is still in the engine's hand"


async def test_a_learner_that_grants_too_much_gets_no_more_than_was_wanted(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    parts.link.grant = lambda wanted: 1024
    await parts.ready()
    nursery.start_soon(parts.role.run)
    await trio.sleep(5)
    assert parts.asked_of_engine == [0, 1, 2, 3]


async def test_counters_are_never_used_twice_across_restarts(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[int] = []
    for _ in range(3):
        parts = WorkerParts(tmp_path)
        parts.link.grant = lambda wanted: wanted
        await parts.ready()
        async with trio.open_nursery() as life:
            life.start_soon(parts.role.run)
            await trio.sleep(1)
            life.cancel_scope.cancel()
        seen += parts.asked_of_engine
        parts.store.store.close()
    assert seen == list(range(12))


async def test_the_credit_of_a_killed_engine_is_used_again(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    grants = [4]
    parts.link.grant = lambda wanted: grants.pop() if grants else 0
    await parts.ready()
    nursery.start_soon(parts.role.run)
    await trio.sleep(0.5)
    await parts.generated(0)
    await trio.sleep(1)
    parts.role.on_process_down()
    assert parts.role.loaded_version is None
    await trio.sleep(3)
    await parts.ready()
    await trio.sleep(3)
    assert parts.asked_of_engine == [0, 1, 2, 3, 4, 5, 6], "three anew, under counters never used"


async def test_a_receipt_must_name_its_group(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    answers = [Receipt(group=b"x" * 32, accepted=True)]
    right = parts.link.answer
    parts.link.answer = lambda name: answers.pop() if answers else right(name)
    nursery.start_soon(parts.role.run)
    name = await parts.generated(0)
    await trio.sleep(5)
    assert parts.link.pushed == [name, name]
    assert parts.role.receipts == {"accepted": 1}


async def test_words_that_a_learner_invents_are_counted_as_other(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    reasons = ["too_stale", "accepted", "<b>made up</b>", ""]
    parts.link.answer = lambda name: Receipt(group=name, accepted=False, reason=reasons.pop())
    nursery.start_soon(parts.role.run)
    for counter in range(4):
        await parts.generated(counter)
    await trio.sleep(5)
    assert parts.role.receipts == {"too_stale": 1, "other": 3} == parts.store.store.receipts()


async def test_a_group_survives_a_learner_that_is_away_busy_or_starting(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    troubles: list[Exception] = [
        TransportError("gone"),
        Refused(RefusalReason.WRONG_KIND, "starting"),
        *[Refused(RefusalReason.BUSY, "busy")] * 10,
        TransportError("gone"),
    ]
    right = parts.link.answer

    def answer(name: bytes) -> Receipt:
        if troubles:
            raise troubles.pop()
        return right(name)

    parts.link.answer = answer
    nursery.start_soon(parts.role.run)
    name = await parts.generated(0)
    await trio.sleep(200)
    assert parts.accepted == [name]


async def test_a_push_that_is_refused_again_and_again_is_given_up(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    def refuse(name: bytes) -> Receipt:
        raise Refused(RefusalReason.BAD_SIGNATURE, "no")

    parts.link.answer = refuse
    nursery.start_soon(parts.role.run)
    await parts.generated(0)
    await trio.sleep(60)
    assert len(parts.link.pushed) == REFUSALS_BEFORE_DROP
    assert parts.role.receipts == {"bad_signature": 1}
    assert parts.role.last_refusal == "bad_signature: no"


async def test_the_outbox_of_an_earlier_start_is_pushed_and_its_receipts_counted(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    first = WorkerParts(tmp_path)
    first.store.store.settle_outbox(b"x", "accepted")
    name = await first.generated(0)
    first.store.store.close()
    second = WorkerParts(tmp_path)
    await second.role.start()
    nursery.start_soon(second.role.run)
    await trio.sleep(2)
    assert second.accepted == [name]
    assert second.role.receipts == {"accepted": 2}
    second.store.store.close()


async def test_with_a_full_outbox_nothing_more_is_generated(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    def away(name: bytes) -> Receipt:
        raise TransportError("away")

    parts.link.answer = away
    parts.link.grant = lambda wanted: wanted
    parts.store.store.put_outbox = lambda *_: None  # type: ignore[method-assign]
    for counter in range(MAX_OUTBOX):
        await parts.generated(counter)
    await parts.ready()
    nursery.start_soon(parts.role.run)
    await trio.sleep(20)
    assert parts.asked_of_engine == []
    assert parts.role.state == f"paused: {MAX_OUTBOX} groups wait for the learner's receipt"


async def test_versions_are_loaded_one_at_a_time_and_only_forward(parts: WorkerParts) -> None:
    await parts.say("ready")
    for version in (1, 2, 3, 2):
        parts.role.offer_version(stored(version))
    assert [message["version"] for message in parts.engine.of("load")] == [1]
    await parts.say("loaded", version=1)
    await parts.say("load_failed", version=3, way="file", reason="its probe differs")
    assert [message["version"] for message in parts.engine.of("load")] == [1, 3, 2]
    await parts.say("loaded", version=2)
    assert parts.role.loaded_version == 2
    parts.role.on_process_down()
    await parts.say("ready")
    assert [message["version"] for message in parts.engine.of("load")] == [1, 3, 2, 3]


async def test_groups_of_a_patched_version_are_sent_when_its_snapshot_is_verified(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await parts.ready(1)
    nursery.start_soon(parts.role.run)
    parts.role.offer_version(stored(2, parent=1, has_file=False))
    load = parts.engine.of("load")[-1]
    assert load["path"] is None
    assert load["deltas"] == [{"version": 2, "parent": 1, "path": "/v2/delta"}]
    before = await parts.generated(0, version=1)
    await parts.say("loaded", version=2, way="deltas", patch_obstacle=None)
    after = await parts.generated(1, version=2)
    await trio.sleep(60)
    assert parts.link.pushed == [before]
    assert parts.store.store.outbox() == [] and parts.role.in_outbox == 1
    parts.role.offer_version(stored(2, parent=1))
    await trio.sleep(1)
    assert parts.link.pushed == [before, after]
    assert len(parts.engine.of("load")) == 2, "it is loaded already"


async def test_groups_of_a_withdrawn_version_are_thrown_away_and_the_last_good_one_is_loaded(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    grants = [3]
    parts.link.grant = lambda wanted: grants.pop() if grants else 0
    await parts.ready(1)
    nursery.start_soon(parts.role.run)
    await trio.sleep(0.5)
    parts.role.offer_version(stored(2, parent=1, has_file=False))
    await parts.say("loaded", version=2, way="deltas", patch_obstacle=None)
    await parts.generated(0, version=2)
    parts.role.withdraw_versions([2])
    assert parts.role.loaded_version is None
    assert parts.engine.of("load")[-1]["path"] == "/v1/weights"
    await parts.generated(1, version=2)  # was being made
    await parts.say("loaded", version=1, way="file", patch_obstacle=None)
    good = await parts.generated(2, version=1)
    # The same number again, now from the snapshot that was signed.
    parts.role.offer_version(stored(2))
    await parts.say("loaded", version=2, way="file", patch_obstacle=None)
    also_good = await parts.generated(3, version=2)
    await trio.sleep(10)
    assert sorted(parts.link.pushed) == sorted([good, also_good])
    assert any("thrown away" in text for text in parts.events)
    assert parts.asked_of_engine == [0, 1, 2, 3, 4], "two are made anew under new counters"


async def test_an_engine_that_gives_nothing_for_half_an_hour_is_ended(
    parts: WorkerParts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    parts.link.grant = lambda wanted: wanted
    await parts.ready()
    nursery.start_soon(parts.role.run)
    await trio.sleep(HANGS_AFTER_S - 10)
    assert parts.engine.ended == []
    await trio.sleep(20)
    assert parts.engine.ended and "gave none of 4 groups" in parts.engine.ended[0]


async def test_rates_are_those_of_the_last_half_minute(
    parts: WorkerParts, autojump_clock: trio.testing.MockClock
) -> None:
    for counter in range(10):
        await trio.sleep(1)
        await parts.generated(counter)
    assert math.isclose(parts.role.group_rate.per_second(), 10 / 9, rel_tol=0.01)
    await trio.sleep(31)
    assert parts.role.group_rate.per_second() == 0.0
