"""The plain forward pass: every completion with its own copy of the prompt. The reference for anything
faster."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batching import MicroBatch


@dataclass(frozen=True)
class Predictions:
    """Of M completion tokens: what the last layer is given to predict each, the tokens, and their places in a
    flattened [B, T]."""

    hidden_MH: Tensor
    targets_M: Tensor
    places_M: Tensor


@dataclass(frozen=True)
class _PaddedRows:
    ids_BW: Tensor
    attention_BW: Tensor
    predictors_BT: Tensor
    """The column whose output predicts each completion token; padding points somewhere inside."""


def row_predictions(model: PreTrainedModel, batch: MicroBatch) -> Predictions:
    """Prompt and completion as one row each, padded on the right."""
    rows = _padded_rows(batch)
    hidden_BWH = model.base_model(
        input_ids=rows.ids_BW, attention_mask=rows.attention_BW, use_cache=False
    ).last_hidden_state
    places_M = batch.mask_BT.flatten().nonzero()[:, 0]
    width, columns = rows.ids_BW.shape[1], batch.mask_BT.shape[1]
    predictors_M = places_M // columns * width + rows.predictors_BT.flatten()[places_M]
    return Predictions(
        hidden_MH=hidden_BWH.flatten(0, 1)[predictors_M],
        targets_M=batch.completion_ids_BT.flatten()[places_M],
        places_M=places_M,
    )


def row_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Logits [B, T, V] that predict each completion token, as the model itself computes them."""
    rows = _padded_rows(batch)
    # Only the columns from the first that predicts a completion token on.
    first = int(rows.predictors_BT.min())
    columns = torch.arange(first, rows.ids_BW.shape[1], device=rows.ids_BW.device)
    logits: Tensor = model(
        input_ids=rows.ids_BW, attention_mask=rows.attention_BW, logits_to_keep=columns, use_cache=False
    ).logits
    places_BT = rows.predictors_BT - first
    return logits.gather(1, places_BT[..., None].expand(-1, -1, logits.shape[-1]))


def _padded_rows(batch: MicroBatch) -> _PaddedRows:
    device = batch.completion_ids_BT.device
    prompt_lengths = batch.prompt_lengths_P[batch.row_prompts_B].tolist()
    row_lengths = batch.mask_BT.sum(-1).long().tolist()
    width = max(prompt + row for prompt, row in zip(prompt_lengths, row_lengths, strict=True))
    ids = torch.zeros(len(row_lengths), width, dtype=torch.long, device=device)
    attention = torch.zeros_like(ids)
    for index, (prompt, row) in enumerate(zip(prompt_lengths, row_lengths, strict=True)):
        ids[index, :prompt] = batch.prompt_ids_PL[batch.row_prompts_B[index], :prompt]
        ids[index, prompt : prompt + row] = batch.completion_ids_BT[index, :row]
        attention[index, : prompt + row] = 1
    # The token at place p is predicted by the output at p − 1.
    starts_B1 = torch.tensor(prompt_lengths, device=device)[:, None] - 1
    predictors_BT = starts_B1 + torch.arange(batch.completion_ids_BT.shape[1], device=device)
    return _PaddedRows(ids, attention, predictors_BT.clamp(max=width - 1))
