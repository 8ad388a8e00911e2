"""Computing a prompt once for all its completions: the same numbers as row by row, for a fraction of the
work.

A micro-batch becomes one row (`trainer.packing`) whose attention knows which token sees which
(`trainer.packed_attention`). With G completions of T tokens after a prompt of L, the model computes L + G·T
tokens instead of G·(L + T), and none of them is padding. Gradients of all completions reach the one prompt.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trainer.batching import MicroBatch
from trainer.forward import Predictions
from trainer.packing import pack


def packed_predictions(model: PreTrainedModel, batch: MicroBatch) -> Predictions:
    """What predicts each completion token, every prompt computed once. The model must have passed `check`."""
    row = pack(batch)
    hidden_NH = model.base_model(
        input_ids=row.ids_N[None],
        position_ids=row.positions_N[None],
        # Four dimensions: "made already", so that none is made. The attention never looks at it.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=row.ids_N.device),
        use_cache=False,
        packed_layout=row.layout,
    ).last_hidden_state[0]
    return Predictions(hidden_NH[row.predictors_M], row.targets_M, row.places_M)


def can_share_prompts(config: PreTrainedConfig, batch: MicroBatch) -> bool:
    """Whether this batch comes out exact: nothing in it is longer than `longest_exact`."""
    longest = batch.prompt_ids_PL.shape[1] + batch.completion_ids_BT.shape[1]
    return longest <= longest_exact(config)


def longest_exact(config: PreTrainedConfig) -> float:
    """Tokens up to which attention to everything before is what the model does.

    Sliding and chunked attention see less, and some rotary embeddings depend on the length of what is
    computed at once.
    """
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limits.append(rope.get("original_max_position_embeddings"))
        limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=float("inf"))
