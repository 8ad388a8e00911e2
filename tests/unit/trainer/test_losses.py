"""Exact pushes on log π of every loss, from an independent table of numbers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocol.algorithm import AlgorithmSpec, LossType
from trainer.losses import LOSSES, LossTerms, TokenBatch
from trainer.losses.base import LOG_RATIO_LIMIT
from trainer.losses.decoupled_ppo import loglinear_logprobs
from trainer.losses.gepo import group_log_mean

RATIOS = [0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 8.0]
PPO = ([0.2, 0.5, 0.9, 1.0, 1.1, 0.0, 0.0, 0.0], [0.0, 0.0, -0.9, -1.0, -1.1, -1.5, -3.0, -8.0])
PPO_CLIPPED = ([False] * 5 + [True] * 3, [True] * 2 + [False] * 6)

# Of each ratio: the push g on log π, d(loss)/d(log π) = −g, for A = +1 and A = −1.
PUSHES: dict[str, tuple[list[float], list[float]]] = {
    "cispo": (
        [0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 5.0],
        [-0.2, -0.5, -0.9, -1.0, -1.1, -1.5, -3.0, -5.0],
    ),
    "grpo": PPO,
    "dapo": PPO,
    "dr_grpo": PPO,
    "decoupled_ppo": PPO,
    "two-sided": (PPO[0], [*PPO[1][:-1], 0.0]),
    "gspo": PPO,
    "topr": ([1.0] * 8, [-0.2, -0.5, -0.9, -1.0, -1.0, -1.0, -1.0, -1.0]),
}
ALGORITHMS: dict[str, AlgorithmSpec] = {
    "cispo": AlgorithmSpec(loss_type="cispo"),
    "grpo": AlgorithmSpec(loss_type="grpo"),
    "dapo": AlgorithmSpec(loss_type="dapo", epsilon_high=0.2),
    "dr_grpo": AlgorithmSpec(loss_type="dr_grpo"),
    "decoupled_ppo": AlgorithmSpec(loss_type="decoupled_ppo", epsilon_high=0.2),
    "two-sided": AlgorithmSpec(loss_type="grpo", delta=4.0),
    "gspo": AlgorithmSpec(loss_type="gspo", epsilon=0.2, epsilon_high=0.2),
    "topr": AlgorithmSpec(loss_type="topr"),
}
CLIPPED: dict[str, tuple[list[bool], list[bool]]] = {
    "cispo": ([False] * 7 + [True], [False] * 7 + [True]),
    "two-sided": (PPO_CLIPPED[0], [*PPO_CLIPPED[1][:-1], True]),
    "topr": ([False] * 8, [False] * 4 + [True] * 4),
}


def token_batch(
    ratios_BT: list[list[float]],
    advantages: list[float],
    algorithm: AlgorithmSpec,
    mask: list[list[float]] | None = None,
    **changes: Any,
) -> TokenBatch:
    """Tokens whose π/μ are these, μ being e^−2; `logprobs_BT` wants gradients."""
    ratios = torch.tensor(ratios_BT, dtype=torch.float64)
    behavior = torch.full_like(ratios, -2.0)
    logprobs = (behavior + ratios.log()).requires_grad_(True)
    return replace(
        TokenBatch(
            logprobs_BT=logprobs,
            old_logprobs_BT=behavior,
            behavior_logprobs_BT=behavior,
            advantages_B=torch.tensor(advantages, dtype=torch.float64),
            mask_BT=torch.ones_like(ratios) if mask is None else torch.tensor(mask, dtype=torch.float64),
            clip_low_BT=torch.full_like(ratios, 1.0 - algorithm.epsilon),
            clip_high_BT=torch.full_like(ratios, 1.0 + algorithm.epsilon_high),
            group_log_mean_B=torch.zeros(len(ratios_BT), dtype=torch.float64),
        ),
        **changes,
    )


def evaluated(tokens: TokenBatch, algorithm: AlgorithmSpec) -> tuple[LossTerms, torch.Tensor]:
    """The terms, and minus the gradient of their masked sum over each completion's mean share: [B, T]."""
    terms = LOSSES[algorithm.loss_type](tokens, algorithm)
    (gradient,) = torch.autograd.grad((terms.loss_BT * tokens.mask_BT).sum(), tokens.logprobs_BT)
    return terms, -gradient


def one_token_rows(name: str, ratios: list[float], advantage: float) -> tuple[LossTerms, torch.Tensor]:
    """Each ratio a completion of one token, so that losses of completions have a table too."""
    algorithm = ALGORITHMS[name]
    return evaluated(
        token_batch([[ratio] for ratio in ratios], [advantage] * len(ratios), algorithm), algorithm
    )


