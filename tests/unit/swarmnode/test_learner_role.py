"""The learner's side of a node: every accepted group reaches the learner process once, whatever happens
between two awaits; credit is neither leaked nor given twice."""

from pathlib import Path

import pytest
import trio
import trio.testing

from protocol.messages import CreditRequest, GroupPush
from protocol.refusals import RefusalReason, Refused
from swarmnode.runtime.group_checks import CHECK_TIMEOUT_S, HANGS_AFTER_S
from tests.unit.swarmnode.role_parts import LEARNER, OTHER, WORKER, LearnerParts, make_spec, name_of


def request(version: int = 0, wanted: int = 8) -> CreditRequest:
    return CreditRequest(policy=LEARNER.key, version=version, wanted=wanted)


@pytest.fixture
async def parts(tmp_path: Path, nursery: trio.Nursery):
    made = LearnerParts(tmp_path)
    made.verify_by(nursery)
    yield made
    made.store.store.close()


async def test_a_group_is_recorded_handed_over_and_acknowledged_once(parts: LearnerParts) -> None:
    await parts.up()
    envelope = parts.envelope(1)
    first = await parts.role.receive_local(envelope)
    again = await parts.role.receive_local(envelope)
    assert (first.accepted, first.duplicate) == (True, False)
    assert (again.accepted, again.duplicate) == (True, True)
    assert [message["id"] for message in parts.learner.of("group")] == [name_of(envelope)]
    assert parts.counts_agree() and parts.role.waiting_local == 1


async def test_the_same_work_signed_anew_is_refused_as_replayed(parts: LearnerParts) -> None:
    await parts.up()
    await parts.push(1)
    receipt = await parts.role.receive_local(parts.envelope(1, rewards=(0.0, 0.5)))
    assert (receipt.accepted, receipt.reason) == (False, "replayed")
    assert parts.refusals == ["replayed"]


async def test_groups_accepted_while_the_learner_is_down_reach_it_when_it_is_ready(
    parts: LearnerParts,
) -> None:
    await parts.up()
    before = await parts.push(1)
    parts.role.on_learner_down()
    parts.learner.is_up = False
    during = await parts.push(2)
    assert parts.role.waiting_local == 2, "what is accepted counts as waiting, learner or not"
    parts.learner.is_up = True
    parts.learner.sent.clear()
    await parts.learner_ready()
    assert [message["id"] for message in parts.learner.of("group")] == [before, during]
    assert parts.counts_agree()


@pytest.mark.parametrize("moment", range(4))
async def test_a_group_accepted_at_any_moment_of_a_resume_is_handed_over_exactly_once(
    parts: LearnerParts, moment: int
) -> None:
    """`_on_ready` makes several transactions; another push comes in between each of them and its caller."""
    await parts.up()
    await parts.push(1)
    parts.role.on_learner_down()
    parts.learner.sent.clear()

    reached = []

    async def push_another(transaction: int) -> None:
        if transaction == moment:
            reached.append(await parts.push(2))

    parts.store.between = push_another
    await parts.learner_ready()
    parts.store.between = None
    assert reached, f"a resume has fewer than {moment + 1} transactions"
    sent = [message["id"] for message in parts.learner.of("group")]
    assert len(sent) == len(set(sent)) == 2
    assert parts.counts_agree() and parts.role.waiting_local == 2


async def test_no_credit_before_a_resumed_learner_has_its_waiting_groups(parts: LearnerParts) -> None:
    await parts.up()
    for counter in range(4):
        await parts.push(counter)
    parts.role.on_learner_down()
    granted = []

    async def ask(transaction: int) -> None:
        granted.append(parts.role.credit(WORKER.key, request()).granted)

    parts.store.between = ask
    await parts.learner_ready()
    parts.store.between = None
    assert set(granted) == {0}
    assert parts.role.credit(WORKER.key, request()).granted == 4, "two batches of four, four groups wait"


