"""Advantages: how much better a completion did than the others of its group.

    A_i = (R_i − mean of its group) / scale

`scale_rewards` (TRL's name) picks the scale: "group" the group's standard deviation (GRPO), "batch" that of
all rewards of the batch (ScaleRL, arXiv 2510.13786), "none" 1 (Dr. GRPO, arXiv 2503.20783). Standard
deviations are the unbiased ones plus 1e-4, as in TRL. OAPL compares with a value estimate, not the mean.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

SCALE_EPSILON = 1e-4

ScaleRewards = Literal["group", "batch", "none"]


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether a group teaches anything: with equal rewards every advantage is 0."""
    return max(rewards) > min(rewards)


def group_advantages(
    rewards: Sequence[Sequence[float]], scale_rewards: ScaleRewards
) -> list[npt.NDArray[np.float64]]:
    """Advantages per group, in order. Groups without variance get exact zeros, not what rounding gives."""
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    batch_scale = _deviation(np.concatenate(groups)) if scale_rewards == "batch" and groups else 1.0
    result = []
    for group in groups:
        if not is_informative(group.tolist()):
            result.append(np.zeros_like(group))
            continue
        scale = _deviation(group) if scale_rewards == "group" else batch_scale
        result.append((group - group.mean()) / scale)
    return result


def value_advantages(rewards: Sequence[Sequence[float]], beta: float) -> list[npt.NDArray[np.float64]]:
    """R − V per group with V = beta · log mean e^(R / beta): the value of the policy that maximises reward
    minus beta · KL to μ (OAPL, arXiv 2602.19362). V is at least the mean, and the mean for large beta."""
    result = []
    for group in rewards:
        values = np.asarray(group, dtype=np.float64)
        highest = values.max()
        value = highest + beta * np.log(np.mean(np.exp((values - highest) / beta)))
        result.append(values - value if is_informative(group) else np.zeros_like(values))
    return result


def _deviation(values: npt.NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) + SCALE_EPSILON if len(values) > 1 else 1.0
