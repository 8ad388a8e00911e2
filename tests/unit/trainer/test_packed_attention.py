"""Packed attention equals attention with a mask over the whole row, with its gradients, for every kernel."""

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.batching import PromptRows, TrainingRow, collate
from trainer.packed_attention import _PackedAttention
from trainer.packed_kernels import AttentionKernels, CpuFlash, MatrixProducts, kernels_for
from trainer.packing import AttentionLayout, pack

SHAPES = [(5, [4, 4, 2, 1]), (1, [3]), (70, [40, 1]), (3, [1])]
HEADS, KEY_HEADS, SIZE = 6, 2, 8


def layout() -> tuple[AttentionLayout, Tensor]:
    """Of `SHAPES`, and the same as a mask [N, N]: who may see whom."""
    groups = [
        PromptRows(np.zeros(prompt, int), tuple(TrainingRow(np.zeros(n, int), None, 0.0) for n in counts))
        for prompt, counts in SHAPES
    ]
    made = pack(collate(groups)).layout
    # Owners: a prompt's tokens belong to all of its completions, told apart by their own number.
    prompts, rows = [], []
    for index, (prompt, _) in enumerate(SHAPES):
        prompts += [index] * prompt
        rows += [-1] * prompt
    for index, (_, counts) in enumerate(SHAPES):
        for number, count in enumerate(counts):
            prompts += [index] * (count - 1)
            rows += [number] * (count - 1)
    prompt, row = torch.tensor(prompts), torch.tensor(rows)
    same_row = (row[:, None] == row) | (row == -1)
    return made, ((prompt[:, None] == prompt) & same_row).tril()


@pytest.mark.parametrize("kernels", [CpuFlash(), MatrixProducts()])
def test_packed_attention_is_masked_attention(kernels: AttentionKernels) -> None:
    made, mask = layout()
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(heads, len(mask), SIZE, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, value, gradient = random(HEADS), random(KEY_HEADS), random(KEY_HEADS), random(HEADS).detach()
    repeats = HEADS // KEY_HEADS
    scores = query @ key.repeat_interleave(repeats, 0).transpose(-1, -2) * 0.3
    scores = scores.masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1) @ value.repeat_interleave(repeats, 0)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), gradient)

    actual = _PackedAttention.apply(query, key, value, made, 0.3, kernels)
    gradients = torch.autograd.grad(actual, (query, key, value), gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernels", [CpuFlash(), MatrixProducts()])
def test_16_bit_attention_is_near(kernels: AttentionKernels) -> None:
    made, mask = layout()
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(HEADS, len(mask), SIZE, generator=generator) for _ in range(4)]
    *inputs, gradient = (tensor.bfloat16() for tensor in wide)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = _PackedAttention.apply(*tensors, made, 0.3, kernels)
        assert out.dtype == dtype
        results.append((out, *torch.autograd.grad(out, tensors, gradient.to(dtype))))
    for exact, rough in zip(*results, strict=True):
        assert float((rough.float() - exact).detach().abs().max()) < 0.05 * float(exact.detach().abs().max())


def test_kernels_by_device_and_type() -> None:
    assert isinstance(kernels_for(torch.device("cpu"), torch.float32), CpuFlash)
    assert type(kernels_for(torch.device("cuda"), torch.bfloat16)).__name__ == "CudaFlash"
    assert isinstance(kernels_for(torch.device("cuda"), torch.float32), MatrixProducts)