async def test_a_full_channel_delays_groups_and_loses_none(parts: LearnerParts) -> None:
    await parts.up()
    names = [await parts.push(counter) for counter in range(4)]
    parts.learner.room = 1
    names += [await parts.push(counter) for counter in range(4, 8)]
    assert len(parts.learner.of("group")) == 5
    parts.learner.room = 10**6
    await parts.update(1, names[:4])
    assert [message["id"] for message in parts.learner.of("group")] == names
    assert parts.learner.of("ack") == [{"type": "ack", "version": 1}]


async def test_an_update_is_recorded_published_and_then_acknowledged(parts: LearnerParts) -> None:
    await parts.up()
    names = [await parts.push(counter) for counter in range(4)]
    await parts.update(1, names[:3], stale=names[3:])
    assert parts.published == [0, 1]
    assert parts.store.store.counts() == {"consumed": 3, "stale": 1}
    status = parts.role.status
    assert (status.version, status.updates, status.published_versions) == (1, 1, 2)
    assert parts.metrics == [("reward", 1, 0.5)]
    assert parts.role.waiting_local == 0


async def test_totals_survive_a_restart_of_the_node(tmp_path: Path, parts: LearnerParts) -> None:
    await parts.up()
    names = [await parts.push(counter) for counter in range(5)]
    await parts.update(1, names[:2])
    await parts.update(2, names[2:4])
    again = LearnerParts(tmp_path)
    await again.role.start()
    before = again.role.status
    assert (before.updates, before.published_versions) == (2, 3)
    await again.up(2, {1: names[:2], 2: names[2:4]})
    after = again.role.status
    assert (after.updates, after.published_versions, after.version) == (2, 3, 2)
    assert after.staleness == {0: 2, 1: 2} and after.max_staleness_seen == 1
    assert again.role.accepted_from == {WORKER.key: 5}
    assert [message["id"] for message in again.learner.of("group")] == [names[4]]
    again.store.store.close()


async def test_what_the_checkpoint_does_not_know_waits_again(parts: LearnerParts) -> None:
    await parts.up()
    names = [await parts.push(counter) for counter in range(4)]
    await parts.update(1, names[:2])
    await parts.update(2, names[2:])
    parts.role.on_learner_down()
    parts.learner.sent.clear()
    await parts.learner_ready(1, {1: names[:2]})
    assert [message["id"] for message in parts.learner.of("group")] == names[2:]
    assert parts.role.status.updates == 1
    assert any("2 groups wait again" in text for _, text in parts.events)


async def test_old_weights_under_a_new_number_give_back_what_they_never_saw(parts: LearnerParts) -> None:
    """The newest checkpoint was damaged: its weights come again as the version after the last published."""
    await parts.up()
    names = [await parts.push(counter) for counter in range(4)]
    await parts.update(1, names[:2])
    await parts.update(2, names[2:])
    parts.role.on_learner_down()
    parts.learner.sent.clear()
    await parts.learner_ready(3, {1: names[:2]})
    assert [message["id"] for message in parts.learner.of("group")] == names[2:]


# Credit


async def test_credit_counts_what_waits_and_what_is_on_its_way(parts: LearnerParts) -> None:
    await parts.up()
    assert parts.role.credit(WORKER.key, request(wanted=5)).granted == 5
    assert parts.role.credit(OTHER.key, request(wanted=5)).granted == 3
    assert parts.role.credit(OTHER.key, request(wanted=5)).granted == 0
    for counter in range(3):
        await parts.push(counter)
    assert parts.role.credit(OTHER.key, request(wanted=5)).granted == 0, "arrived: waiting, not outstanding"
    await parts.update(1, [name_of(parts.envelope(0))])


async def test_a_lost_connection_frees_its_credit_at_once(parts: LearnerParts) -> None:
    await parts.up()
    assert parts.role.credit(WORKER.key, request()).granted == 8
    assert parts.role.credit(OTHER.key, request()).granted == 0
    parts.role.forget_worker(WORKER.key)
    assert parts.role.credit(OTHER.key, request()).granted == 8


