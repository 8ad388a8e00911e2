"""Attention of a packed row: completions see their prompt and themselves; nothing is padded or repeated.

A completion's attention is made of two parts, to its prompt (everything) and to itself (causal). Each part
gives an output and the log of its softmax's denominator, from which the whole follows:

    out = Σ_part out_part · exp(lse_part − lse),    lse = log Σ_part exp(lse_part)

Backward, a flash-attention kernel recomputes its part's probabilities as exp(score − lse). Given the whole's
`lse` and `out` instead of the part's it yields the part's share of the true gradients, and shares add up
(the algebra of ring attention, arXiv 2310.01889, section 3).

Kernels: PyTorch's flash attention for CPUs, its variable-length flash attention for 16-bit types on CUDA, and
plain matrix products for everything else.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.packed_kernels import AttentionKernels, kernels_for
from trainer.packing import AttentionLayout

IMPLEMENTATION = "packed_or_sdpa"
"""The name under which transformers knows this attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some models add to attention and this one does not have."""


class _PackedAttention(torch.autograd.Function):
    """[heads, N, size] in, [heads, N, size] out; keys and values may have fewer heads (grouped queries)."""

    @staticmethod
    def forward(
        ctx: Any,
        query_HND: Tensor,
        key_KND: Tensor,
        value_KND: Tensor,
        layout: AttentionLayout,
        scale: float,
        kernels: AttentionKernels,
    ) -> Tensor:
        out, lse = kernels.within_segments(query_HND, key_KND, value_KND, layout, scale)
        kernels.add_prompts(query_HND, key_KND, value_KND, out, lse, layout, scale)
        ctx.save_for_backward(query_HND, key_KND, value_KND, out, lse)
        ctx.layout, ctx.scale, ctx.kernels = layout, scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gradients = ctx.kernels.backward(grads[0], query, key, value, out, lse, ctx.layout, ctx.scale)
        return (*gradients, None, None, None)


def packed_attention(
    query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, layout: AttentionLayout, scale: float
) -> Tensor:
    """Attention outputs [heads, N, size] of a packed row, with gradients."""
    kernels = kernels_for(query_HND.device, query_HND.dtype)
    return cast(Tensor, _PackedAttention.apply(query_HND, key_KND, value_KND, layout, scale, kernels))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: packed when the model was called with `packed_layout`, else SDPA.

    Raises `NotImplementedError` for what this attention does not have.
    """
    if packed_layout is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    asked = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if asked or dropout:
        raise NotImplementedError(f"packed attention has no {', '.join(asked) or 'dropout'}")
    # Rotary embeddings may have made queries and keys float32 again under autocast.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_HND = packed_attention(query[0].to(dtype), key[0].to(dtype), value[0].to(dtype), packed_layout, scale)
    return out_HND.transpose(0, 1)[None], None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
