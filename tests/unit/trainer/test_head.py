"""Log-probs in chunks: those of the whole logits, with their gradients, in a fraction of the memory."""

import pytest
import torch
from torch import Tensor, nn

import trainer.head
from trainer.forward import Predictions
from trainer.head import LogitMap, OutputLayer, chosen_logprobs

ROWS, SIZE, VOCABULARY = 11, 6, 40


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Predictions, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(ROWS, SIZE, dtype=dtype).requires_grad_()
    found = Predictions(hidden, torch.randint(VOCABULARY, (ROWS,)), torch.arange(ROWS))
    return found, layer


def definition(
    found: Predictions, layer: nn.Linear, logit_map: LogitMap, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = layer(found.hidden_MH) * logit_map.scale
    if logit_map.softcap is not None:
        logits = torch.tanh(logits / logit_map.softcap) * logit_map.softcap
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, found.targets_M[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.25), LogitMap(2.0, 1.5)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_give_the_logprobs_entropies_and_gradients_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, bias: bool, logit_map: LogitMap, temperature: float
) -> None:
    monkeypatch.setattr(trainer.head, "CHUNK_BYTES", rows_at_once * 4 * VOCABULARY)
    found, layer = inputs(bias)
    weights = torch.randn(ROWS, dtype=torch.float64)
    parameters = [found.hidden_MH, *layer.parameters()]
    expected, expected_entropy = definition(found, layer, logit_map, temperature)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    logprobs, entropy = chosen_logprobs(found, OutputLayer(layer, logit_map), temperature, torch.float64)
    gradients = torch.autograd.grad((logprobs * weights).sum(), parameters)
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_large_logits_do_not_overflow() -> None:
    found, layer = inputs(False, torch.float32)
    with torch.no_grad():
        layer.weight.mul_(1e4)
    logprobs, entropy = chosen_logprobs(found, OutputLayer(layer, LogitMap()), 1.0, torch.float32)
    expected, _ = definition(found, layer, LogitMap(), 1.0)
    torch.testing.assert_close(logprobs, expected)
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(2.0, 1.5)])
def test_under_a_frozen_layer_its_input_has_its_gradient_all_the_same(
    monkeypatch: pytest.MonkeyPatch, bias: bool, logit_map: LogitMap
) -> None:
    monkeypatch.setattr(trainer.head, "CHUNK_BYTES", 4 * 4 * VOCABULARY)
    found, layer = inputs(bias)
    layer.requires_grad_(False)
    weights = torch.randn(ROWS, dtype=torch.float64)
    expected, _ = definition(found, layer, logit_map, 0.7)
    logprobs, _ = chosen_logprobs(found, OutputLayer(layer, logit_map), 0.7, torch.float64)
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    (one,) = torch.autograd.grad((logprobs * weights).sum(), [found.hidden_MH])
    (other,) = torch.autograd.grad((expected * weights).sum(), [found.hidden_MH])
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert layer.weight.grad is None


def test_without_gradients_nothing_is_kept() -> None:
    found, layer = inputs(True)
    with torch.no_grad():
        logprobs, _ = chosen_logprobs(found, OutputLayer(layer, LogitMap()), 1.0, torch.float64)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, definition(found, layer, LogitMap(), 1.0)[0].detach())


def test_float32_arithmetic_on_16_bit_weights_is_exact_where_16_bit_arithmetic_rounds() -> None:
    found, layer = inputs(False, torch.bfloat16)
    wide = Predictions(found.hidden_MH.detach().double(), found.targets_M, found.places_M)
    exact, _ = definition(wide, layer.double(), LogitMap(), 1.0)
    layer.to(torch.bfloat16)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        logprobs, _ = chosen_logprobs(found, OutputLayer(layer, LogitMap()), 1.0, dtype)
        assert logprobs.dtype == torch.float32
        errors[dtype] = float((logprobs - exact).detach().abs().max())
        hidden, weight = torch.autograd.grad(logprobs.sum(), [found.hidden_MH, layer.weight])
        assert hidden.dtype == weight.dtype == torch.bfloat16
    assert errors[torch.float32] < 1e-5 < errors[torch.bfloat16]


def test_no_more_logits_than_a_chunk_are_ever_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.head, "CHUNK_BYTES", 2 * 4 * VOCABULARY)
    found, layer = inputs(False)
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chosen_logprobs(found, OutputLayer(layer, LogitMap()), 1.0, torch.float64)
    assert max(sizes) == layer.weight.numel() < ROWS * VOCABULARY
