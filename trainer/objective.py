"""The objective of a run on one micro-batch: its loss, corrected, penalised and averaged as the run says.

    loss = Σ tokens share · (weight · loss(token) + λ · (π/μ − 1)² + beta · KL(π ‖ base))

`weight` is the product of the corrections' weights and masks and carries no gradient; `share` is the token's
part of the batch's mean, masked tokens counted. Thresholds that belong to the whole batch come in as
`BatchStatistics`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec
from trainer.batching import MicroBatch
from trainer.corrections.entropy import entropy_floor
from trainer.corrections.importance import importance_weight
from trainer.corrections.m2po import m2_cutoff, m2_mask
from trainer.corrections.opsm import opsm_mask
from trainer.corrections.penalties import base_divergence, ratio_variance
from trainer.corrections.sat import sat_bounds, sat_radius
from trainer.corrections.veto import veto_mask
from trainer.losses import LOSSES, TokenBatch
from trainer.losses.base import log_ratio, sequence_sum
from trainer.losses.decoupled_ppo import loglinear_logprobs
from trainer.metrics import TokenReport
from trainer.policy import TokenLogprobs
from trainer.rows import RowTensors


@dataclass(frozen=True)
class TokenSample:
    """Tokens of one micro-batch: N all of them, M those with a behavior log-prob."""

    entropy_N: npt.NDArray[np.float64]
    drift_M: npt.NDArray[np.float64]
    advantages_M: npt.NDArray[np.float64]


@dataclass(frozen=True)
class BatchStatistics:
    """Thresholds that hold for every token of a batch."""

    sat_radius: float
    m2_cutoff: float
    entropy_floor: float


def needs_statistics(algorithm: AlgorithmSpec) -> bool:
    """Whether the log-probs of the whole batch must be known before any gradient is."""
    return (
        algorithm.sat_quantile is not None
        or algorithm.m2_threshold is not None
        or algorithm.top_entropy_quantile < 1
    )


def sample_of(current: TokenLogprobs, batch: MicroBatch) -> TokenSample:
    """What one micro-batch adds to the batch's thresholds."""
    tokens_BT = batch.mask_BT.bool()
    foreign_BT = tokens_BT & ~batch.own_behavior_B[:, None]
    drift_BT = log_ratio(current.logprobs_BT.detach(), batch.behavior_logprobs_BT)
    advantages_BT = batch.advantages_B[:, None].expand_as(drift_BT)
    return TokenSample(
        entropy_N=_numbers(current.entropy_BT[tokens_BT]),
        drift_M=_numbers(drift_BT[foreign_BT]),
        advantages_M=_numbers(advantages_BT[foreign_BT]),
    )


def statistics_of(samples: list[TokenSample], algorithm: AlgorithmSpec) -> BatchStatistics:
    """The thresholds of a batch from all its micro-batches, in any order."""
    drift = np.concatenate([sample.drift_M for sample in samples])
    advantages = np.concatenate([sample.advantages_M for sample in samples])
    entropies = np.concatenate([sample.entropy_N for sample in samples])
    quantile, threshold = algorithm.sat_quantile, algorithm.m2_threshold
    return BatchStatistics(
        sat_radius=float("inf") if quantile is None else sat_radius(drift, quantile),
        m2_cutoff=float("inf") if threshold is None else m2_cutoff(drift, advantages, threshold),
        entropy_floor=(
            entropy_floor(entropies, algorithm.top_entropy_quantile)
            if algorithm.top_entropy_quantile < 1
            else 0.0
        ),
    )


def evaluate_objective(
    current: TokenLogprobs,
    batch: MicroBatch,
    rows: RowTensors,
    algorithm: AlgorithmSpec,
    *,
    statistics: BatchStatistics | None,
    variance_penalty: float,
    reference_logprobs_BT: Tensor | None,
) -> tuple[Tensor, TokenReport]:
    """A micro-batch's part of the batch's loss, with its gradient, and what to report of its tokens.

    A row without behavior log-probs counts as drawn from π: its ratio is 1 and carries π's gradient.
    """
    logprobs_BT, mask_BT = current.logprobs_BT, batch.mask_BT
    fixed_BT = logprobs_BT.detach()
    behavior_BT = torch.where(batch.own_behavior_B[:, None], fixed_BT, batch.behavior_logprobs_BT)
    drift_BT = log_ratio(fixed_BT, behavior_BT)
    old_BT = proximal_logprobs(fixed_BT, behavior_BT, rows.lags_BT, algorithm)
    low_BT, high_BT = _clip_bounds(drift_BT, algorithm, statistics)
    terms = LOSSES[algorithm.loss_type](
        TokenBatch(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_BT,
            behavior_logprobs_BT=behavior_BT,
            advantages_B=batch.advantages_B,
            mask_BT=mask_BT,
            clip_low_BT=low_BT,
            clip_high_BT=high_BT,
            group_log_mean_B=rows.group_log_mean_B,
        ),
        algorithm,
    )
    weight_BT = torch.ones_like(fixed_BT)
    if algorithm.weight_mode is not None:
        weight_BT = weight_BT * importance_weight(fixed_BT, old_BT, behavior_BT, mask_BT, algorithm)
    weight_BT = weight_BT * _keep(drift_BT, current.entropy_BT, batch, algorithm, statistics)

    value_BT = weight_BT * terms.loss_BT
    if variance_penalty:
        value_BT = value_BT + variance_penalty * ratio_variance(logprobs_BT, behavior_BT)
    base_kl_BT = torch.zeros_like(fixed_BT)
    if reference_logprobs_BT is not None:
        divergence_BT = base_divergence(
            logprobs_BT, behavior_BT, reference_logprobs_BT, corrected=algorithm.use_bias_correction_kl
        )
        value_BT = value_BT + algorithm.beta * divergence_BT
        base_kl_BT = divergence_BT.detach()
    loss = (value_BT * mask_BT * rows.token_share_B[:, None]).sum()
    return loss, _report(current, batch, rows, drift_BT, terms.clipped_BT, weight_BT == 0, base_kl_BT)


