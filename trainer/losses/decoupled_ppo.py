"""Decoupled PPO: staleness is corrected by a weight, and only what this update moves is clipped.

    loss = sg[min(q/μ, C)] · −min(u · A, clip(u, 1 − epsilon, 1 + epsilon_high) · A),    u = π / q

AReaL (arXiv 2505.24298) equation 5. The weight is the run's importance sampling (`token_truncate` with
C = `importance_sampling_clip_max`), applied by the corrections; here is the clipped part.

q needs no forward pass of its own: A-3PO (arXiv 2512.06547) puts it between μ and π on a log scale,

    log q = log μ + α · (log π − log μ),    α = (d − 1) / d,   0 for d = 0

with d the versions between the token's and the learner's. Then q/μ = E^α and u = E^(1 − α) for E = π/μ: data
d versions old is clipped at (1 ± epsilon)^d in terms of E.
"""

import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio
from trainer.losses.clip import clipped_surrogate


def decoupled_ppo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token, before its weight: u · A where it is not clipped."""
    ratio_BT = log_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT).exp()
    return clipped_surrogate(ratio_BT, tokens, algorithm)


def loglinear_logprobs(logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, lags_BT: Tensor) -> Tensor:
    """log q without gradient; `lags_BT` is each token's d ≥ 0."""
    drift_BT = log_ratio(logprobs_BT.detach(), behavior_logprobs_BT)
    alpha_BT = torch.where(lags_BT > 0, 1.0 - 1.0 / lags_BT.clamp(min=1), 0.0).to(drift_BT.dtype)
    return behavior_logprobs_BT + alpha_BT * drift_BT
