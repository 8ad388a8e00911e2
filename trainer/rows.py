"""Completions as a loss wants them: advantage, age of every token, and the share of the mean that is theirs.

How a batch is averaged belongs to the run's loss (`aggregation`). Each token's share follows from the whole
batch before it is cut into micro-batches, so the cut changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.algorithm import AlgorithmSpec
from trainer.advantages import group_advantages, value_advantages
from trainer.batching import PromptRows, TrainingRow
from trainer.groups import TrainingGroup
from trainer.losses.gepo import group_log_mean


@dataclass(frozen=True, kw_only=True)
class LossRow(TrainingRow):
    """A completion of T tokens with all that the objective needs beside log-probs."""

    lags: npt.NDArray[np.int64]
    """[T]: the learner's version minus the token's."""
    is_local: bool
    token_share: float
    """Weight of each of its tokens in the batch's mean."""
    group_log_mean: float = 0.0


@dataclass(frozen=True)
class RowTensors:
    """What `collate` does not carry, for the same B rows and T places."""

    lags_BT: Tensor
    is_local_B: Tensor
    token_share_B: Tensor
    group_log_mean_B: Tensor


def rows_of(
    groups: Sequence[TrainingGroup], algorithm: AlgorithmSpec, version: int, max_new_tokens: int
) -> list[PromptRows]:
    """The completions that carry a gradient at `version`, under their prompts."""
    rewards = [group.rewards for group in groups]
    if algorithm.loss_type == "oapl":
        advantages = value_advantages(rewards, algorithm.oapl_beta1)
    else:
        advantages = group_advantages(rewards, algorithm.scale_rewards)
    trained = [
        (group, values) for group, values in zip(groups, advantages, strict=True) if group.is_informative
    ]
    counts = [[len(ids) for ids in group.completions] for group, _ in trained]
    tokens = sum(sum(lengths) for lengths in counts)
    completions = sum(sum(length > 0 for length in lengths) for lengths in counts)
    result = []
    for (group, values), lengths in zip(trained, counts, strict=True):
        log_mean = _group_log_mean(group) if algorithm.loss_type == "gepo" else 0.0
        rows = []
        for index, (ids, advantage) in enumerate(zip(group.completions, values, strict=True)):
            if not len(ids):
                continue
            divisor = {
                "token": tokens,
                "sequence": completions * len(ids),
                "prompt": len(trained) * sum(lengths),
                "constant": completions * max_new_tokens,
            }[algorithm.aggregation]
            rows.append(
                LossRow(
                    ids,
                    None if group.behavior_logprobs is None else group.behavior_logprobs[index],
                    float(advantage),
                    lags=version - group.versions_of(index),
                    is_local=group.is_local,
                    token_share=1.0 / divisor,
                    group_log_mean=log_mean,
                )
            )
        result.append(PromptRows(group.prompt_ids, tuple(rows)))
    return result


def _group_log_mean(group: TrainingGroup) -> float:
    if group.behavior_logprobs is None:
        raise ValueError("loss_type 'gepo' needs the behavior log-probs of every group")
    return group_log_mean([values for values in group.behavior_logprobs if len(values)])


def row_tensors(pieces: Sequence[PromptRows], width: int, device: torch.device) -> RowTensors:
    """For the rows of a micro-batch, in the order of `collate`; `width` is its T."""
    rows = [cast(LossRow, row) for piece in pieces for row in piece.rows]
    lags = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        lags[index, : len(row.lags)] = row.lags
    return RowTensors(
        lags_BT=torch.from_numpy(lags).to(device),
        is_local_B=torch.tensor([row.is_local for row in rows], device=device),
        token_share_B=torch.tensor([row.token_share for row in rows], device=device),
        group_log_mean_B=torch.tensor([row.group_log_mean for row in rows], device=device),
    )
