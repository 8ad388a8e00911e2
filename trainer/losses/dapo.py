"""DAPO: GRPO's token loss with a higher upper clip, averaged over all tokens of the batch.

    loss = −min(r · A, clip(r, 1 − epsilon, 1 + epsilon_high) · A),    r = π / q,    epsilon_high > epsilon

DAPO (arXiv 2503.14476) equation 8. Long completions weigh as much as their tokens do. Its dynamic sampling is
the learner's rule that groups with equal rewards take no part in the mean.
"""

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio
from trainer.losses.clip import clipped_surrogate


def dapo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: r · A where it is not clipped."""
    ratio_BT = log_ratio(tokens.logprobs_BT, tokens.old_logprobs_BT).exp()
    return clipped_surrogate(ratio_BT, tokens, algorithm)