def proximal_logprobs(
    logprobs_BT: Tensor, behavior_BT: Tensor, lags_BT: Tensor, algorithm: AlgorithmSpec
) -> Tensor:
    """log q, without gradient: what the loss's ratio is taken against."""
    if algorithm.proximal_policy == "behavior":
        return behavior_BT
    if algorithm.proximal_policy == "current":
        return logprobs_BT
    return loglinear_logprobs(logprobs_BT, behavior_BT, lags_BT)


def _clip_bounds(
    drift_BT: Tensor, algorithm: AlgorithmSpec, statistics: BatchStatistics | None
) -> tuple[Tensor, Tensor]:
    epsilon, epsilon_high = algorithm.epsilon, algorithm.epsilon_high
    if algorithm.sat_quantile is not None and statistics is not None:
        return sat_bounds(drift_BT, statistics.sat_radius, algorithm.sat_exponent, epsilon, epsilon_high)
    return torch.full_like(drift_BT, 1.0 - epsilon), torch.full_like(drift_BT, 1.0 + epsilon_high)


def _keep(
    drift_BT: Tensor,
    entropy_BT: Tensor,
    batch: MicroBatch,
    algorithm: AlgorithmSpec,
    statistics: BatchStatistics | None,
) -> Tensor:
    """False for tokens that a correction masks."""
    keep_BT = torch.ones_like(drift_BT, dtype=torch.bool)
    advantages_B, mask_BT = batch.advantages_B, batch.mask_BT
    if algorithm.m2_threshold is not None and statistics is not None:
        keep_BT &= m2_mask(drift_BT, advantages_B, statistics.m2_cutoff)
    if algorithm.off_policy_mask_threshold is not None:
        keep_BT &= opsm_mask(drift_BT, advantages_B, mask_BT, algorithm.off_policy_mask_threshold)
    if algorithm.negative_veto_threshold is not None:
        keep_BT &= veto_mask(drift_BT, advantages_B, mask_BT, algorithm.negative_veto_threshold)
    if algorithm.top_entropy_quantile < 1 and statistics is not None:
        keep_BT &= entropy_BT >= statistics.entropy_floor
    return keep_BT


def _report(
    current: TokenLogprobs,
    batch: MicroBatch,
    rows: RowTensors,
    drift_BT: Tensor,
    clipped_BT: Tensor,
    masked_BT: Tensor,
    base_kl_BT: Tensor,
) -> TokenReport:
    tokens_BT = batch.mask_BT.bool()
    # One row of numbers per quantity, so that one copy from the device brings them all.
    values = torch.stack(
        [
            current.entropy_BT[tokens_BT],
            drift_BT[tokens_BT],
            clipped_BT[tokens_BT].to(drift_BT.dtype),
            masked_BT[tokens_BT].to(drift_BT.dtype),
            base_kl_BT[tokens_BT],
        ]
    )
    entropy_N, drift_N, clipped_N, masked_N, base_kl_N = _numbers(values)
    is_local_BT = rows.is_local_B[:, None].expand_as(tokens_BT)
    return TokenReport(
        lags_N=rows.lags_BT[tokens_BT].cpu().numpy(),
        is_local_N=is_local_BT[tokens_BT].cpu().numpy(),
        entropy_N=entropy_N,
        log_ratio_N=drift_N,
        clipped_N=clipped_N,
        masked_N=masked_N,
        base_kl_N=base_kl_N,
        row_lags_B=rows.lags_BT.max(-1).values.cpu().numpy(),
        row_is_local_B=rows.is_local_B.cpu().numpy(),
        row_log_ratio_B=_numbers(sequence_sum(drift_BT, batch.mask_BT).squeeze(-1)),
    )


def _numbers(values: Tensor) -> npt.NDArray[np.float64]:
    numbers: npt.NDArray[np.float64] = values.detach().cpu().double().numpy()
    return numbers
