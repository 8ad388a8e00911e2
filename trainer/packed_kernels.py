"""The kernels behind packed attention: outputs, log-denominators and gradients, per kind of device."""

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from trainer.packing import AttentionLayout

Gradients = tuple[Tensor, Tensor, Tensor]


class AttentionKernels(Protocol):
    """Queries [heads, N, size], keys and values [fewer heads, N, size], log-denominators [heads, N]."""

    def within_segments(
        self, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs and log-denominators of every segment's causal attention to itself."""
        ...

    def add_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> None:
        """Merge the completions' attention to their prompts into `out` and `lse`, in place."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> Gradients:
        """Gradients of queries, keys and values, from the merged `out` and `lse`."""
        ...


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another part into `out` [..., size] and `lse` [...], in place."""
    both = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - both).exp()[..., None], (other_lse - both).exp()[..., None]
    out.copy_(out * weight + other_out * other_weight)
    lse.copy_(both)


class PerPiece:
    """Piece by piece with a kernel for one rectangle: `_part` and `_part_backward` on [batch, heads, tokens,
    size]."""

    def within_segments(
        self, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(
            query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device
        )
        for segment in layout.segments:
            where = segment.start, segment.length, segment.count
            part_out, part_lse = self._part(
                _pieces(query, *where), _pieces(key, *where), _pieces(value, *where), True, scale
            )
            _pieces(out, *where).copy_(part_out)
            _pieces(lse[..., None], *where).copy_(part_lse[..., None])
        return out, lse

    def add_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> None:
        for each in layout.shared:
            if each.first == each.last:
                continue
            rows, prompt = slice(each.first, each.last), slice(each.prompt_first, each.prompt_last)
            part_out, part_lse = self._part(
                query[None, :, rows], key[None, :, prompt], value[None, :, prompt], False, scale
            )
            merge(out[:, rows], lse[:, rows], part_out[0], part_lse[0])

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> Gradients:
        gradients = tuple(_empty_like(x) for x in (query, key, value))
        for segment in layout.segments:
            where = segment.start, segment.length, segment.count
            parts = self._part_backward(
                _pieces(grad_out, *where),
                _pieces(query, *where),
                _pieces(key, *where),
                _pieces(value, *where),
                _pieces(out, *where),
                _pieces(lse[..., None], *where)[..., 0],
                True,
                scale,
            )
            for whole, part in zip(gradients, parts, strict=True):
                _pieces(whole, *where).copy_(part)
        for each in layout.shared:
            if each.first == each.last:
                continue
            rows, prompt = slice(each.first, each.last), slice(each.prompt_first, each.prompt_last)
            parts = self._part_backward(
                grad_out[None, :, rows],
                query[None, :, rows],
                key[None, :, prompt],
                value[None, :, prompt],
                out[None, :, rows],
                lse[None, :, rows],
                False,
                scale,
            )
            for whole, part, place in zip(gradients, parts, (rows, prompt, prompt), strict=True):
                whole[:, place] += part[0]
        return gradients[0], gradients[1], gradients[2]

    def _part(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _part_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        raise NotImplementedError


def _empty_like(tensor: Tensor) -> Tensor:
    """[heads, N, size] over memory in the order [N, heads, size], which the layers around attention use."""
    heads, count, size = tensor.shape
    return torch.empty(count, heads, size, dtype=tensor.dtype, device=tensor.device).transpose(0, 1)


def _pieces(tensor: Tensor, start: int, length: int, count: int) -> Tensor:
    """[heads, N, size] as a view [count, heads, length, size] of `count` neighbouring pieces."""
    return tensor[:, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)


class CpuFlash(PerPiece):
    """PyTorch's own flash attention for CPUs; it shares keys between the heads of a group by itself."""

    def _part(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse

    def _part_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        gradients: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return gradients


class MatrixProducts(PerPiece):
    """Scores as a matrix: exact anywhere, in memory quadratic in a piece's length."""

    def _part(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, causal, scale)
        lse = scores.logsumexp(-1)
        repeats = query.shape[1] // value.shape[1]
        probabilities = (scores - lse[..., None]).exp()
        return probabilities.to(value.dtype) @ value.repeat_interleave(repeats, 1), lse

    def _part_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        repeats = query.shape[1] // key.shape[1]
        probabilities = (self._scores(query, key, causal, scale) - lse[..., None]).exp()
        grad_value = probabilities.transpose(-1, -2).to(grad_out.dtype) @ grad_out
        grad_probabilities = (grad_out @ value.repeat_interleave(repeats, 1).transpose(-1, -2)).to(lse.dtype)
        shift = (grad_out * out).sum(-1, keepdim=True, dtype=lse.dtype)
        grad_scores = (probabilities * (grad_probabilities - shift) * scale).to(query.dtype)
        grad_query = grad_scores @ key.repeat_interleave(repeats, 1)
        grad_key = grad_scores.transpose(-1, -2) @ query
        return grad_query, _sum_heads(grad_key, repeats), _sum_heads(grad_value, repeats)

    @staticmethod
    def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        scores = (query @ key.repeat_interleave(repeats, 1).transpose(-1, -2)) * scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores


def _sum_heads(gradient: Tensor, repeats: int) -> Tensor:
    return gradient.unflatten(1, (-1, repeats)).sum(2)


class CudaFlash:
    """PyTorch's variable-length flash attention: two calls for a whole row. For 16-bit types only."""

    def within_segments(
        self, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        starts, longest = _segment_starts(layout, query.device)
        out, lse = self._forward(query, key, value, starts, starts, longest, longest, True, scale)
        return out.transpose(0, 1), lse

    def add_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> None:
        prompts, at = _prompt_starts(layout, query.device), layout.prompt_tokens
        if query.shape[1] == at:
            return  # completions of one token each
        part_out, part_lse = self._forward(query[:, at:], key[:, :at], value[:, :at], *prompts, False, scale)
        merge(out[:, at:], lse[:, at:], part_out.transpose(0, 1), part_lse)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: AttentionLayout,
        scale: float,
    ) -> Gradients:
        starts, longest = _segment_starts(layout, query.device)
        gradients = self._backward(
            grad_out, query, key, value, out, lse, starts, starts, longest, longest, True, scale
        )
        prompts, at = _prompt_starts(layout, query.device), layout.prompt_tokens
        if query.shape[1] > at:
            parts = self._backward(
                grad_out[:, at:],
                query[:, at:],
                key[:, :at],
                value[:, :at],
                out[:, at:],
                lse[:, at:],
                *prompts,
                False,
                scale,
            )
            for whole, part, place in zip(
                gradients, parts, (slice(at, None), slice(at), slice(at)), strict=True
            ):
                whole[:, place] += part
        return gradients

    @staticmethod
    def _forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: int,
        longest_key: int,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, key_starts, longest, longest_key, 0.0, causal, False, scale=scale
        )
        return out, lse

    @staticmethod
    def _backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: int,
        longest_key: int,
        causal: bool,
        scale: float,
    ) -> Gradients:
        g, q, k, v, o = (x.transpose(0, 1).contiguous() for x in (grad_out, query, key, value, out))
        # No dropout, so no random state is read.
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            g, q, k, v, o, lse.contiguous(), starts, key_starts, longest, longest_key, 0.0, causal,
            random_state, unused, scale=scale,
        )  # fmt: skip
        grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in grads)
        return grad_query, grad_key, grad_value


@lru_cache(maxsize=4)
def _segment_starts(layout: AttentionLayout, device: torch.device) -> tuple[Tensor, int]:
    """Cumulative lengths of all segments, int32, and the longest. Asked for once per layer, so remembered."""
    lengths = [segment.length for segment in layout.segments for _ in range(segment.count)]
    return _cumulative(lengths, device), max(lengths)


@lru_cache(maxsize=4)
def _prompt_starts(layout: AttentionLayout, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths of groups of completions and of their prompts, and the longest of each."""
    rows = [each.last - each.first for each in layout.shared]
    prompts = [each.prompt_last - each.prompt_first for each in layout.shared]
    return _cumulative(rows, device), _cumulative(prompts, device), max(rows), max(prompts)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def kernels_for(device: torch.device, dtype: torch.dtype) -> AttentionKernels:
    """The fastest kernels that this device has for this type."""
    if device.type == "cpu":
        return CpuFlash()
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return CudaFlash()
    return MatrixProducts()


__all__ = ["AttentionKernels", "CpuFlash", "CudaFlash", "MatrixProducts", "kernels_for", "merge"]
