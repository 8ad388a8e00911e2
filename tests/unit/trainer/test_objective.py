"""The objective inside a learner: exact whatever the cut into micro-batches, and by each token's own age."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from protocol.algorithm import AlgorithmSpec, LossType
from tests.unit.trainer.factory import learner, run_spec, tiny_model, training_group
from trainer.batching import MicroBatch
from trainer.learner import Learner
from trainer.losses import LOSSES
from trainer.metrics import TokenReport
from trainer.objective import evaluate_objective
from trainer.policy import Policy, TokenLogprobs
from trainer.rows import RowTensors

EVERY_OPTION: list[dict[str, Any]] = [
    *({"loss_type": loss_type} for loss_type in LOSSES),
    {"loss_type": "cispo", "aggregation": "prompt", "scale_rewards": "batch"},
    {"importance_sampling_mode": "token_mask", "off_policy_mask_threshold": 0.5},
    {"proximal_policy": "current", "importance_sampling_mode": "sequence_truncate", "ess_lr_scaling": True},
    {"loss_type": "dapo", "sat_quantile": 0.5, "delta": 4.0, "negative_veto_threshold": 0.5},
    {"loss_type": "dapo", "m2_threshold": 0.5},
    {"loss_type": "grpo", "ratio_variance_penalty": 0.04, "ratio_variance_target": 0.1},
    {"loss_type": "gspo", "top_entropy_quantile": 0.5, "importance_sampling_mode": "token_mask"},
    {"beta": 0.1},
]


@pytest.mark.parametrize(
    ("options", "share_prompts"), [*((options, True) for options in EVERY_OPTION), ({}, False)], ids=str
)
def test_micro_batches_do_not_change_the_update(options: dict[str, Any], share_prompts: bool) -> None:
    spec = run_spec(local_groups=4, algorithm=options)
    reference = Policy(tiny_model(5)) if "beta" in options else None
    results = []
    for budget in (100_000, 40, 1):
        one = learner(spec, token_budget=budget, reference=reference)
        one.policy.share_prompts = share_prompts
        one.version = 2
        for number in range(4):
            one.add_group(training_group(number, version=number % 2, spans=2))
        # Gradients before the step: Adam's first step keeps only signs, which rounding may flip near zero.
        gradients: dict[str, torch.Tensor] = {}
        clip = one.optimizer.clip_gradients

        def keep(
            one: Learner = one, gradients: dict[str, torch.Tensor] = gradients, clip: object = clip
        ) -> float:
            gradients |= {
                n: p.grad.clone() for n, p in one.policy.model.named_parameters() if p.grad is not None
            }
            return clip()  # type: ignore[operator,no-any-return]

        one.optimizer.clip_gradients = keep  # type: ignore[method-assign]
        result = one.update()
        ages = {f"{age} {name}": value for age, each in result.by_age.items() for name, value in each.items()}
        results.append((result.metrics | ages, gradients))
    whole, whole_gradients = results[0]
    for metrics, gradients in results[1:]:
        for name in whole.keys() - {"update_seconds"}:
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
        scale = max(float(gradient.abs().max()) for gradient in whole_gradients.values())
        for name, gradient in whole_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6 * max(scale, 1.0))


def test_every_token_is_corrected_by_its_own_age() -> None:
    """Decoupled PPO, row by row: weight E^α and clipped ratio E^(1 − α) with α = (d − 1) / d of the token."""
    one = learner(run_spec(local_groups=1, max_staleness=5, algorithm={"loss_type": "decoupled_ppo"}))
    one.version = 5
    group = training_group(3, version=2, spans=4)
    one.add_group(group)
    rewards = np.asarray(group.rewards)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    terms, ages = [], []
    assert group.behavior_logprobs is not None
    for tokens, behavior, advantage in zip(
        group.completions, group.behavior_logprobs, advantages, strict=True
    ):
        own = one.policy.sequence_logprobs([*group.prompt_ids.tolist(), *tokens.tolist()])
        for place, mu in enumerate(behavior.tolist()):
            drift = own[len(group.prompt_ids) - 1 + place] - mu
            age = [3, 2, 1, 0][min(place, 3)]
            alpha = (age - 1) / age if age else 0.0
            weight, ratio = min(math.exp(alpha * drift), 5.0), math.exp((1 - alpha) * drift)
            clipped = min(max(ratio, 0.8), 1.28)
            terms.append(-weight * min(ratio * advantage, clipped * advantage))
            ages.append(age)
    result = one.update()
    assert result.metrics["loss"] == pytest.approx(np.mean(terms), rel=1e-4)
    counts = {age: figures["tokens"] for age, figures in result.by_age.items()}
    # Ages 3 and 4 share a bucket.
    assert counts == {0: ages.count(0), 1: ages.count(1), 2: ages.count(2), 4: ages.count(3)}
    # The group is as stale as its oldest token.
    assert result.staleness == {3: 1}


def test_the_step_shrinks_with_the_effective_share_of_the_batch() -> None:
    one = learner(run_spec(algorithm={"ess_lr_scaling": True}))
    for number in range(2):
        one.add_group(training_group(number))
    metrics = one.update().metrics
    assert 0 < metrics["ess_ratio"] < 1
    assert metrics["learning_rate"] == pytest.approx(1e-2 * math.sqrt(metrics["ess_ratio"]))


def test_a_divergence_from_the_base_needs_the_base() -> None:
    with pytest.raises(ValueError, match="base model as `reference`"):
        learner(run_spec(algorithm={"beta": 0.1}))


def objective_on(
    ratios: list[list[float]], advantages: list[float], algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, TokenReport]:
    """Minus the gradient at log π [B, T] of completions with these π/μ, and what was reported."""
    count, width = len(ratios), len(ratios[0])
    behavior = torch.full((count, width), -2.0)
    logprobs = (behavior + torch.tensor(ratios).log()).requires_grad_(True)
    batch = MicroBatch(
        prompt_ids_PL=torch.zeros(1, 2, dtype=torch.long),
        prompt_lengths_P=torch.tensor([2]),
        row_prompts_B=torch.zeros(count, dtype=torch.long),
        completion_ids_BT=torch.zeros(count, width, dtype=torch.long),
        mask_BT=torch.ones(count, width),
        behavior_logprobs_BT=behavior,
        own_behavior_B=torch.zeros(count, dtype=torch.bool),
        advantages_B=torch.tensor(advantages),
    )
    rows = RowTensors(
        lags_BT=torch.ones(count, width, dtype=torch.long),
        is_local_B=torch.ones(count, dtype=torch.bool),
        token_share_B=torch.ones(count),
        group_log_mean_B=torch.full((count,), -2.0),
    )
    loss, report = evaluate_objective(
        TokenLogprobs(logprobs, torch.ones(count, width)),
        batch,
        rows,
        algorithm,
        statistics=None,
        variance_penalty=algorithm.ratio_variance_penalty,
        reference_logprobs_BT=None,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return -gradient, report


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "oapl"])
def test_a_masked_token_loses_its_push_and_no_other_token_does(loss_type: LossType) -> None:
    """Also where one ratio stands for a whole completion: the second token of the bad one is vetoed."""
    ratios, advantages = [[1.0, 0.05, 1.0], [1.0, 0.05, 1.0]], [-1.0, 1.0]
    plain, _ = objective_on(ratios, advantages, AlgorithmSpec(loss_type=loss_type))
    guarded, report = objective_on(
        ratios, advantages, AlgorithmSpec(loss_type=loss_type, negative_veto_threshold=0.1)
    )
    assert guarded[0, 1:].tolist() == [0.0, 0.0]
    assert guarded[0, 0] == plain[0, 0] and torch.equal(guarded[1], plain[1])
    assert report.masked_N.tolist() == [0, 1, 1, 0, 0, 0]


def test_penalties_pull_masked_tokens_too() -> None:
    ratios, advantages = [[1.0, 0.05]], [-1.0]
    algorithm = AlgorithmSpec(negative_veto_threshold=0.1, ratio_variance_penalty=0.5)
    pushes, _ = objective_on(ratios, advantages, algorithm)
    assert pushes[0, 1].item() == pytest.approx(-0.5 * 2 * 0.05 * (0.05 - 1))


def test_without_a_weight_the_current_policy_as_proximal_corrects_nothing() -> None:
    pushes, _ = objective_on([[0.2, 3.0]], [1.0], AlgorithmSpec(proximal_policy="current"))
    assert pushes[0].tolist() == pytest.approx([1.0, 1.0])
    weighted = AlgorithmSpec(proximal_policy="current", importance_sampling_mode="token_truncate")
    pushes, _ = objective_on([[0.2, 3.0]], [1.0], weighted)
    assert pushes[0].tolist() == pytest.approx([0.2, 2.0])
