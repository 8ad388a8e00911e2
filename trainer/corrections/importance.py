"""Importance sampling against the behavior policy: truncated weights (TIS) and masks (IcePop, MIS).

With B = q/μ of a token, or its product over a completion, and bounds from the run:

    *_truncate   sg[clip(B, clip_min, clip_max)]
    *_mask       sg[B] inside [clip_min, clip_max], 0 outside

Truncated importance sampling: Yao et al. 2025, LlamaRL (arXiv 2505.24034); token masks: IcePop (arXiv
2510.18855); both levels are TRL's `vllm_importance_sampling_mode`. Where q is μ, so that the loss's own ratio
is π/μ, only masks are allowed: they read π/μ and weight nothing. A product over a long completion leaves any
fixed band by its length alone: take the token level for long answers.
"""

import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LOG_RATIO_LIMIT, log_ratio, sequence_sum


def importance_weight(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    mask_BT: Tensor,
    algorithm: AlgorithmSpec,
) -> Tensor:
    """The factor of each token's loss: [B, T], or [B, 1] at the sequence level. Nothing carries gradients."""
    reads_whole_ratio = algorithm.proximal_policy == "behavior"
    log_weight_BT = log_ratio(logprobs_BT if reads_whole_ratio else old_logprobs_BT, behavior_logprobs_BT)
    if algorithm.importance_sampling_mode.startswith("sequence"):
        log_weight_BT = sequence_sum(log_weight_BT, mask_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight_BT = log_weight_BT.exp()
    low, high = algorithm.importance_sampling_clip_min, algorithm.importance_sampling_clip_max
    if algorithm.weight_mode == "truncate":
        return weight_BT.clamp(low, high)
    inside_BT = torch.ones_like(weight_BT, dtype=torch.bool)
    if low is not None:
        inside_BT &= weight_BT >= low
    if high is not None:
        inside_BT &= weight_BT <= high
    return inside_BT.to(weight_BT.dtype) if reads_whole_ratio else weight_BT * inside_BT
