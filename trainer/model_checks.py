"""Does the fast way give the model's own numbers? Asked once per model, on a small batch, before it is used.

Architectures differ in what they do to logits and in how they attend. What comes out different is not used
and logged: training is then slower, not wrong.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.batching import MicroBatch, PromptRows, TrainingRow, collate
from trainer.forward import Predictions, row_logits, row_predictions
from trainer.head import OutputLayer, UnknownHead, chosen_logprobs, output_layer
from trainer.packed_attention import IMPLEMENTATION
from trainer.shared_prompts import can_share_prompts, longest_exact, packed_predictions

log = logging.getLogger(__name__)

TOLERANCE, TOLERANCE_16_BIT = 0.02, 0.3
"""Largest relative difference (of all log-probs as one vector, and of all gradients) that still counts as
rounding. A trained model amplifies rounding on the nonsense that it is checked with: SmolLM2-135M gives up to
0.008 in float32 and 0.12 in bfloat16, real text 1e-4. A token that sees another's context gives 1.
"""

CHECK_TOKENS = 16
"""Token ids of the batch that a model is checked with."""

FAILURES = (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError)
"""What a model raises that does not know an argument or lacks a part."""


def known_head(model: PreTrainedModel, *, autocast: bool = False) -> OutputLayer | None:
    """The model's last layer if the model's logits are that layer's; else None: all logits of a micro-batch
    are then in memory at once."""
    batch = _check_batch(model)
    try:
        head = output_layer(model)
        expected = _numbers(model, lambda: reference_logprobs(model, batch), autocast)
        actual = _numbers(model, lambda: _scored(head, row_predictions(model, batch)), autocast)
    except (UnknownHead, *FAILURES) as error:
        log.warning("logits are computed all at once: the model's last layer cannot be used (%s)", error)
        return None
    difference = _difference(expected, actual)
    if difference <= (TOLERANCE_16_BIT if autocast else TOLERANCE):
        return head
    log.warning("logits are computed all at once: in chunks they differ by %.1e", difference)
    return None


def share_prompts_if_exact(
    model: PreTrainedModel, head: OutputLayer | None, *, autocast: bool = False
) -> bool:
    """Give the model packed attention if its log-probs and gradients come out the same; whether they do."""
    why = _why_not(model, head, autocast)
    if why is None:
        return True
    log.warning("prompts are computed once per completion: %s", why)
    return False


def _why_not(model: PreTrainedModel, head: OutputLayer | None, autocast: bool) -> str | None:
    if head is None:
        return "the model's last layer is not known"
    before = model.config._attn_implementation
    if before not in ("sdpa", IMPLEMENTATION):
        return f"the model's attention is {before}"
    batch = _check_batch(model)
    if not can_share_prompts(model.config, batch):
        return f"the model attends to {longest_exact(model.config):.0f} tokens at most"
    try:
        expected = _numbers(model, lambda: _scored(head, row_predictions(model, batch)), autocast)
        model.set_attn_implementation(IMPLEMENTATION)
        actual = _numbers(model, lambda: _scored(head, packed_predictions(model, batch)), autocast)
    except FAILURES as error:
        model.set_attn_implementation(before)
        return f"the model's attention cannot be packed ({error})"
    difference = _difference(expected, actual)
    if difference <= (TOLERANCE_16_BIT if autocast else TOLERANCE):
        return None
    model.set_attn_implementation(before)
    return f"packing them changes log-probs or gradients by {difference:.1e}"


def reference_logprobs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Log-probs [M] of the completion tokens from the logits that the model itself computes."""
    logprobs_BTV = row_logits(model, batch).float().log_softmax(-1)
    return logprobs_BTV.gather(-1, batch.completion_ids_BT[..., None])[..., 0][batch.mask_BT.bool()]


def _scored(head: OutputLayer, found: Predictions) -> Tensor:
    logprobs_M, _ = chosen_logprobs(found, head, 1.0, found.hidden_MH.dtype)
    return logprobs_M


def _numbers(model: PreTrainedModel, logprobs: Callable[[], Tensor], autocast: bool) -> tuple[Tensor, Tensor]:
    """Log-probs [M], and the gradient of a mix of them with respect to the embedding of each token id."""
    captured: list[tuple[Tensor, Tensor]] = []

    def capture(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        captured.append((inputs[0], output if output.requires_grad else output.requires_grad_()))
        return captured[-1][1]

    handle = model.get_input_embeddings().register_forward_hook(capture)
    device = next(model.parameters()).device
    try:
        with torch.enable_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            found = logprobs()
    finally:
        handle.remove()
    ids, embeddings = captured[0]
    weights = torch.linspace(-1.0, 1.0, len(found), device=device)
    (gradient,) = torch.autograd.grad((found * weights).sum(), [embeddings])
    table = gradient.new_zeros(CHECK_TOKENS, gradient.shape[-1])
    return found.detach(), table.index_add(0, ids.flatten() // _stride(model), gradient.flatten(0, 1))


def _difference(expected: tuple[Tensor, Tensor], actual: tuple[Tensor, Tensor]) -> float:
    return max(
        float((a.float() - b.float()).norm() / a.float().norm().clamp(min=1e-9))
        for a, b in zip(expected, actual, strict=True)
    )


def _stride(model: PreTrainedModel) -> int:
    """The checked token ids are multiples of this: spread over the vocabulary, whose first tokens are often
    special ones that no model has learned to follow."""
    return max(1, int(model.config.get_text_config(decoder=True).vocab_size) // CHECK_TOKENS)


def _check_batch(model: PreTrainedModel) -> MicroBatch:
    """Uneven lengths, among them a prompt and a completion of one token."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, CHECK_TOKENS, (count,), generator=generator) * _stride(model)

    groups = [
        PromptRows(
            tokens(length).numpy(),
            tuple(TrainingRow(tokens(count).numpy(), None, 0.0) for count in counts),
        )
        for length, counts in ((1, (3,)), (3, (1, 5)), (9, (2, 3, 3, 4)))
    ]
    return collate(groups).to(next(model.parameters()).device)
