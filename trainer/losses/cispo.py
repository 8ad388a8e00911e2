"""CISPO: policy gradient weighted by a capped, detached ratio. No token ever loses its gradient.

    loss = −sg[min(E, epsilon_high)] · A · log π,    E = π / μ

MiniMax-M1 (arXiv 2506.13585), section 3.1, with the upper cap alone, as ScaleRL (arXiv 2510.13786) uses it.
`epsilon_high` is the cap of E itself, as in TRL (other libraries cap at 1 + epsilon_high).
"""

from torch import Tensor

from protocol.run_spec import AlgorithmSpec
from trainer.losses.base import LossTerms, log_ratio


def cispo(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_B: Tensor, algorithm: AlgorithmSpec
) -> LossTerms:
    """Push on log π of a token: min(E, epsilon_high) · A."""
    ratio_BT = log_ratio(logprobs_BT.detach(), behavior_logprobs_BT).exp()
    weight_BT = ratio_BT.clamp(max=algorithm.epsilon_high)
    return LossTerms(
        loss_BT=-weight_BT * advantages_B[:, None] * logprobs_BT,
        clipped_BT=ratio_BT > algorithm.epsilon_high,
    )
