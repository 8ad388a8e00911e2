"""CISPO: policy gradient weighted by a capped, detached ratio. No token ever loses its gradient.

    loss = −sg[min(r, epsilon_high)] · A · log π,    r = π / q

MiniMax-M1 (arXiv 2506.13585), section 3.1, with the upper cap alone and averaged over all tokens of the
batch, as ScaleRL (arXiv 2510.13786) uses it. `epsilon_high` is the cap of r itself, as in TRL (other
libraries cap at 1 + epsilon_high).
"""

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LossTerms, TokenBatch, log_ratio


def cispo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: min(r, epsilon_high) · A."""
    ratio_BT = log_ratio(tokens.logprobs_BT.detach(), tokens.old_logprobs_BT).exp()
    weight_BT = ratio_BT.clamp(max=algorithm.epsilon_high)
    return LossTerms(
        loss_BT=-weight_BT * tokens.advantages_B[:, None] * tokens.logprobs_BT,
        clipped_BT=ratio_BT > algorithm.epsilon_high,
    )
