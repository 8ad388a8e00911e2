"""GSPO: one ratio per completion, the geometric mean of its tokens' ratios, clipped as a whole.

    loss = −min(s · A, clip(s, 1 − epsilon, 1 + epsilon_high) · A),    s = exp(mean over tokens of log π/q)

GSPO (arXiv 2507.18071) equations 5 and 7, in its token form (equation 13): every token carries
s_t = sg[s] · π/sg[π], which has the value s. Loss and gradient of a completion are those of the plain form,
and a correction that masks a token takes away that token's gradient and no other.
"""

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio, sequence_mean
from trainer.losses.clip import clipped_surrogate


def gspo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: s · A where the completion is not clipped."""
    logprobs_BT = tokens.logprobs_BT
    drift_BT = log_ratio(logprobs_BT.detach(), tokens.old_logprobs_BT)
    ratio_B1 = sequence_mean(drift_BT, tokens.mask_BT).exp()
    return clipped_surrogate(ratio_B1 * (logprobs_BT - logprobs_BT.detach()).exp(), tokens, algorithm)