async def test_one_who_never_delivers_soon_holds_one_group_only(
    parts: LearnerParts, autojump_clock: trio.testing.MockClock
) -> None:
    await parts.up()
    held = []
    for _ in range(5):
        held.append(parts.role.credit(OTHER.key, request(wanted=1024)).granted)
        await trio.sleep(60)
    assert held == [8, 4, 2, 1, 1]


async def test_a_restart_of_the_learner_process_keeps_the_credit_that_was_given(parts: LearnerParts) -> None:
    await parts.up()
    assert parts.role.credit(WORKER.key, request()).granted == 8
    parts.role.on_learner_down()
    assert parts.role.credit(OTHER.key, request()).granted == 0
    await parts.learner_ready()
    assert parts.role.credit(OTHER.key, request()).granted == 0


async def test_credit_for_another_policy_is_refused_and_none_is_given_after_the_end(
    parts: LearnerParts,
) -> None:
    await parts.up()
    with pytest.raises(Refused) as caught:
        parts.role.credit(WORKER.key, CreditRequest(policy=OTHER.key, version=0, wanted=1))
    assert caught.value.reason is RefusalReason.UNKNOWN_POLICY
    await parts.role.on_learner_message(
        {"type": "eval", "version": 0, "accuracy": 0.9, "by_task": {}, "count": 1, "final": True}
    )
    assert parts.role.credit(WORKER.key, request()).granted == 0


# What peers can do


async def test_a_flood_without_credit_ends_at_the_bound(parts: LearnerParts) -> None:
    await parts.up()
    bound = (2 + 2) * 4
    for counter in range(bound):
        await parts.push(counter, OTHER)
    receipt = await parts.role.receive_local(parts.envelope(bound, OTHER))
    assert (receipt.accepted, receipt.reason) == (False, "no_credit")
    parts.role.on_learner_down()
    receipt = await parts.role.receive_local(parts.envelope(bound + 1, OTHER))
    assert receipt.reason == "no_credit", "a learner that is down is no way round the bound"


async def test_somebody_elses_group_cannot_be_pushed(parts: LearnerParts) -> None:
    await parts.up()
    push = GroupPush(envelope=parts.envelope(1, WORKER).encoded)
    with pytest.raises(Refused) as caught:
        await parts.role.handle_push(OTHER.key, push)  # type: ignore[arg-type]
    assert caught.value.reason is RefusalReason.WRONG_SENDER


async def test_a_group_that_became_too_stale_during_its_check_is_refused(tmp_path: Path) -> None:
    parts = LearnerParts(tmp_path, make_spec(max_staleness=0, pacing_batches=1))
    await parts.up()
    receipts = []
    async with trio.open_nursery() as nursery:

        async def push() -> None:
            receipts.append(await parts.role.receive_local(parts.envelope(1)))

        nursery.start_soon(push)
        await trio.testing.wait_all_tasks_blocked()
        await parts.update(1, [])
        (check,) = parts.verifier.of("check")
        await parts.role.checks.on_message(
            {"type": "checked", "id": check["id"], "ok": True, "prompt_ids": [1], "completions": None}
            | {"reason": None, "rewards": [0.0, 1.0]}
        )
    assert receipts[0].reason == "too_stale"


# The verifier


