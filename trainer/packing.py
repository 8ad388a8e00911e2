"""A micro-batch as one row without padding: every prompt once, then every completion, and who may attend to
whom.

    prompt 0 | prompt 1 | … | completions of prompt 0, one after the other | completions of prompt 1 | …

A completion's last token is left out: it predicts nothing. The first token of a completion is predicted by
the last one of its prompt, so that place serves all completions of the group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batching import MicroBatch


@dataclass(frozen=True)
class Segment:
    """`count` neighbouring pieces of `length` tokens, from `start` on: each attends to itself, causally."""

    start: int
    length: int
    count: int


@dataclass(frozen=True)
class SharedPrompt:
    """Completion tokens [first, last), perhaps none, attend to all of [prompt_first, prompt_last)."""

    first: int
    last: int
    prompt_first: int
    prompt_last: int


@dataclass(frozen=True)
class AttentionLayout:
    """Which tokens of a packed row attend to which: within segments, and from completions to their prompt."""

    segments: tuple[Segment, ...]
    shared: tuple[SharedPrompt, ...]
    prompt_tokens: int
    """The first tokens of the row belong to prompts, the others to completions."""


@dataclass(frozen=True)
class PackedRow:
    """N tokens with their positions; M completion tokens with the place in the row that predicts each."""

    ids_N: Tensor
    positions_N: Tensor
    layout: AttentionLayout
    predictors_M: Tensor
    targets_M: Tensor
    places_M: Tensor
    """Where each completion token lies in a flattened [B, T]."""


def pack(batch: MicroBatch) -> PackedRow:
    """The row of a micro-batch; its completions must stand in the order of their prompts, as in `collate`."""
    prompt_lengths, row_prompts = batch.prompt_lengths_P.tolist(), batch.row_prompts_B.tolist()
    row_lengths = batch.mask_BT.sum(-1).long().tolist()
    ids, positions, predictors, places = [], [], [], []
    pieces: list[tuple[int, int]] = []
    shared: list[SharedPrompt] = []
    prompt_starts = []
    end = 0
    for index, length in enumerate(prompt_lengths):
        ids.append(batch.prompt_ids_PL[index, :length])
        positions.append(torch.arange(length))
        prompt_starts.append(end)
        pieces.append((end, length))
        end += length
    prompt_tokens = end
    for prompt, rows in enumerate(_rows_by_prompt(row_prompts, len(prompt_lengths))):
        length, first = prompt_lengths[prompt], end
        for row in rows:
            count = row_lengths[row]
            ids.append(batch.completion_ids_BT[row, : count - 1])
            positions.append(torch.arange(length, length + count - 1))
            predictors.append(torch.tensor([prompt_starts[prompt] + length - 1]))
            predictors.append(torch.arange(end, end + count - 1))
            start = row * batch.completion_ids_BT.shape[1]
            places.append(torch.arange(start, start + count))
            pieces.append((end, count - 1))
            end += count - 1
        start = prompt_starts[prompt]
        shared.append(SharedPrompt(first, end, start, start + length))
    device = batch.completion_ids_BT.device
    places_M = torch.cat(places).to(device)
    return PackedRow(
        ids_N=torch.cat(ids),
        positions_N=torch.cat(positions).to(device),
        layout=AttentionLayout(_merged(pieces), tuple(shared), prompt_tokens),
        predictors_M=torch.cat(predictors).to(device),
        targets_M=batch.completion_ids_BT.flatten()[places_M],
        places_M=places_M,
    )


def _rows_by_prompt(row_prompts: list[int], prompts: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(prompts)]
    for row, prompt in enumerate(row_prompts):
        groups[prompt].append(row)
    if row_prompts != sorted(row_prompts):
        raise ValueError("the completions of a micro-batch do not stand in the order of their prompts")
    return groups


def _merged(pieces: list[tuple[int, int]]) -> tuple[Segment, ...]:
    """Neighbours of equal length as one segment: they are computed together."""
    segments: list[Segment] = []
    for start, length in pieces:
        if length == 0:
            continue
        if segments and segments[-1].length == length:
            last = segments.pop()
            segments.append(Segment(last.start, length, last.count + 1))
        else:
            segments.append(Segment(start, length, 1))
    return tuple(segments)
