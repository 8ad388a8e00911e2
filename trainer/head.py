"""Log-probs and entropies of chosen tokens without the logits of all positions: rows pass through in chunks.

For a row with hidden state h, token y and logits z = f(W·h + b) / temperature:

    log p(y) = z_y − log Σ exp(z),    entropy = log Σ exp(z) − Σ exp(z) · z / Σ exp(z)

Only one number per row is kept (log Σ exp z). Backward computes a chunk's logits again and turns them into
d log p(y) / dz = onehot(y) − p in place. Under a frozen layer only d log p(y) / dh is ever needed: it is
computed with the logits. Peak memory is `CHUNK_BYTES` of logits, twice, however many rows there are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.forward import Predictions

CHUNK_BYTES = 64 * 1024 * 1024
"""Of float32 logits held at once. Large enough that reading the weights again for each chunk costs little."""


class UnknownHead(Exception):
    """A model whose logits are not those of a linear layer, scaled and capped."""


@dataclass(frozen=True)
class LogitMap:
    """What a model does to W·h + b: multiply by `scale`, then soften to ±`softcap` by tanh."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@dataclass(frozen=True)
class OutputLayer:
    """A model's last layer, and what the model does to its output."""

    layer: nn.Linear
    logit_map: LogitMap


def output_layer(model: PreTrainedModel) -> OutputLayer:
    """As the model's configuration describes it; whether that is all is for a check to find. Raises
    `UnknownHead`."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise UnknownHead(f"it is a {type(layer).__name__}")
    config = model.config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputLayer(layer, LogitMap(1.0 if scale is None else float(scale), softcap))


def chosen_logprobs(
    found: Predictions, head: OutputLayer, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] of the targets (with gradient) and entropies [M] (without), float32 or wider.

    `dtype` is that of the products: float32, or the 16-bit type that the rest of the model computes in.
    """
    layer = head.layer
    with torch.autocast(found.hidden_MH.device.type, enabled=False):
        logprobs_M, entropy_M = _ChosenLogprobs.apply(
            found.hidden_MH, layer.weight, layer.bias, found.targets_M, head.logit_map, temperature, dtype
        )
    return logprobs_M, entropy_M


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        logit_map: LogitMap,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.is_frozen = not needs_weight and not needs_bias
        ctx.logit_map, ctx.temperature, ctx.dtype = logit_map, temperature, dtype
        weight = weight_VH.to(dtype)
        normalizers, logprobs, entropies, pulls = [], [], [], []
        for rows in _chunks(len(targets_M), len(weight_VH)):
            logits = logit_map.apply_(_logits(hidden_MH[rows].to(dtype), weight, bias_V)).div_(temperature)
            largest = logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, targets_M[rows, None])[:, 0]
            powers = (logits - largest).exp_()
            total = powers.sum(-1)
            normalizer = largest[:, 0] + total.log()
            normalizers.append(normalizer)
            logprobs.append(chosen - normalizer)
            entropies.append(normalizer - torch.linalg.vecdot(powers, logits) / total)
            if ctx.is_frozen and needs_hidden:
                del powers
                unit = torch.ones_like(normalizer)
                pull = _backward_(logits, normalizer, targets_M[rows], unit, logit_map, temperature)
                pulls.append(pull.to(dtype) @ weight)
        if pulls:
            ctx.save_for_backward(torch.cat(pulls))
        elif not ctx.is_frozen:
            ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, torch.cat(normalizers))
        entropy_M = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_M)
        return torch.cat(logprobs), entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_frozen:
            (pull_MH,) = ctx.saved_tensors
            return (pull_MH * grads[0][:, None].to(pull_MH.dtype), *[None] * 6)
        hidden_MH, weight_VH, bias_V, targets_M, normalizer_M = ctx.saved_tensors
        dtype = ctx.dtype
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight = weight_VH.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_MH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for rows in _chunks(len(targets_M), len(weight_VH)):
            hidden = hidden_MH[rows].to(dtype)
            logits = ctx.logit_map.apply_(_logits(hidden, weight, bias_V)).div_(ctx.temperature)
            pull = _backward_(
                logits, normalizer_M[rows], targets_M[rows], grads[0][rows], ctx.logit_map, ctx.temperature
            )
            if grad_bias is not None:
                grad_bias += pull.sum(0)
            narrow = pull.to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = narrow @ weight
            if grad_weight is not None and dtype == wide:
                grad_weight.addmm_(narrow.T, hidden)
            elif grad_weight is not None:
                grad_weight += narrow.T @ hidden
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *[None] * 4,
        )


def _backward_(
    logits: Tensor,
    normalizer: Tensor,
    targets: Tensor,
    gradient: Tensor,
    logit_map: LogitMap,
    temperature: float,
) -> Tensor:
    """From a chunk's logits (over temperature) the gradient with respect to W·h + b, in the same memory."""
    slope = None
    if logit_map.softcap is not None:
        slope = 1.0 - (logits * (temperature / logit_map.softcap)).square_()
    pull = logits.sub_(normalizer[:, None]).exp_()
    # d log p(y) / dz = onehot(y) − p, times the gradient that comes in.
    pull.mul_(-gradient[:, None]).scatter_add_(-1, targets[:, None], gradient[:, None])
    if slope is not None:
        pull.mul_(slope)
    return pull.mul_(logit_map.scale / temperature)


def _logits(hidden: Tensor, weight: Tensor, bias_V: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias_V is None else logits.add_(bias_V)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    """Row ranges of about equal size whose logits fit into `CHUNK_BYTES`."""
    most = max(1, CHUNK_BYTES // (4 * vocabulary))
    count = -(-rows // most)
    return [slice(rows * index // count, rows * (index + 1) // count) for index in range(count)]
