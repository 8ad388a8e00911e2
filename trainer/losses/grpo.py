"""GRPO: PPO's clipped surrogate with group advantages, the ratio taken against the behavior log-probs.

    loss = −min(E · A, clip(E, 1 − epsilon, 1 + epsilon_high) · A),    E = π / μ

PPO (arXiv 1707.06347) equation 7; GRPO (DeepSeekMath, arXiv 2402.03300) equation 3 without its KL term. The
ratio is against μ, not against log-probs recomputed at the start of the update, so that staleness counts as
distance.
"""

import torch
from torch import Tensor

from protocol.run_spec import AlgorithmSpec
from trainer.losses.base import LossTerms, log_ratio


def grpo(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_B: Tensor, algorithm: AlgorithmSpec
) -> LossTerms:
    """Push on log π of a token: E · A, and 0 where A > 0 and E > 1 + epsilon_high, or A < 0 and E < 1 −
    epsilon."""
    low, high = 1.0 - algorithm.epsilon, 1.0 + algorithm.epsilon_high
    ratio_BT = log_ratio(logprobs_BT, behavior_logprobs_BT).exp()
    advantages_B1 = advantages_B[:, None]
    surrogate_BT = torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    clipped_BT = ((advantages_B1 > 0) & (ratio_BT > high)) | ((advantages_B1 < 0) & (ratio_BT < low))
    return LossTerms(loss_BT=-surrogate_BT, clipped_BT=clipped_BT)
