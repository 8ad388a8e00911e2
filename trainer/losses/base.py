"""What a loss is: one value per token from log-probs, behavior log-probs and advantages. Averaging is the
learner's.

Shapes are in the names: B completions, T completion tokens, padded on the right. π is the policy in training,
μ the behavior policy, E = π/μ the ratio of one token. A loss knows nothing of masks: padded places hold
finite numbers that nobody reads, and every token's value depends on that token and its completion's advantage
alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protocol.run_spec import AlgorithmSpec

LOG_RATIO_LIMIT = 20.0
"""|log E| above this is cut (and carries no gradient): e^20 is far beyond any clip, e^88 overflows float32.
What a stranger reports as behavior log-prob may lie 200 below the truth."""


@dataclass(frozen=True)
class LossTerms:
    """`loss_BT` is to be minimised; `clipped_BT` marks tokens whose ratio the loss cut."""

    loss_BT: Tensor
    clipped_BT: Tensor


class LossFunction(Protocol):
    """`logprobs_BT` carries gradients, the others none; `advantages_B` is one number per completion."""

    def __call__(
        self,
        logprobs_BT: Tensor,
        behavior_logprobs_BT: Tensor,
        advantages_B: Tensor,
        algorithm: AlgorithmSpec,
    ) -> LossTerms: ...


def log_ratio(logprobs_BT: Tensor, behavior_logprobs_BT: Tensor) -> Tensor:
    """log E per token, within ±`LOG_RATIO_LIMIT`."""
    return torch.clamp(logprobs_BT - behavior_logprobs_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
