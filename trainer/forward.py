"""The plain forward pass: every completion with its own copy of the prompt. The reference for anything
faster."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batching import MicroBatch


def forward_rows(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Logits [B, T, V] that predict each completion token; every row is prompt and completion, padded on the
    right."""
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
    # The token at place p is predicted by the logits at p − 1: keep those columns, then line the rows up.
    first = min(prompt_lengths) - 1
    columns = torch.arange(first, width, device=device)
    logits: Tensor = model(
        input_ids=ids, attention_mask=attention, logits_to_keep=columns, use_cache=False
    ).logits
    starts_B1 = torch.tensor(prompt_lengths, device=device)[:, None] - 1 - first
    places_BT = starts_B1 + torch.arange(batch.completion_ids_BT.shape[1], device=device)
    places_BT = places_BT.clamp(max=logits.shape[1] - 1)
    return logits.gather(1, places_BT[..., None].expand(-1, -1, logits.shape[-1]))
