"""SAT: the clip range shrinks for tokens that have drifted most, on the side they drift towards.

    d = log π/μ,    q = quantile of |d| over the batch's tokens (at least `LEAST_RADIUS`)
    c = 1 if |d| ≤ q, else 1 / (1 + ((|d| − q) / q)^exponent)
    low  = 1 − epsilon · c  where d < 0        high = 1 + epsilon_high · c  where d > 0

Staleness-adaptive trust region (arXiv 2607.18722). The kernel is a reconstruction: its text was not at hand,
a Hill function with exponent 2 is reported; this form is continuous at the gate. The least radius keeps an
almost on-policy batch from gating its rounding noise.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST_RADIUS = 0.01


def sat_radius(drift_N: npt.NDArray[np.float64], quantile: float) -> float:
    """q, from every token of the batch that has a behavior log-prob."""
    return max(LEAST_RADIUS, float(np.quantile(np.abs(drift_N), quantile))) if len(drift_N) else LEAST_RADIUS


def sat_bounds(
    drift_BT: Tensor, radius: float, exponent: float, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """(low, high) of each token's clip. Never wider than [1 − epsilon, 1 + epsilon_high]."""
    beyond_BT = ((drift_BT.abs() - radius) / radius).clamp(min=0.0)
    contraction_BT = 1.0 / (1.0 + beyond_BT**exponent)
    low_BT = 1.0 - epsilon * torch.where(drift_BT < 0, contraction_BT, 1.0)
    high_BT = 1.0 + epsilon_high * torch.where(drift_BT > 0, contraction_BT, 1.0)
    return low_BT, high_BT
