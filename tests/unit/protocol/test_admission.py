"""Admission: an accepted group, one test per reason to refuse one, and the order of the rules."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.admission import LOGPROB_FLOOR, check_group
from protocol.identity import Identity
from protocol.messages import Completion, RolloutGroup, VersionRun
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec, TrustRules
from protocol.tasks import TaskRef, assigned_task

POLICY = bytes(range(32))
MakeGroup = Callable[..., RolloutGroup]
Check = Callable[..., None]


@pytest.fixture
def check(spec: RunSpec, identity: Identity) -> Check:
    """`check_group` with the run's and sender's facts filled in."""

    def run(group: RolloutGroup, learner_version: int | None = 5, **changes: Any) -> None:
        facts: dict[str, Any] = {
            "policy": POLICY,
            "vocabulary_size": 100,
            "sender": identity.key,
            "spec": spec,
        }
        facts |= {"run_id": spec.run_id, "learner_version": learner_version} | changes
        check_group(group, **facts)

    return run


@pytest.fixture
def reason(check: Check) -> Callable[..., RefusalReason]:
    def run(group: RolloutGroup, learner_version: int | None = 5, **changes: Any) -> RefusalReason:
        with pytest.raises(Refused) as caught:
            check(group, learner_version, **changes)
        return caught.value.reason

    return run


Reason = Callable[..., RefusalReason]


def edited(group: RolloutGroup, index: int = 1, **changes: Any) -> RolloutGroup:
    """`group` with one completion changed."""
    completions = list(group.completions)
    completions[index] = completions[index].model_copy(update=changes)
    return group.model_copy(update={"completions": completions})


def f32(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def runs(*pairs: tuple[int, int]) -> list[VersionRun]:
    return [VersionRun(version=version, count=count) for version, count in pairs]


def test_a_group_that_keeps_every_rule_is_accepted(make_group: MakeGroup, check: Check) -> None:
    check(make_group())
    check(RolloutGroup.decode(make_group().encode()))


@pytest.mark.parametrize("learner_version", [5, 6, 7])
def test_up_to_the_bound_a_group_is_accepted(
    make_group: MakeGroup, check: Check, learner_version: int
) -> None:
    check(make_group(), learner_version)


def test_beyond_the_bound_it_is_too_stale(make_group: MakeGroup, reason: Reason) -> None:
    assert reason(make_group(), 8) is RefusalReason.TOO_STALE


def test_a_version_that_does_not_exist_yet(make_group: MakeGroup, reason: Reason) -> None:
    assert reason(make_group(), 4) is RefusalReason.FUTURE_VERSION
    mixed = edited(make_group(), version_runs=runs((5, 1), (6, 1)))
    assert reason(mixed, 5) is RefusalReason.FUTURE_VERSION


def test_weights_may_change_inside_a_completion(make_group: MakeGroup, check: Check, reason: Reason) -> None:
    mixed = edited(make_group(), version_runs=runs((5, 1), (7, 1)))
    check(mixed, 7)
    assert reason(mixed, 8) is RefusalReason.TOO_STALE  # its oldest token decides


def test_an_external_group_has_no_staleness(make_group: MakeGroup, check: Check) -> None:
    check(make_group(), None)
    check(make_group(version=999), None)


def test_another_policy(make_group: MakeGroup, reason: Reason) -> None:
    assert reason(make_group(), policy=b"q" * 32) is RefusalReason.UNKNOWN_POLICY
    assert reason(make_group(policy=b"q" * 32)) is RefusalReason.UNKNOWN_POLICY


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"top_k": 5},
        {"max_new_tokens": 5},
        {"group_size": 3},
        {"seeded": False},
    ],
)
def test_another_sampling_contract(
    make_group: MakeGroup, reason: Reason, spec: RunSpec, changes: dict[str, Any]
) -> None:
    other = spec.sampling.model_copy(update=changes)
    assert reason(make_group(sampling=other)) is RefusalReason.WRONG_SAMPLING


def test_unseeded_sampling_where_the_run_demands_seeds(
    make_group: MakeGroup, reason: Reason, spec: RunSpec
) -> None:
    unseeded = spec.sampling.model_copy(update={"seeded": False})
    loose = spec.model_copy(update={"sampling": unseeded})
    assert reason(make_group(sampling=unseeded), spec=loose) is RefusalReason.WRONG_SAMPLING


def test_a_task_that_is_not_in_the_run(make_group: MakeGroup, reason: Reason) -> None:
    task = make_group().task.model_copy(update={"config_hash": b"c" * 32})
    assert reason(make_group(task=task)) is RefusalReason.UNKNOWN_TASK


def test_a_task_of_the_run_that_was_not_assigned(
    make_group: MakeGroup, reason: Reason, spec: RunSpec, identity: Identity
) -> None:
    group = make_group()
    easier = group.task.model_copy(update={"seed": group.task.seed ^ 1})
    elsewhere = group.task.model_copy(update={"environment": "another"})
    held_out = group.task.model_copy(update={"seed": 2**31})
    next_one = assigned_task(spec.tasks, spec.run_id, identity.key, POLICY, 5, 10)
    for task in (easier, elsewhere, held_out, next_one):
        assert reason(make_group(task=task)) is RefusalReason.WRONG_SEED
    assert reason(make_group(counter=10, task=group.task)) is RefusalReason.WRONG_SEED
    assert reason(group, sender=b"s" * 32) is RefusalReason.WRONG_SEED
    assert reason(group, run_id=b"r" * 32) is RefusalReason.WRONG_SEED


def test_the_other_family_at_the_same_seed(make_group: MakeGroup, reason: Reason, spec: RunSpec) -> None:
    group = make_group()
    other = next(task for task in spec.tasks if task.config_hash != group.task.config_hash)
    swapped = TaskRef(environment=other.environment, config_hash=other.config_hash, seed=group.task.seed)
    assert reason(make_group(task=swapped)) is RefusalReason.WRONG_SEED


def test_too_few_or_too_many_completions_or_rewards(make_group: MakeGroup, reason: Reason) -> None:
    one = make_group().completions[0]
    for changes in (
        {"completions": [one]},
        {"completions": [one] * 3},
        {"rewards": [1.0]},
        {"rewards": [1.0] * 3},
    ):
        assert reason(make_group(**changes)) is RefusalReason.RAGGED_GROUP


def test_a_group_may_have_lost_completions_if_it_names_them_and_two_survive(
    make_group: MakeGroup, check: Check, reason: Reason, spec: RunSpec
) -> None:
    sampling = spec.sampling.model_copy(update={"group_size": 4})
    wide = spec.model_copy(update={"sampling": sampling})
    one = make_group().completions[0]

    def survivors(count: int, lost: list[int]) -> RolloutGroup:
        return make_group(
            sampling=sampling, completions=[one] * count, rewards=[1.0] * count, lost=lost, version=5
        )

    group = survivors(2, [0, 2])
    check(group, spec=wide)
    assert RolloutGroup.decode(group.encode()).places == [1, 3]
    check(survivors(3, [3]), spec=wide)
    for count, lost in ((1, [0, 1, 2]), (2, [2, 0]), (2, [1, 1]), (3, [4]), (2, []), (4, [0])):
        assert reason(survivors(count, lost), spec=wide) is RefusalReason.RAGGED_GROUP
    strict = wide.model_copy(update={"trust": TrustRules(min_completions=64)})
    check(survivors(4, []), spec=strict)
    assert reason(survivors(3, [3]), spec=strict) is RefusalReason.RAGGED_GROUP


def test_tokens_and_logprobs_of_different_length(make_group: MakeGroup, reason: Reason) -> None:
    for changes in (
        {"logprobs": f32(-1.0)},
        {"tokens": u32(1)},
        {"tokens": b"12345", "logprobs": b"12345"},
        {"tokens": u32(1, 2), "logprobs": f32(-1.0, -1.0)[:-1]},
    ):
        assert reason(edited(make_group(), **changes)) is RefusalReason.RAGGED_GROUP


def test_more_tokens_than_the_run_allows(make_group: MakeGroup, reason: Reason, check: Check) -> None:
    four = {"tokens": u32(1, 2, 3, 4), "logprobs": f32(-1, -1, -1, -1), "version_runs": runs((5, 4))}
    check(edited(make_group(), **four, finish="length"))
    check(edited(make_group(), **four, finish="stop"))
    five = {"tokens": u32(1, 2, 3, 4, 5), "logprobs": f32(-1, -1, -1, -1, -1), "version_runs": runs((5, 5))}
    assert reason(edited(make_group(), **five)) is RefusalReason.BAD_TOKENS


def test_ended_by_length_before_the_limit(make_group: MakeGroup, reason: Reason) -> None:
    assert reason(edited(make_group(), finish="length")) is RefusalReason.BAD_TOKENS


def test_a_token_outside_the_vocabulary(make_group: MakeGroup, reason: Reason, check: Check) -> None:
    check(edited(make_group(), tokens=u32(99, 0)))
    assert reason(edited(make_group(), tokens=u32(100, 0))) is RefusalReason.BAD_TOKENS
    assert reason(edited(make_group(), tokens=u32(0, 2**32 - 1))) is RefusalReason.BAD_TOKENS
    check(edited(make_group(), tokens=u32(100, 0)), vocabulary_size=None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-6, 5.0, LOGPROB_FLOOR - 1])
def test_an_impossible_log_prob(make_group: MakeGroup, reason: Reason, value: float) -> None:
    assert reason(edited(make_group(), logprobs=f32(-1.0, value))) is RefusalReason.BAD_LOGPROBS


@pytest.mark.parametrize("value", [0.0, -0.0, LOGPROB_FLOOR])
def test_log_probs_at_the_edge(make_group: MakeGroup, check: Check, value: float) -> None:
    check(edited(make_group(), logprobs=f32(-1.0, value)))


def test_version_runs_that_do_not_describe_the_tokens(make_group: MakeGroup, reason: Reason) -> None:
    for pairs in ([(5, 1)], [(5, 3)], [(5, 2), (6, 1)], [(6, 1), (5, 1)], [(5, 1), (5, 1)]):
        assert reason(edited(make_group(), version_runs=runs(*pairs)), 7) is RefusalReason.BAD_VERSIONS


def test_a_group_version_that_is_not_its_oldest(make_group: MakeGroup, reason: Reason) -> None:
    older = edited(make_group(), version_runs=runs((4, 2)))
    assert reason(older) is RefusalReason.BAD_VERSIONS
    newer = edited(edited(make_group(), 0, version_runs=runs((6, 2))), 1, version_runs=runs((6, 2)))
    assert reason(newer, 7) is RefusalReason.BAD_VERSIONS


def test_every_completion_is_checked(make_group: MakeGroup, reason: Reason) -> None:
    for index in (0, 1):
        assert reason(edited(make_group(), index, tokens=u32(7, 100))) is RefusalReason.BAD_TOKENS


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_decodes_is_accepted_or_refused_and_nothing_else(
    make_group: MakeGroup, check: Check, data: st.DataObject
) -> None:
    completion = st.builds(
        Completion,
        tokens=st.binary(min_size=4, max_size=24),
        logprobs=st.binary(min_size=4, max_size=24),
        version_runs=st.lists(
            st.builds(VersionRun, version=st.integers(0, 9), count=st.integers(1, 6)), min_size=1, max_size=3
        ),
        finish=st.sampled_from(["stop", "length"]),
    )
    group = make_group(completions=data.draw(st.lists(completion, min_size=2, max_size=2)))
    try:
        check(RolloutGroup.decode(group.encode()))
    except Refused as refused:
        assert refused.reason in RefusalReason
