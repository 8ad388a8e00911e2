"""Corrections: exact values, what each must leave alone, and that nothing happens to data that is fresh."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.algorithm import AlgorithmSpec
from trainer.corrections.entropy import entropy_floor
from trainer.corrections.importance import importance_weight
from trainer.corrections.m2po import m2_cutoff, m2_mask
from trainer.corrections.opsm import opsm_mask
from trainer.corrections.penalties import (
    RATIO_CAP,
    base_divergence,
    next_penalty,
    ratio_variance,
)
from trainer.corrections.sat import LEAST_RADIUS, sat_bounds, sat_radius
from trainer.corrections.veto import veto_mask

RATIOS = [0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 8.0]


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([ratios], dtype=torch.float64).log()


def weights(algorithm: AlgorithmSpec, current: torch.Tensor, old: torch.Tensor) -> list[float]:
    """Weights of one completion; `current` is log π/μ and `old` log q/μ."""
    zeros = torch.zeros_like(current)
    return importance_weight(current, old, zeros, torch.ones_like(current), algorithm)[0].tolist()


# Importance sampling


def test_icepop_keeps_tokens_inside_its_band_and_weights_none_where_the_loss_has_the_ratio() -> None:
    algorithm = AlgorithmSpec(importance_sampling_mode="token_mask")
    current = logs(*RATIOS)
    assert weights(algorithm, current, torch.zeros_like(current)) == [0, 1, 1, 1, 1, 1, 1, 0]


def test_masks_weight_by_the_ratio_that_the_loss_does_not_have() -> None:
    algorithm = AlgorithmSpec(proximal_policy="current", importance_sampling_mode="token_mask")
    current = logs(*RATIOS)
    assert weights(algorithm, current, current) == pytest.approx([0, 0.5, 0.9, 1, 1.1, 1.5, 3, 0])


def test_truncation_cuts_the_weight_and_keeps_the_token() -> None:
    algorithm = AlgorithmSpec(proximal_policy="current", importance_sampling_mode="token_truncate")
    current = logs(*RATIOS)
    assert weights(algorithm, current, current) == pytest.approx([0.2, 0.5, 0.9, 1, 1.1, 1.5, 2, 2])


def test_the_weight_is_of_the_part_that_the_loss_does_not_clip() -> None:
    algorithm = AlgorithmSpec(loss_type="decoupled_ppo")
    assert weights(algorithm, logs(8.0, 99.0), logs(2.0, 6.0)) == pytest.approx([2.0, 5.0])


def test_at_the_sequence_level_the_product_counts_and_padding_does_not() -> None:
    algorithm = AlgorithmSpec(proximal_policy="current", importance_sampling_mode="sequence_truncate")
    current = torch.cat([logs(2.0, 3.0, 50.0), logs(3.0, 4.0, 50.0)])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 0]]).double()
    weight = importance_weight(current, current, torch.zeros_like(current), mask, algorithm)
    assert weight.tolist() == [[pytest.approx(6.0)], [8.0]]
    masked = AlgorithmSpec(importance_sampling_mode="sequence_mask")
    weight = importance_weight(current, current, torch.zeros_like(current), mask, masked)
    assert weight.tolist() == [[0.0], [0.0]]


# SAT


def test_sat_narrows_only_the_side_that_a_token_drifts_to() -> None:
    """d = ±2q: c = 1 / (1 + 1²) = 1/2; d = 3q: 1/5; inside the radius nothing happens."""
    radius = 0.1
    drift = torch.tensor([[0.05, 0.1, 0.2, -0.2, 0.3]], dtype=torch.float64)
    low, high = sat_bounds(drift, radius, 2.0, 0.2, 0.28)
    assert low[0].tolist() == pytest.approx([0.8, 0.8, 0.8, 0.9, 0.8])
    assert high[0].tolist() == pytest.approx([1.28, 1.28, 1.14, 1.28, 1 + 0.28 / 5])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50), st.floats(0.01, 2))
def test_sat_never_widens_a_clip(values: list[float], radius: float) -> None:
    low, high = sat_bounds(torch.tensor([values], dtype=torch.float64), radius, 2.0, 0.2, 0.2)
    assert (low >= 0.8).all() and (low <= 1.0).all() and (high >= 1.0).all() and (high <= 1.2).all()


def test_sat_gates_the_outer_tenth_of_a_batch_but_not_its_rounding_noise() -> None:
    drift = np.linspace(-1.0, 1.0, 2001)
    assert sat_radius(drift, 0.9) == pytest.approx(0.9)
    assert sat_radius(drift * 1e-6, 0.9) == LEAST_RADIUS
    assert sat_radius(np.array([]), 0.9) == LEAST_RADIUS


# M2PO


def brute_force(drift: np.ndarray, advantages: np.ndarray, threshold: float) -> np.ndarray:
    keep = np.ones(len(drift), dtype=bool)
    moving = np.flatnonzero(((advantages > 0) & (drift > 0)) | ((advantages < 0) & (drift < 0)))
    left = sorted(moving.tolist(), key=lambda index: -(drift[index] ** 2))
    while left and np.mean(drift[left] ** 2) > threshold:
        keep[left.pop(0)] = False
    return keep


@pytest.mark.parametrize("seed", range(4))
def test_m2po_masks_what_a_loop_over_the_largest_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drift = rng.normal(0, 0.15, 4000).astype(np.float32)
    drift[:40] *= 12
    advantages = rng.choice([-1.0, 1.0], 4000)
    cutoff = m2_cutoff(drift.astype(np.float64), advantages, 0.04)
    kept = m2_mask(torch.tensor(drift)[:, None], torch.tensor(advantages), cutoff)[:, 0].numpy()
    expected = brute_force(drift, advantages, 0.04)
    assert not expected.all() and (kept == expected).all()
    shuffled = rng.permutation(4000)
    assert m2_cutoff(drift[shuffled].astype(np.float64), advantages[shuffled], 0.04) == cutoff


def test_m2po_masks_nothing_within_bounds_and_equal_tokens_together() -> None:
    ones = np.ones(4)
    assert m2_cutoff(np.full(4, 0.1), ones, 0.04) == math.inf
    # All moving away from μ by the same: no subset of them has a smaller mean.
    cutoff = m2_cutoff(np.full(4, 1.0), ones, 0.04)
    assert not m2_mask(torch.ones(4, 1), torch.ones(4), cutoff).any()
    # Coming back to μ, however far away: not touched.
    assert m2_cutoff(np.full(4, -9.0), ones, 0.04) == math.inf
    assert m2_mask(torch.full((4, 1), -9.0), torch.ones(4), 0.01).all()
    assert m2_cutoff(np.array([]), np.array([]), 0.04) == math.inf


# Guards for what was bad


def test_opsm_drops_bad_completions_that_the_policy_left_behind() -> None:
    mask = torch.tensor([[1.0, 1, 0]] * 4).double()
    drift = torch.tensor([[-0.6, -0.6, 0.0], [-0.6, -0.6, 0.0], [-0.6, -0.2, 0.0], [0.9, 0.9, 0.0]]).double()
    kept = opsm_mask(drift, torch.tensor([-1.0, 1.0, -1.0, -1.0]), mask, 0.5)
    assert kept[:, 0].tolist() == [False, True, True, True]


def test_opsm_with_recomputed_log_probs_would_never_act() -> None:
    """If μ were the policy's own log-probs the mask would be all ones: a way to see that they are μ's."""
    assert opsm_mask(torch.zeros(3, 2), torch.full((3,), -1.0), torch.ones(3, 2), 1e-9).all()


def test_the_veto_ends_a_bad_completion_where_it_left_the_policy() -> None:
    drift = torch.cat([logs(1.0, 0.05, 1.0, 2.0), logs(1.0, 0.05, 1.0, 2.0), logs(0.2, 9.0, 0.2, 0.01)])
    mask = torch.ones(3, 4)
    mask[2, 3] = 0.0  # Padding triggers nothing.
    kept = veto_mask(drift, torch.tensor([-1.0, 1.0, -1.0]), mask, 0.1)
    assert kept.tolist() == [[True, False, False, False], [True] * 4, [True] * 4]


def test_the_entropy_floor_leaves_the_wanted_share() -> None:
    entropies = np.arange(1.0, 101.0)
    assert (entropies >= entropy_floor(entropies, 0.2)).sum() == 20
    assert entropy_floor(np.array([]), 0.2) == 0.0


# Penalties


def test_the_ratio_variance_penalty_is_a_spring_of_the_published_stiffness() -> None:
    """λ = .04: what it takes off a push r · A of A = +1."""
    logprobs = logs(*RATIOS).requires_grad_(True)
    value = ratio_variance(logprobs, torch.zeros_like(logprobs))
    assert value[0].tolist() == pytest.approx([(ratio - 1) ** 2 for ratio in RATIOS])
    (gradient,) = torch.autograd.grad(0.04 * value.sum(), logprobs)
    published = [0.213, 0.52, 0.907, 1.0, 1.091, 1.44, 2.52, 3.52]
    pushes = [ratio - float(pull) for ratio, pull in zip(RATIOS, gradient[0], strict=True)]
    assert pushes == pytest.approx(published, abs=6e-4)


def test_a_falsified_ratio_cannot_make_the_penalty_explode() -> None:
    logprobs = torch.tensor([[150.0]], dtype=torch.float64, requires_grad=True)
    value = ratio_variance(logprobs, torch.zeros_like(logprobs))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert float(gradient) == pytest.approx(2 * RATIO_CAP * (RATIO_CAP - 1))
    assert float(value.detach()) == pytest.approx((RATIO_CAP - 1) ** 2)


def test_the_penalty_rises_above_its_target_and_falls_below() -> None:
    assert next_penalty(0.04, 0.04, measured=0.2, target=0.1) == pytest.approx(0.044)
    assert next_penalty(0.04, 0.04, measured=0.05, target=0.1) == pytest.approx(0.038)
    assert next_penalty(0.04, 0.04, measured=1e9, target=0.1) == pytest.approx(0.08)
    assert next_penalty(0.001, 0.04, measured=0.0, target=0.1) == 0.0


def test_the_divergence_from_the_base_is_k3_and_is_right_in_the_mean() -> None:
    """Three answers: the mean of k3 over those that π draws is KL(π ‖ base); over those that μ draws it is so
    with the bias correction, and its gradient is KL's."""
    policy, base, behavior = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3])
    )
    divergence = float((policy * (policy / base).log()).sum())
    logits = policy.log().requires_grad_(True)
    logprobs = logits.log_softmax(0)
    plain = base_divergence(logprobs, logprobs.detach(), base.log(), corrected=False)
    assert float((policy * plain).sum().detach()) == pytest.approx(divergence)
    corrected = base_divergence(logprobs, behavior.log(), base.log(), corrected=True)
    mean = (behavior * corrected).sum()
    assert float(mean.detach()) == pytest.approx(divergence)
    (gradient,) = torch.autograd.grad(mean, logits)
    (expected,) = torch.autograd.grad(
        (logits.softmax(0) * (logits.log_softmax(0) - base.log())).sum(), logits
    )
    torch.testing.assert_close(gradient, expected)


def test_at_zero_drift_no_correction_does_anything() -> None:
    drift, mask, advantages = torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, -1.0])
    for mode in ("token_mask", "sequence_mask", "token_truncate", "sequence_truncate"):
        algorithm = AlgorithmSpec(proximal_policy="current", importance_sampling_mode=mode)  # type: ignore[arg-type]
        assert (importance_weight(drift, drift, drift, mask, algorithm) == 1).all()
    low, high = sat_bounds(drift, sat_radius(drift.double().numpy().ravel(), 0.9), 2.0, 0.2, 0.2)
    assert (low == 0.8).all() and (high == 1.2).all()
    assert m2_mask(drift, advantages, m2_cutoff(np.zeros(6), np.repeat([1.0, -1.0], 3), 0.04)).all()
    assert opsm_mask(drift, advantages, mask, 1e-6).all() and veto_mask(drift, advantages, mask, 0.99).all()
    assert (ratio_variance(drift, drift) == 0).all()
    assert (base_divergence(drift, drift, drift, corrected=True) == 0).all()
