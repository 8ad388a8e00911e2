"""Negative suffix veto: once a bad completion has left what the policy would do, its rest teaches nothing.

    for A < 0, with t the first token whose π/μ is below the threshold: tokens t and later are masked

μ-GRPO (arXiv 2605.17570): under staleness, collapses come from the tokens after such a place. Reconstructed:
accounts differ on whether a ratio above or below the threshold triggers; below is "left the policy's
support".
"""

import math

from torch import Tensor


def veto_mask(drift_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, threshold: float) -> Tensor:
    """True for tokens that stay. `drift_BT` is log π/μ."""
    triggers_BT = (drift_BT < math.log(threshold)) & (mask_BT > 0)
    return (advantages_B[:, None] >= 0) | (triggers_BT.long().cumsum(-1) == 0)
