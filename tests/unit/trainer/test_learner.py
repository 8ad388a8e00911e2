"""The learner: one update against an independent derivation, and the promises that hold over many."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.messages import SamplingContract
from tests.unit.trainer.factory import (
    POLICY_ID,
    group_name,
    learner,
    rollout_group,
    run_spec,
    tiny_model,
    training_group,
)
from trainer.checkpoint import load_newest, write_checkpoint
from trainer.groups import BadGroup, TrainingGroup, external_group, local_group
from trainer.learner import Learner, StalenessViolated, TrainingHalted, UpdateAbandoned
from trainer.policy import Policy
from trainer.replay_buffer import Added


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.policy.tensors().items()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def on_policy_group(model_seed: int, number: int, temperature: float = 1.0) -> TrainingGroup:
    """A group whose behavior log-probs are the model's own, computed row by row."""
    model = tiny_model(model_seed)
    group, prompt = rollout_group(number)
    logprobs = []
    for completion in group.completions:
        ids = torch.tensor([[*prompt, *completion.token_array().tolist()]])
        with torch.no_grad():
            distribution = (model(ids).logits[0] / temperature).log_softmax(-1)
        places = range(len(prompt), ids.shape[1])
        logprobs.append(np.float32([distribution[place - 1, ids[0, place]] for place in places]))
    made = local_group(group_name(number), group, prompt, group.rewards)
    return TrainingGroup(**{**vars(made), "behavior_logprobs": tuple(logprobs)})


def test_an_update_is_adamw_on_the_token_mean_of_the_loss() -> None:
    """Derived row by row: CISPO with advantages (R − mean) / (std + 1e-4), mean over tokens of informative
    groups."""
    one = learner()
    groups = [
        training_group(1),
        training_group(2, rewards=[0.0, 1.0, 0.0, 0.0]),
        training_group(3, rewards=[1.0] * 4),
    ]
    reference = tiny_model()
    terms, count = [], 0
    for group in groups[:2]:
        rewards = np.asarray(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        assert group.behavior_logprobs is not None
        for tokens, behavior, advantage in zip(
            group.completions, group.behavior_logprobs, advantages, strict=True
        ):
            ids = torch.tensor([[*group.prompt_ids.tolist(), *tokens.tolist()]])
            distribution = reference(ids).logits[0].log_softmax(-1)
            for place, (token, mu) in enumerate(zip(tokens.tolist(), behavior.tolist(), strict=True)):
                logprob = distribution[len(group.prompt_ids) - 1 + place, token]
                ratio = min(math.exp(logprob.item() - mu), 5.0)
                terms.append(-ratio * advantage * logprob)
                count += 1
    loss = torch.stack(terms).sum() / count
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in reference.parameters() if p.grad is not None))

    one.spec = run_spec(local_groups=3)
    for group in groups:
        assert one.add_group(group) is Added.WAITING
    result = one.update()
    metrics = result.metrics
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens"] == count
    assert metrics["zero_variance_share"] == pytest.approx(1 / 3)
    assert metrics["reward_mean"] == pytest.approx((2 + 1 + 4) / 12)
    scale = min(1.0, 1.0 / norm)
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad * scale  # type: ignore[operator]
        expected = parameter.detach() - 1e-2 * gradient / (gradient.abs() + 1e-8)
        moved = gradient.abs() > 1e-5  # where rounding does not decide the sign
        torch.testing.assert_close(one.policy.tensors()[name][moved], expected[moved], rtol=1e-4, atol=1e-5)


def test_a_group_with_two_survivors_is_trained_on() -> None:
    one = learner(run_spec(local_groups=1))
    one.add_group(training_group(1, rewards=[1.0, 0.0]))
    metrics = one.update().metrics
    assert metrics["tokens"] > 0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_zero_lag_the_ratio_is_one(temperature: float) -> None:
    one = learner(
        run_spec(sampling=SamplingContract(group_size=4, max_new_tokens=8, temperature=temperature))
    )
    for number in range(2):
        one.add_group(on_policy_group(0, number, temperature))
    metrics = one.update().metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["logratio_rms"] < 1e-5
    assert metrics["clip_fraction"] == 0.0
    # On policy the loss is minus the mean of A · log π, and no larger than the largest entropy could make it.
    assert 0 < metrics["entropy"] <= math.log(24)


