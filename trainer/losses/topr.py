"""TOPR: what was good is imitated wherever it came from; what was bad is pushed away only as far as the
policy would still do it.

    loss = −w · A · log π,    w = 1 if A ≥ 0, else sg[min(1, Π over tokens of π/μ)]

Tapered off-policy REINFORCE (arXiv 2503.14286) equation 8, with the taper [0, 1] for negative and none for
positive completions. The product, not a mean: a completion that the policy has left behind has weight 0.
"""

import torch

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio, sequence_sum


def topr(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: w · A."""
    drift_BT = log_ratio(tokens.logprobs_BT.detach(), tokens.behavior_logprobs_BT)
    log_product_B1 = sequence_sum(drift_BT, tokens.mask_BT)
    advantages_B1 = tokens.advantages_B[:, None]
    negative_B1 = advantages_B1 < 0
    weight_B1 = torch.where(negative_B1, log_product_B1.clamp(max=0.0).exp(), 1.0)
    return LossTerms(
        loss_BT=-weight_B1 * advantages_B1 * tokens.logprobs_BT,
        clipped_BT=(negative_B1 & (log_product_B1 > 0)).expand_as(tokens.logprobs_BT),
    )
