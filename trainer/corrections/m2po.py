"""M2PO: mask the few tokens that make the second moment of the batch's log-ratios large, and clip nothing.

Of the tokens that still move away from μ (A > 0 and π > μ, or A < 0 and π < μ) those with the largest
(log π/μ)² are masked until the mean of the others' is at most `m2_threshold`.

Second-moment trust policy optimization (arXiv 2510.01161), algorithm 1. The loss is averaged over all tokens,
masked ones included. The threshold is for the whole batch, so the cutoff is found before any gradient is.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor


def m2_cutoff(
    drift_N: npt.NDArray[np.float64], advantages_N: npt.NDArray[np.float64], threshold: float
) -> float:
    """The smallest (log π/μ)² that is masked; infinite when none is. Equal tokens share one fate."""
    moving_N = drift_N * advantages_N > 0
    # Squared in float32, as `m2_mask` does, so that both draw the line at the same token.
    squares = np.sort(drift_N[moving_N].astype(np.float32) ** 2)
    kept_means = np.cumsum(squares, dtype=np.float64) / np.arange(1, len(squares) + 1)
    # Ascending squares have ascending means: the kept ones are those up to the last mean within bounds.
    kept = int(np.searchsorted(kept_means, threshold, side="right"))
    return float(squares[kept]) if kept < len(squares) else float("inf")


def m2_mask(drift_BT: Tensor, advantages_B: Tensor, cutoff: float) -> Tensor:
    """True for tokens that stay."""
    moving_BT = drift_BT.sign() * advantages_B.sign()[:, None] > 0
    return ~moving_BT | (drift_BT.float() ** 2 < cutoff)