def test_updates_raise_the_probability_of_what_was_rewarded() -> None:
    one = learner(run_spec(local_groups=1))
    for _ in range(3):
        group = on_policy_group(0, 5)
        one.add_group(
            TrainingGroup(**{**vars(group), "id": group_name(one.version), "oldest_version": one.version})
        )
        one.update()
    group = on_policy_group(0, 5)
    assert group.behavior_logprobs is not None
    gains = []
    for tokens, before in zip(group.completions, group.behavior_logprobs, strict=True):
        ids = [*group.prompt_ids.tolist(), *tokens.tolist()]
        after = one.policy.sequence_logprobs(ids)[len(group.prompt_ids) - 1 :]
        gains.append(sum(after) - float(before.sum()))
    rewarded = [gain for gain, reward in zip(gains, group.rewards, strict=True) if reward == 1.0]
    others = [gain for gain, reward in zip(gains, group.rewards, strict=True) if reward == 0.0]
    assert min(rewarded) > 0 > max(others)


def test_groups_without_variance_are_consumed_and_change_nothing() -> None:
    one = learner()
    before = weights(one)
    for number in range(2):
        one.add_group(training_group(number, rewards=[1.0, 1.0]))
    result = one.update()
    assert result.version == 1 and len(result.consumed) == 2
    assert result.metrics["zero_variance_share"] == 1.0
    assert result.metrics["tokens"] == result.metrics["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert same_weights(before, weights(one))


def test_staleness_is_bounded_counted_and_reported() -> None:
    one = learner(run_spec(max_staleness=1, local_groups=1))
    for number, version in enumerate([0, 0, 0]):
        one.add_group(training_group(number, version=version))
    first = one.update()
    assert (first.staleness, first.dropped) == ({0: 1}, [])
    second = one.update()
    # The third group was generated at 0 and would be two versions behind at version 2.
    assert (second.staleness, second.dropped) == ({1: 1}, [group_name(2)])
    assert not one.ready_for_update()
    assert one.add_group(training_group(3, version=0)) is Added.STALE
    assert one.add_group(training_group(4, version=3)) is Added.STALE
    one.add_group(training_group(5, version=2))
    third = one.update()
    assert (third.consumed, third.dropped) == ([group_name(5)], [group_name(3), group_name(4)])
    assert third.metrics["staleness_max"] == third.metrics["staleness_mean"] == 0.0


def test_a_group_beyond_the_bound_stops_the_learner_even_if_the_buffer_gave_it() -> None:
    one = learner(run_spec(max_staleness=0, local_groups=1))
    one.add_group(training_group(0))
    one.version = 1
    one._buffer.expire = lambda version: None  # type: ignore[method-assign]
    before = weights(one)
    with pytest.raises(StalenessViolated):
        one.update()
    assert same_weights(before, weights(one))


def test_an_update_without_enough_groups_is_refused() -> None:
    one = learner()
    one.add_group(training_group(0))
    assert not one.ready_for_update()
    with pytest.raises(RuntimeError, match="1 local groups wait, an update needs 2"):
        one.update()


def test_a_loss_that_is_not_finite_halts_training_and_keeps_the_last_good_version() -> None:
    one = learner(token_budget=1)
    for number in range(2):
        one.add_group(training_group(number))
    one.update()
    before, optimizer = weights(one), {n: t.clone() for n, t in one.optimizer.tensors().items()}
    for number in range(2, 4):
        one.add_group(training_group(number, version=1))
    forward = one.policy.token_logprobs
    calls = []

    def poisoned(*args: object) -> object:
        calls.append(args)
        result = forward(*args)  # type: ignore[arg-type]
        if len(calls) == 3:
            result.logprobs_BT.data.fill_(float("nan"))
        return result

    one.policy.token_logprobs = poisoned  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingHalted, match="version 1 is the last good one") as caught:
        one.update()
    assert "\n" not in str(caught.value) and "the loss was nan" in str(caught.value)
    assert one.version == 1 and same_weights(before, weights(one))
    assert all(torch.equal(optimizer[name], value) for name, value in one.optimizer.tensors().items())
    assert all(parameter.grad is None for parameter in one.policy.model.parameters())


def test_an_abandoned_update_leaves_everything_as_it_was_and_can_be_done_again() -> None:
    one, other = learner(token_budget=1), learner(token_budget=1)
    for each in (one, other):
        for number in range(2):
            each.add_group(training_group(number))
    before = weights(one)
    answers = iter([False, False, True])
    with pytest.raises(UpdateAbandoned):
        one.update(lambda: next(answers))
    assert one.version == 0 and same_weights(before, weights(one)) and one.ready_for_update()
    assert one.update().consumed == other.update().consumed
    assert same_weights(weights(one), weights(other))


