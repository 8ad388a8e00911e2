"""GEPO: a completion's ratio is taken against its whole group's expectation, so that no single small behavior
probability blows it up.

    loss = −c · A,    c = p / sg[Ê_q],    p = exp(mean over tokens of log π)
    Ê_q = Σ_j q_j² / Σ_j q_j over the group,    q_j = exp(mean over tokens of log μ)

Group expectation policy optimization (arXiv 2508.17850), made for rollouts that arrive up to half an hour
late. No clip. As in `gspo` every token carries sg[c] · π/sg[π], which has the value c.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from protocol.algorithm import AlgorithmSpec
from trainer.losses.base import LOG_RATIO_LIMIT, LossTerms, TokenBatch, sequence_mean


def gepo(tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms:
    """Push on log π of a token: c · A."""
    logprobs_BT = tokens.logprobs_BT
    log_coefficient_B1 = (
        sequence_mean(logprobs_BT.detach(), tokens.mask_BT) - tokens.group_log_mean_B[:, None]
    )
    coefficient_B1 = log_coefficient_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    carried_BT = coefficient_B1 * (logprobs_BT - logprobs_BT.detach()).exp()
    return LossTerms(
        loss_BT=-carried_BT * tokens.advantages_B[:, None],
        clipped_BT=torch.zeros_like(logprobs_BT, dtype=torch.bool),
    )


def group_log_mean(behavior_logprobs: Sequence[npt.NDArray[np.float32]]) -> float:
    """log Ê_q of a group from the behavior log-probs of its completions, which are not empty."""
    means = np.asarray([float(np.mean(values, dtype=np.float64)) for values in behavior_logprobs])
    highest = means.max()
    scaled = np.exp(means - highest)
    return float(highest + np.log((scaled**2).sum() / scaled.sum()))
