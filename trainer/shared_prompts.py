"""Computing a prompt once for all its completions: the same numbers as row by row, for a fraction of the
work.

Two passes. The first runs each prompt without its last token and keeps the keys and values of every layer,
with their gradients. The second runs, for each completion, the prompt's last token and the completion without
its last one; it attends to the kept keys and values of its prompt. Its logits predict exactly the
completion's tokens. With G completions of T tokens after a prompt of L, the model sees L + G·T tokens instead
of G·(L + T).
"""

import logging

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from trainer.batching import MicroBatch, PromptRows, TrainingRow, collate
from trainer.forward import forward_rows

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest relative difference from the plain forward that still counts as rounding, in float32."""


def forward_shared_prompts(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Logits [B, T, V] that predict each completion token. Every prompt needs at least two tokens."""
    device = batch.completion_ids_BT.device
    rows = batch.row_prompts_B
    cached_lengths_P = batch.prompt_lengths_P - 1
    width = int(cached_lengths_P.max())
    cached_mask_PL = (torch.arange(width, device=device) < cached_lengths_P[:, None]).long()
    # Padding is on the right, so that no place attends to nothing; the second pass masks it.
    cache = model(
        input_ids=batch.prompt_ids_PL[:, :width],
        attention_mask=cached_mask_PL,
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        logits_to_keep=1,
    ).past_key_values
    cache.batch_select_indices(rows)

    last_prompt_token_B1 = batch.prompt_ids_PL.gather(1, cached_lengths_P[:, None])[rows]
    ids_BT = torch.cat([last_prompt_token_B1, batch.completion_ids_BT[:, :-1]], dim=1)
    places_BT = cached_lengths_P[rows][:, None] + torch.arange(ids_BT.shape[1], device=device)
    # Place t of the second pass holds the token before completion token t, so it is real where that one is.
    mask = torch.cat([cached_mask_PL[rows], batch.mask_BT.long()], dim=1)
    logits: Tensor = model(
        input_ids=ids_BT,
        attention_mask=mask,
        position_ids=places_BT,
        past_key_values=cache,
        use_cache=True,
    ).logits
    return logits


def can_share_prompts(config: PreTrainedConfig, batch: MicroBatch) -> bool:
    """Whether this batch comes out exact: no prompt of one token, nothing longer than `longest_exact`."""
    longest = batch.prompt_ids_PL.shape[1] + batch.completion_ids_BT.shape[1]
    return int(batch.prompt_lengths_P.min()) > 1 and longest <= longest_exact(config)


def longest_exact(config: PreTrainedConfig) -> float:
    """Tokens up to which a cached prompt is what it would be in the whole sequence.

    Sliding and chunked attention count places in the cache, padding included, and some rotary embeddings
    depend on the length of what is computed at once.
    """
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limits.append(rope.get("original_max_position_embeddings"))
        limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=float("inf"))


def shared_prompts_work(model: PreTrainedModel) -> bool:
    """Whether this model gives the same logits both ways; not all architectures keep their past in such a
    cache.

    Compares the two on a small batch of uneven lengths. A difference is logged: training is then slower, not
    wrong.
    """
    vocabulary = int(getattr(model.config, "vocab_size", 2))
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,), generator=generator)

    groups = [
        PromptRows(
            tokens(length).numpy(),
            tuple(TrainingRow(tokens(count).numpy(), None, 0.0) for count in counts),
        )
        for length, counts in ((3, (1, 5)), (9, (4, 2, 3)))
    ]
    batch = collate(groups).to(next(model.parameters()).device)
    if not can_share_prompts(model.config, batch):
        return False
    try:
        with torch.no_grad():
            plain, shared = forward_rows(model, batch).float(), forward_shared_prompts(model, batch).float()
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        log.warning(
            "prompts are computed once per completion: the model's cache cannot be shared (%s)", error
        )
        return False
    real = batch.mask_BT.bool()
    difference = float((plain - shared)[real].abs().max() / plain[real].abs().max().clamp(min=1e-9))
    if difference <= TOLERANCE:
        return True
    log.warning(
        "prompts are computed once per completion: sharing them changes the logits by %.1e", difference
    )
    return False
