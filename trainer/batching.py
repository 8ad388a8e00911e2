"""Micro-batches: which completions go through the model together, within a budget of computed tokens.

A group's completions share their prompt, so a micro-batch holds each prompt once and says which rows continue
it. Its tensors are padded on the right for the loss; the model is given them packed (`trainer.packing`). A
group that exceeds the budget alone is cut into several (its prompt then goes through once for each); one
completion is never cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingRow:
    """One completion to learn from: token ids [T], T ≥ 1; behavior log-probs [T] or None for "the policy's
    own now"."""

    token_ids: npt.NDArray[np.int64]
    behavior_logprobs: npt.NDArray[np.float32] | None
    advantage: float


@dataclass(frozen=True)
class PromptRows:
    """A prompt and the completions that continue it."""

    prompt_ids: npt.NDArray[np.int64]
    rows: tuple[TrainingRow, ...]

    @property
    def longest_row(self) -> int:
        return max(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True)
class MicroBatch:
    """P prompts of up to L tokens, B completions of up to T tokens. Zeros pad on the right."""

    prompt_ids_PL: Tensor
    prompt_lengths_P: Tensor
    row_prompts_B: Tensor
    """Index of each completion's prompt."""
    completion_ids_BT: Tensor
    mask_BT: Tensor
    """1.0 for tokens, 0.0 for padding."""
    behavior_logprobs_BT: Tensor
    own_behavior_B: Tensor
    """True where behavior log-probs are the policy's own at this moment."""
    advantages_B: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def plan_micro_batches(
    groups: Sequence[PromptRows], token_budget: int, *, share_prompts: bool
) -> Iterator[list[PromptRows]]:
    """Split groups into micro-batches of at most `token_budget` computed tokens (more only for a single
    completion).

    `share_prompts` says whether the model will see each prompt once, packed without padding, or once per
    completion, padded to the longest. Packed, only the sum counts: the largest pieces come first and each
    goes where it still fits. Padded, neighbours are of like length.
    """
    pieces = [piece for group in groups for piece in _cut(group, token_budget, share_prompts)]
    if share_prompts:
        yield from _first_fit(pieces, token_budget)
        return
    pieces.sort(key=lambda piece: (len(piece.prompt_ids), piece.longest_row))
    current: list[PromptRows] = []
    for piece in pieces:
        if current and computed_tokens([*current, piece], share_prompts=False) > token_budget:
            yield current
            current = []
        current.append(piece)
    if current:
        yield current


def computed_tokens(groups: Sequence[PromptRows], *, share_prompts: bool) -> int:
    """Tokens that the model computes for these groups in one micro-batch, padding included."""
    if share_prompts:
        # A completion's last token predicts nothing and is not computed.
        return sum(
            len(group.prompt_ids) + sum(len(row.token_ids) - 1 for row in group.rows) for group in groups
        )
    longest_prompt = max(len(group.prompt_ids) for group in groups)
    longest_row = max(group.longest_row for group in groups)
    return sum(len(group.rows) for group in groups) * (longest_prompt + longest_row)


def _first_fit(pieces: list[PromptRows], token_budget: int) -> list[list[PromptRows]]:
    sized = [(computed_tokens([piece], share_prompts=True), piece) for piece in pieces]
    sized.sort(key=lambda pair: -pair[0])
    bins: list[list[PromptRows]] = []
    room: list[int] = []
    for size, piece in sized:
        place = next((index for index, left in enumerate(room) if size <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[place].append(piece)
        room[place] -= size
    return bins


def _cut(group: PromptRows, token_budget: int, share_prompts: bool) -> Iterator[PromptRows]:
    # Of like length together: less padding, and equal lengths are computed at once.
    rows = sorted(group.rows, key=lambda row: len(row.token_ids))
    taken: list[TrainingRow] = []
    for row in rows:
        larger = PromptRows(group.prompt_ids, (*taken, row))
        if taken and computed_tokens([larger], share_prompts=share_prompts) > token_budget:
            yield PromptRows(group.prompt_ids, tuple(taken))
            taken = []
        taken.append(row)
    yield PromptRows(group.prompt_ids, tuple(taken))


def collate(groups: Sequence[PromptRows]) -> MicroBatch:
    """The padded tensors of one micro-batch."""
    rows = [(index, row) for index, group in enumerate(groups) for row in group.rows]
    longest_prompt = max(len(group.prompt_ids) for group in groups)
    longest_row = max(len(row.token_ids) for _, row in rows)
    prompt_ids = np.zeros((len(groups), longest_prompt), dtype=np.int64)
    for index, group in enumerate(groups):
        prompt_ids[index, : len(group.prompt_ids)] = group.prompt_ids
    completion_ids = np.zeros((len(rows), longest_row), dtype=np.int64)
    mask = np.zeros((len(rows), longest_row), dtype=np.float32)
    behavior = np.zeros((len(rows), longest_row), dtype=np.float32)
    for index, (_, row) in enumerate(rows):
        length = len(row.token_ids)
        completion_ids[index, :length] = row.token_ids
        mask[index, :length] = 1.0
        if row.behavior_logprobs is not None:
            behavior[index, :length] = row.behavior_logprobs
    return MicroBatch(
        prompt_ids_PL=torch.from_numpy(prompt_ids),
        prompt_lengths_P=torch.tensor([len(group.prompt_ids) for group in groups]),
        row_prompts_B=torch.tensor([prompt for prompt, _ in rows]),
        completion_ids_BT=torch.from_numpy(completion_ids),
        mask_BT=torch.from_numpy(mask),
        behavior_logprobs_BT=torch.from_numpy(behavior),
        own_behavior_B=torch.tensor([row.behavior_logprobs is None for _, row in rows]),
        advantages_B=torch.tensor([row.advantage for _, row in rows], dtype=torch.float32),
    )
