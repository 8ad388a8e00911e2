"""OPSM: a bad completion that the policy would hardly make any more teaches nothing; it is left out.

    masked if A < 0 and mean over tokens of log(μ/π) > threshold

Off-policy sequence mask, DeepSeek-V3.2 (arXiv 2512.02556) equation 9; TRL's `off_policy_mask_threshold`.
"""

from torch import Tensor

from trainer.losses.base import sequence_mean


def opsm_mask(drift_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, threshold: float) -> Tensor:
    """True for completions that stay, [B, 1]. `drift_BT` is log π/μ."""
    return (advantages_B[:, None] >= 0) | (-sequence_mean(drift_BT, mask_BT) <= threshold)