def test_external_groups_are_trained_on_with_ratio_one_and_are_not_waited_for() -> None:
    spec = run_spec(local_groups=1, external_groups=2, max_staleness=0)
    one = learner(spec)
    # Falsified or foreign log-probs of an external group are not looked at.
    for number in (1, 2, 3):
        group, prompt = rollout_group(number, version=77)
        tokens = [[1, 2, 3], [4], [], [5, 6]]
        assert one.add_group(external_group(group_name(number), group, prompt, tokens, group.rewards)) is (
            Added.WAITING
        )
    one.add_group(training_group(0, rewards=[1.0] * 4))
    result = one.update()
    assert len(result.consumed) == 3 and result.consumed[0] == group_name(0)
    assert result.metrics["external_groups"] == 2 and result.metrics["tokens"] == 12
    assert result.metrics["ratio_mean"] == 1.0 and result.metrics["grad_norm"] > 0
    assert result.staleness == {0: 1}
    one.add_group(training_group(4, version=1))
    assert one.update().metrics["external_groups"] == 1


def test_external_groups_get_the_push_of_an_on_policy_group() -> None:
    """The same completions, once as external and once as local with the policy's own log-probs: the same
    step."""
    spec = run_spec(local_groups=1, external_groups=1)
    empty = training_group(9, rewards=[0.0, 0.0])
    local = on_policy_group(0, 1)
    group, prompt = rollout_group(1)
    first, second = learner(spec), learner(run_spec(local_groups=2))
    for one in (first, second):
        one.add_group(empty)
    second.add_group(local)
    first.add_group(external_group(group_name(1), group, prompt, None, group.rewards))
    assert first.update().metrics["grad_norm"] == pytest.approx(
        second.update().metrics["grad_norm"], rel=1e-4
    )


def test_consumed_groups_are_remembered_for_a_bounded_number_of_versions() -> None:
    one = learner(run_spec(local_groups=1))
    for number in range(70):
        one.add_group(training_group(number, version=one.version, rewards=[1.0]))
        one.update()
    assert list(one.consumed) == list(range(7, 71))
    assert one.consumed[70] == [group_name(69)]


def test_a_resumed_learner_equals_one_that_was_never_interrupted(tmp_path: Path) -> None:
    adapting = {"ratio_variance_penalty": 0.04, "ratio_variance_target": 0.1}
    spec = run_spec(external_groups=1, algorithm={"weight_decay": 0.1, "warmup_updates": 3, **adapting})

    def feed(one: Learner) -> None:
        for number in range(2):
            one.add_group(training_group(10 * one.version + number, version=max(0, one.version - 1)))

    def feed_external(one: Learner) -> None:
        for number in range(3):
            group, prompt = rollout_group(1000 + 10 * one.version + number)
            one.add_group(
                external_group(
                    group_name(1000 + 10 * one.version + number), group, prompt, None, group.rewards
                )
            )

    straight = learner(spec)
    for _ in range(2):
        feed(straight)
        straight.update()
    write_checkpoint(tmp_path, straight.checkpoint(), keep=1)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed = Learner(Policy(tiny_model(5)), spec, POLICY_ID, seed=99)
    resumed.restore(checkpoint)
    # A group from before the interruption that arrives again is known.
    assert resumed.add_group(training_group(0, version=1)) is Added.DUPLICATE
    for _ in range(3):
        outcomes = []
        for one in (straight, resumed):
            feed(one)
            feed_external(one)
            result = one.update()
            outcomes.append(
                (result.consumed, {k: v for k, v in result.metrics.items() if k != "update_seconds"})
            )
        assert outcomes[0] == outcomes[1]
    assert same_weights(weights(straight), weights(resumed))
    assert straight.checkpoint().state == resumed.checkpoint().state


@pytest.mark.parametrize(
    ("prompt", "rewards"), [([], [1.0, 0.0, 0.0, 1.0]), ([1], [1.0]), ([1], [1.0, 0.0, float("nan"), 0.0])]
)
def test_a_group_that_does_not_fit_together_is_refused(prompt: list[int], rewards: list[float]) -> None:
    group, _ = rollout_group(0)
    with pytest.raises(BadGroup):
        local_group(group_name(0), group, prompt, rewards)
    with pytest.raises(BadGroup):
        external_group(group_name(0), group, prompt, None, rewards)
