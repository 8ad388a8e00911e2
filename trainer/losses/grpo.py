"""GRPO: the clipped surrogate of token ratios with group advantages; a batch's loss is the mean of its
completions' means.

    loss = −min(r · A, clip(r, 1 − epsilon, 1 + epsilon_high) · A),    r = π / q

DeepSeekMath (arXiv 2402.03300) equation 3 without its KL term, which is a correction here (`beta`). q is μ
unless the run has a proximal policy, so that staleness counts as distance.
"""

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio
from trainer.losses.clip import clipped_surrogate
from trainer.losses.gspo import gspo


def grpo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: r · A where it is not clipped. With `importance_sampling_level` "sequence" it
    is `gspo`, as in TRL."""
    if algorithm.importance_sampling_level == "sequence":
        return gspo(tokens, algorithm)
    ratio_BT = log_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT).exp()
    return clipped_surrogate(ratio_BT, tokens, algorithm)
