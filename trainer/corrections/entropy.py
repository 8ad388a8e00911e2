"""Learning from forks only: the tokens with the highest entropy carry the loss, the others none.

"Beyond the 80/20 rule" (arXiv 2506.01939); TRL's `top_entropy_quantile`. The threshold is the batch's.
"""

import numpy as np
import numpy.typing as npt


def entropy_floor(entropy_N: npt.NDArray[np.float64], top_quantile: float) -> float:
    """Tokens of at least this entropy carry the loss."""
    return float(np.float32(np.quantile(entropy_N, 1.0 - top_quantile))) if len(entropy_N) else 0.0