@pytest.mark.parametrize("name", PUSHES)
def test_the_push_on_every_token_is_the_published_one(name: str) -> None:
    for advantage, expected, marks in zip(
        (1.0, -1.0), PUSHES[name], CLIPPED.get(name, PPO_CLIPPED), strict=True
    ):
        terms, pushes = one_token_rows(name, RATIOS, advantage)
        assert pushes.squeeze(-1).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert terms.clipped_BT.squeeze(-1).tolist() == marks


@pytest.mark.parametrize("name", PUSHES)
def test_at_zero_lag_the_push_is_the_advantage(name: str) -> None:
    algorithm = ALGORITHMS[name]
    terms, pushes = evaluated(token_batch([[1.0, 1.0]] * 3, [0.7, -1.3, 0.0], algorithm), algorithm)
    torch.testing.assert_close(pushes.float(), torch.tensor([[0.7, 0.7], [-1.3, -1.3], [0.0, 0.0]]))
    assert not terms.clipped_BT.any()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_falsified_behavior_logprob_gives_finite_losses(loss_type: LossType) -> None:
    algorithm = AlgorithmSpec(loss_type=loss_type)
    ratios = [math.exp(150.0), math.exp(-150.0)]
    _, pushes = evaluated(token_batch([ratios] * 2, [1.0, -1.0], algorithm), algorithm)
    assert torch.isfinite(pushes).all()
    assert float(pushes.abs().max()) <= 2 * math.exp(LOG_RATIO_LIMIT)


def test_clipped_values_are_those_of_the_surrogate() -> None:
    algorithm = AlgorithmSpec(loss_type="grpo")
    terms, _ = evaluated(token_batch([[0.5, 1.0, 1.5]] * 2, [2.0, -2.0], algorithm), algorithm)
    # −min(r·A, clip(r, 0.8, 1.2)·A)
    assert terms.loss_BT.tolist()[0] == pytest.approx([-1.0, -2.0, -2.4])
    assert terms.loss_BT.tolist()[1] == pytest.approx([1.6, 2.0, 3.0])


def test_dapo_clips_later_above_than_below() -> None:
    algorithm = AlgorithmSpec(loss_type="dapo")
    terms, pushes = evaluated(token_batch([[1.27, 1.29, 0.79]] * 2, [1.0, -1.0], algorithm), algorithm)
    assert pushes.tolist() == [pytest.approx([1.27, 0.0, 0.79]), pytest.approx([-1.27, -1.29, 0.0])]
    assert terms.clipped_BT.tolist() == [[False, True, False], [False, False, True]]


def test_gspo_has_one_ratio_per_completion_the_geometric_mean() -> None:
    """Ratios 0.5 and 8 have the mean 2, which is clipped at 1.2 for A > 0 only; padding is not counted."""
    algorithm = AlgorithmSpec(loss_type="gspo", epsilon=0.2, epsilon_high=0.2)
    tokens = token_batch(
        [[0.5, 8.0, 99.0], [0.5, 8.0, 99.0], [0.9, 1.21, 1.0]],
        [1.0, -1.0, 1.0],
        algorithm,
        mask=[[1, 1, 0], [1, 1, 0], [1, 1, 0]],
    )
    terms, pushes = evaluated(tokens, algorithm)
    third = math.sqrt(0.9 * 1.21)
    assert terms.loss_BT[:, 0].tolist() == pytest.approx([-1.2, 2.0, -third])
    assert pushes[:, :2].tolist() == [[0.0, 0.0], pytest.approx([-2.0, -2.0]), pytest.approx([third, third])]
    # Averaged over the completion, that is the gradient of the plain form −s·A.
    plain = (tokens.logprobs_BT - tokens.old_logprobs_BT)[2, :2].mean().exp()
    (gradient,) = torch.autograd.grad(plain, tokens.logprobs_BT)
    torch.testing.assert_close(gradient[2, :2], pushes[2, :2] / 2)


def test_grpo_at_the_sequence_level_is_gspo() -> None:
    level = AlgorithmSpec(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.2)
    named = AlgorithmSpec(loss_type="gspo", epsilon=0.2, epsilon_high=0.2)
    ratios = [[0.5, 8.0], [0.9, 1.2]]
    one, other = (evaluated(token_batch(ratios, [1.0, -1.0], each), each) for each in (level, named))
    assert torch.equal(one[0].loss_BT, other[0].loss_BT) and torch.equal(one[1], other[1])


def test_topr_tapers_bad_completions_by_the_product_of_their_ratios() -> None:
    algorithm = AlgorithmSpec(loss_type="topr")
    tokens = token_batch(
        [[0.5, 0.5, 7.0], [0.5, 3.0, 7.0], [0.5, 0.5, 7.0]],
        [-2.0, -2.0, 2.0],
        algorithm,
        mask=[[1, 1, 0]] * 3,
    )
    _, pushes = evaluated(tokens, algorithm)
    assert pushes[:, :2].tolist() == [
        pytest.approx([-0.5, -0.5]),  # 2 · (0.5 · 0.5)
        pytest.approx([-2.0, -2.0]),  # 0.5 · 3 is cut to 1
        pytest.approx([2.0, 2.0]),
    ]