async def test_a_refusal_of_the_verifier_is_the_receipt(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    parts = LearnerParts(tmp_path)
    parts.verify_by(nursery, ok=False, reason="reward_mismatch: completion 0 earns 1, not 0")
    await parts.up()
    receipt = await parts.role.receive_local(parts.envelope(1))
    assert (receipt.reason, receipt.detail) == ("reward_mismatch", "completion 0 earns 1, not 0")


async def test_groups_in_check_come_again_when_the_verifier_dies(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    parts = LearnerParts(tmp_path)
    await parts.up()
    refused: list[Refused] = []
    started = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def push() -> None:
            try:
                await parts.role.receive_local(parts.envelope(1))
            except Refused as error:
                refused.append(error)

        nursery.start_soon(push)
        await trio.testing.wait_all_tasks_blocked()
        parts.role.checks.on_down()
    assert refused[0].reason is RefusalReason.BUSY
    assert trio.current_time() - started < CHECK_TIMEOUT_S
    async with trio.open_nursery() as nursery:
        parts.verify_by(nursery)
        nursery.start_soon(parts.push, 1)
        await trio.testing.wait_all_tasks_blocked()
        await parts.role.checks.on_message({"type": "ready"})
    assert parts.role.waiting_local == 1
    assert parts.refusals == [], "a restart is nobody's fault"


async def test_a_verifier_that_hangs_is_ended(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    parts = LearnerParts(tmp_path)
    await parts.up()
    tries = 0
    while not parts.verifier.ended:
        tries += 1
        with pytest.raises(Refused) as caught:
            await parts.role.receive_local(parts.envelope(tries))
        assert caught.value.reason is RefusalReason.BUSY
        assert trio.current_time() < HANGS_AFTER_S + 2 * CHECK_TIMEOUT_S
        await trio.sleep(5)
    assert trio.current_time() >= HANGS_AFTER_S
    assert len(parts.role.checks) == 0


# Words to and from the learner process


async def test_a_finish_asked_for_while_the_learner_is_down_is_told_when_it_is_ready(
    parts: LearnerParts,
) -> None:
    parts.role.finish_training()
    assert parts.learner.of("finish") == []
    await parts.up()
    assert parts.learner.of("finish") == [{"type": "finish"}]


async def test_an_evaluation_of_version_0_done_again_is_still_the_one_before(parts: LearnerParts) -> None:
    await parts.up()
    for accuracy in (0.25, 0.26):
        await parts.role.on_learner_message(
            {"type": "eval", "version": 0, "accuracy": accuracy, "by_task": {}, "count": 1, "final": False}
        )
    status = parts.role.status
    assert (status.eval_before, status.eval_after) == (0.26, None)


async def test_a_group_consumed_that_was_not_waiting_is_reported(parts: LearnerParts) -> None:
    await parts.up()
    await parts.update(1, [b"x" * 32])
    assert ("error", "version 1 consumed 1 groups that were not waiting") in parts.events


async def test_external_groups_that_teach_nothing_are_not_kept(parts: LearnerParts) -> None:
    await parts.up()
    assert await parts.role.receive_external(parts.envelope(1, OTHER, policy=OTHER.key))
    parts.rewards = (1.0, 1.0)
    assert not await parts.role.receive_external(parts.envelope(2, OTHER, policy=OTHER.key))
    assert (parts.role.waiting_external, parts.role.waiting_local) == (1, 0)
    assert parts.counts_agree()


async def test_a_halt_is_shown_with_its_reason_and_nobody_gets_credit_until_a_restart(
    parts: LearnerParts,
) -> None:
    await parts.up()
    for counter in range(4):
        await parts.push(counter)
    reason = "training halted: the policy has collapsed"
    await parts.role.on_learner_message(
        {"type": "halted", "reason": reason, "version": 3, "publication": parts.publication(3)}
    )
    status = parts.role.status
    assert (status.halted, status.version, status.state) == (reason, 3, reason)
    assert parts.published == [0, 3] and ("error", reason) in parts.events
    answer = parts.role.credit(WORKER.key, request(version=3))
    assert (answer.granted, answer.reason, answer.version) == (0, "training has halted", 3)
    # The groups that wait are still there when somebody starts it again.
    parts.role.on_learner_down()
    await parts.learner_ready(3)
    assert status.halted is None and parts.counts_agree() and parts.role.waiting_local == 4
    assert parts.role.credit(WORKER.key, request(version=3)).granted == 4
