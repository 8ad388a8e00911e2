"""OAPL: regression of the log-ratio of whole completions on how much better they were than expected. No
ratio multiplies anything, so its variance cannot blow up however old the data is.

    loss = (β₂ · Σ over tokens of log π/μ − (R − V))²,    V = β₁ · log mean over the group of e^(R / β₁)

OAPL (arXiv 2602.19362), β₁ = `oapl_beta1`, β₂ = `oapl_beta2`. The policy that maximises reward minus β · KL
to μ is μ · e^((R − V)/β): with both equal to β its residual is zero. β₂ sets where the push ends, at
Σ log π/μ = (R − V)/β₂: hundreds of nats as shipped, fit for answers of thousands of tokens; for short ones
take about 1 / tokens. R − V takes the place of the advantage. A completion's loss stands on each of its
tokens; their mean (aggregation "sequence") is it again.
"""

import torch

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio, sequence_sum


def oapl(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: 2 · β₂ · (R − V − β₂ · Σ log π/μ), under that mean."""
    drift_BT = log_ratio(tokens.logprobs_BT, tokens.behavior_logprobs_BT)
    fitted_B1 = algorithm.oapl_beta2 * sequence_sum(drift_BT, tokens.mask_BT)
    residual_B1 = fitted_B1 - tokens.advantages_B[:, None]
    return LossTerms(
        loss_BT=(residual_B1**2).expand_as(drift_BT),
        clipped_BT=torch.zeros_like(drift_BT, dtype=torch.bool),
    )