def test_gepo_takes_the_groups_expectation_as_denominator() -> None:
    """Four completions with mean log μ −.40 −.55 −.90 −.35 and mean log π .05 −.02 .30 −.10 above."""
    behavior = np.float32([-0.40, -0.55, -0.90, -0.35])
    current = [-0.35, -0.57, -0.60, -0.45]
    log_mean = group_log_mean([np.full(3, value, np.float32) for value in behavior])
    assert log_mean == pytest.approx(-0.4906, abs=5e-5)
    algorithm = AlgorithmSpec(loss_type="gepo")
    means = torch.tensor(current, dtype=torch.float64)[:, None].expand(4, 2)
    tokens = token_batch(
        [[1.0, 1.0]] * 4,
        [1.0, -1.0, 1.0, 1.0],
        algorithm,
        logprobs_BT=(means + torch.tensor([0.1, -0.1])).requires_grad_(True),
        group_log_mean_B=torch.full((4,), log_mean, dtype=torch.float64),
    )
    terms, pushes = evaluated(tokens, algorithm)
    coefficients = [1.151, -0.924, 0.896, 1.041]
    assert (-terms.loss_BT[:, 0]).tolist() == pytest.approx(coefficients, abs=6e-4)
    assert pushes[:, 0].tolist() == pytest.approx(coefficients, abs=6e-4)
    assert torch.equal(pushes[:, 0], pushes[:, 1])


@pytest.mark.parametrize("lag", [0, 1, 2, 5, 100])
def test_the_proximal_policy_splits_the_ratio_into_weight_and_clip(lag: int) -> None:
    """log μ −1.3 and log π −1.1: at d = 5 the weight is 1.1735 and the clipped ratio 1.0408."""
    logprobs, behavior = torch.tensor([[-1.1]]), torch.tensor([[-1.3]])
    old = loglinear_logprobs(logprobs, behavior, torch.tensor([[lag]]))
    alpha = 0.0 if lag == 0 else (lag - 1) / lag
    weight, clipped = (old - behavior).exp().item(), (logprobs - old).exp().item()
    assert weight == pytest.approx(math.exp(0.2 * alpha), rel=1e-6)
    assert weight * clipped == pytest.approx(math.exp(0.2), rel=1e-6)
    if lag == 5:
        assert (weight, clipped) == (pytest.approx(1.1735, abs=5e-5), pytest.approx(1.0408, abs=5e-5))


def test_oapl_is_the_squared_residual_of_the_completions_log_ratio() -> None:
    algorithm = AlgorithmSpec(loss_type="oapl", oapl_beta1=1.0, oapl_beta2=0.5)
    tokens = token_batch(
        [[2.0, 0.5, 2.0], [1.0, 1.0, 1.0]], [0.3, -0.2], algorithm, mask=[[1, 1, 1], [1, 1, 0]]
    )
    terms, pushes = evaluated(tokens, algorithm)
    residual = 0.5 * math.log(2.0) - 0.3
    assert terms.loss_BT.tolist() == [pytest.approx([residual**2] * 3), pytest.approx([0.04] * 3)]
    # Under the completion's mean: a third of three equal gradients, a half of two.
    assert (pushes[0] / 3).tolist() == pytest.approx([-2 * residual * 0.5] * 3)
    assert (pushes[1, :2] / 2).tolist() == pytest.approx([2 * 0.5 * -0.2] * 2)


def test_oapl_is_content_with_the_best_policy_within_reach() -> None:
    """Three answers with rewards 1, .2, −.5: the policy that maximises reward − β·KL is μ·e^((R − V)/β)."""
    beta = 0.7
    rewards, behavior = torch.tensor([1.0, 0.2, -0.5]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    value = beta * (behavior * (rewards / beta).exp()).sum().log()
    best = behavior * ((rewards - value) / beta).exp()
    assert float(best.sum()) == pytest.approx(1.0)
    algorithm = AlgorithmSpec(loss_type="oapl", oapl_beta1=beta, oapl_beta2=beta)
    tokens = token_batch(
        [[1.0]] * 3,
        [0.0] * 3,
        algorithm,
        logprobs_BT=best.log()[:, None].requires_grad_(True),
        behavior_logprobs_BT=behavior.log()[:, None],
        advantages_B=rewards - value,
    )
    terms, pushes = evaluated(tokens, algorithm)
    assert float(terms.loss_BT.detach().abs().max()) < 1e-24 and float(pushes.abs().max()) < 1e-12
