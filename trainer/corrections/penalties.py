"""What is added to the loss of a token: the ratio-variance penalty and the divergence from the base model.

Neither is weighted or masked by other corrections: both pull back, and are needed most where those act.
"""

import math

import torch
from torch import Tensor

from trainer.losses.base import log_ratio, same_value

RATIO_CAP = 10.0
"""π/μ beyond this counts as this: a penalty must not become the explosion that it is there to prevent."""

DUAL_STEP = 0.1
MOST_OVER_TARGET = 10.0


def ratio_variance(logprobs_BT: Tensor, behavior_logprobs_BT: Tensor) -> Tensor:
    """(E − 1)² with E = π/μ, a spring towards E = 1 that never lets go: its push on log π is −2·E·(E − 1).

    R²VPO (arXiv 2601.03320, 2605.26784): maximise E[E · A] subject to E[(E − 1)²] ≤ δ.
    """
    ratio_BT = log_ratio(logprobs_BT.detach(), behavior_logprobs_BT).exp().clamp(max=RATIO_CAP)
    spring_BT = 2.0 * ratio_BT * (ratio_BT - 1.0) * logprobs_BT
    return same_value(spring_BT, (ratio_BT - 1.0) ** 2)


def next_penalty(penalty: float, start: float, measured: float, target: float) -> float:
    """λ after an update whose mean (E − 1)² was `measured`: projected dual ascent on its excess over
    `target`.

    The step, a tenth of the first λ per target exceeded, is reconstructed; R²VPO's was not at hand.
    """
    excess = min(measured / target - 1.0, MOST_OVER_TARGET)
    return max(0.0, penalty + DUAL_STEP * start * excess)


def base_divergence(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, *, corrected: bool
) -> Tensor:
    """KL(π ‖ base) per token by the estimator k3 = e^x − x − 1 with x = log base/π (Schulman 2020).

    `corrected`: times π/μ, which makes its mean right for tokens that μ drew (DeepSeek-V3.2, arXiv
    2512.02556, equation 7; TRL's `use_bias_correction_kl`).
    """
    gap_BT = log_ratio(reference_logprobs_BT, logprobs_BT)
    divergence_BT = gap_BT.exp() - gap_BT - 1.0
    if not corrected:
        return divergence_BT
    weight_BT = log_ratio(logprobs_BT, behavior_logprobs_BT).clamp(max=math.log(RATIO_CAP)).exp()
    return torch.mul(divergence_BT, weight_BT)
