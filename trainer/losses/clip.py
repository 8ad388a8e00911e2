"""PPO's clipped surrogate, which several losses share.

    loss = −min(min(r, delta) · A, clip(r, low, high) · A)

PPO (arXiv 1707.06347) equation 7. `delta` is two-sided clipping (INTELLECT-2, arXiv 2505.07291): it ends the
push on a token with A < 0 whose probability has grown beyond delta times; without it that push is unbounded.
"""

import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch


def clipped_surrogate(ratio_BT: Tensor, tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """The push of a token is A times the gradient of its ratio; it is 0 where A > 0 and r > high, where A < 0
    and r < low, and where A < 0 and r > delta. Bounds are those of `tokens`."""
    low_BT, high_BT = tokens.clip_low_BT, tokens.clip_high_BT
    advantages_B1 = tokens.advantages_B[:, None]
    bounded_BT = ratio_BT if algorithm.delta is None else ratio_BT.clamp(max=algorithm.delta)
    surrogate_BT = torch.minimum(
        bounded_BT * advantages_B1, torch.clamp(ratio_BT, low_BT, high_BT) * advantages_B1
    )
    positive_B1, negative_B1 = advantages_B1 > 0, advantages_B1 < 0
    clipped_BT = (positive_B1 & (ratio_BT > high_BT)) | (negative_B1 & (ratio_BT < low_BT))
    if algorithm.delta is not None:
        clipped_BT = clipped_BT | (negative_B1 & (ratio_BT > algorithm.delta))
    return LossTerms(loss_BT=-surrogate_BT, clipped_BT=clipped_BT)
