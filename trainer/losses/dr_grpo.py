"""Dr. GRPO: GRPO's token loss without its two biases: no division by the completion's length, none by the
standard deviation of the group's rewards.

    loss of a batch = Σ tokens −min(r · A, clip(r, 1 − epsilon, 1 + epsilon_high) · A) / (completions · L)

"Understanding R1-Zero-like training" (arXiv 2503.20783) section 3.2. L is the run's `max_new_tokens`, a
constant (aggregation "constant"); A = R − group mean (`scale_rewards` "none" unless the run says otherwise).
"""

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio
from trainer.losses.clip import clipped_surrogate


def dr_grpo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: r · A where it is not clipped."""
    ratio_BT = log_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT).exp()
    return clipped_surrogate(ratio_BT, tokens, algorithm)
