"""What a loss is: one value per token from log-probs, a ratio's old log-probs and advantages.

Shapes are in the names: B completions, T completion tokens, padded on the right. π is the policy in training,
μ the behavior policy, q the proximal policy. A loss reads a `TokenBatch` and knows nothing of weights, masks
of corrections or averaging: those are the learner's. Padded places hold finite numbers that nobody reads.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec

LOG_RATIO_LIMIT = 20.0
"""|log ratio| above this is cut (and carries no gradient): e^20 is far beyond any clip, e^88 overflows
float32. What a stranger reports as behavior log-prob may lie 200 below the truth."""


@dataclass(frozen=True)
class TokenBatch:
    """B completions of up to T tokens. `logprobs_BT` carries gradients, nothing else does."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    """log q: what the loss's ratio is taken against. log μ unless the run has a proximal policy."""
    behavior_logprobs_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor
    """1.0 for tokens, 0.0 for padding."""
    clip_low_BT: Tensor
    """Bounds of the clipped ratio, for losses that clip; a correction may have narrowed them."""
    clip_high_BT: Tensor
    group_log_mean_B: Tensor
    """`gepo` only: log Ê_q of each completion's group."""


@dataclass(frozen=True)
class LossTerms:
    """`loss_BT` is to be minimised; `clipped_BT` marks tokens whose ratio the loss cut."""

    loss_BT: Tensor
    clipped_BT: Tensor


class LossFunction(Protocol):
    """A loss by the name that a run gives it (`loss_type`)."""

    def __call__(self, tokens: TokenBatch, algorithm: AlgorithmSpec) -> LossTerms: ...


def log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """log π/q per token, within ±`LOG_RATIO_LIMIT`."""
    return torch.clamp(logprobs_BT - old_logprobs_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over each completion's tokens, [B, 1]."""
    return (values_BT * mask_BT).sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1.0)


def sequence_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over each completion's tokens, [B, 1]."""
    return (values_BT * mask_BT).sum(-1, keepdim=True)


def same_value(surrogate_BT: Tensor, value_BT: Tensor) -> Tensor:
    """`value_BT` with the gradient of `surrogate_BT`."""
    return surrogate_BT - surrogate_BT.detach() + value_BT.detach()
