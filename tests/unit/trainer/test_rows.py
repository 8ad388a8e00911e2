"""Which part of a batch's mean every token is, and how old it is."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from protocol.algorithm import AlgorithmSpec
from tests.unit.trainer.factory import training_group
from trainer.batching import PromptRows, collate
from trainer.groups import TrainingGroup
from trainer.rows import LossRow, row_tensors, rows_of

MAX_NEW_TOKENS = 10


def group_of(number: int, lengths: list[int], **changes: Any) -> TrainingGroup:
    """Completions of these lengths, the first rewarded."""
    fields = vars(training_group(number)) | {
        "completions": tuple(np.arange(length, dtype=np.int64) for length in lengths),
        "behavior_logprobs": tuple(np.full(length, -1.0, np.float32) for length in lengths),
        "rewards": tuple([1.0] + [0.0] * (len(lengths) - 1)),
        "token_versions": None,
    }
    return TrainingGroup(**(fields | changes))


GROUPS = [
    group_of(1, [2, 6]),
    group_of(2, [1, 1, 2]),
    group_of(3, [5, 5], rewards=(1.0, 1.0)),  # Teaches nothing, so it is no part of any mean.
    group_of(4, [3, 0]),  # An external completion whose text has no tokens.
]


def shares(aggregation: str) -> list[list[float]]:
    algorithm = AlgorithmSpec(aggregation=aggregation)  # type: ignore[arg-type]
    rows = rows_of(GROUPS, algorithm, 0, MAX_NEW_TOKENS)
    return [[cast(LossRow, row).token_share for row in group.rows] for group in rows]


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [
        ("token", [[15, 15], [15, 15, 15], [15]]),
        ("sequence", [[6 * 2, 6 * 6], [6, 6, 6 * 2], [6 * 3]]),
        ("prompt", [[3 * 8, 3 * 8], [3 * 4] * 3, [3 * 3]]),
        ("constant", [[60, 60], [60] * 3, [60]]),
    ],
)
def test_every_aggregation_gives_each_token_its_share(aggregation: str, divisors: list[list[int]]) -> None:
    assert shares(aggregation) == [pytest.approx([1 / value for value in group]) for group in divisors]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
def test_the_shares_of_a_mean_add_up_to_one(aggregation: str) -> None:
    algorithm = AlgorithmSpec(aggregation=aggregation)  # type: ignore[arg-type]
    rows = [row for group in rows_of(GROUPS, algorithm, 0, MAX_NEW_TOKENS) for row in group.rows]
    assert sum(cast(LossRow, row).token_share * len(row.token_ids) for row in rows) == pytest.approx(1.0)


def test_a_token_is_as_old_as_the_version_that_made_it() -> None:
    group = training_group(1, version=3, spans=3)
    (made,) = rows_of([group], AlgorithmSpec(), 7, MAX_NEW_TOKENS)
    for row, tokens in zip(made.rows, group.completions, strict=True):
        expected = [4, 3, *[2] * (len(tokens) - 2)][: len(tokens)]
        assert cast(LossRow, row).lags.tolist() == expected
    assert group.oldest_version == 3


def test_row_tensors_stand_beside_what_collate_makes() -> None:
    groups = [training_group(number, version=1, spans=2) for number in (1, 2)]
    pieces: list[PromptRows] = rows_of(groups, AlgorithmSpec(), 5, MAX_NEW_TOKENS)
    batch = collate(pieces)
    rows = row_tensors(pieces, batch.mask_BT.shape[1], torch.device("cpu"))
    assert rows.lags_BT.shape == batch.mask_BT.shape
    assert rows.token_share_B.shape == batch.advantages_B.shape
    assert rows.lags_BT[:, 0].tolist() == [4] * 8
    assert (rows.lags_BT[batch.mask_BT == 0] == 0).all()
    assert rows.is_local_B.all()


def test_advantages_follow_the_loss() -> None:
    def values(**options: Any) -> list[float]:
        (group,) = rows_of([GROUPS[0]], AlgorithmSpec(**options), 0, MAX_NEW_TOKENS)
        return [row.advantage for row in group.rows]

    assert values(scale_rewards="none") == [0.5, -0.5]
    assert values(loss_type="dr_grpo") == [0.5, -0.5]
    assert values() == pytest.approx([0.5 / (np.sqrt(0.5) + 1e-4), -0.5 / (np.sqrt(0.5) + 1e-4)])
    value = np.log((np.e + 1) / 2)
    assert values(loss_type="oapl") == pytest.approx([1 - value, -value])


def test_gepo_knows_its_groups_behavior_and_refuses_a_group_without() -> None:
    algorithm = AlgorithmSpec(loss_type="gepo")
    (made,) = rows_of([GROUPS[1]], algorithm, 0, MAX_NEW_TOKENS)
    # All means are −1: Σ q² / Σ q = e^−1.
    assert [cast(LossRow, row).group_log_mean for row in made.rows] == pytest.approx([-1.0] * 3)
    with pytest.raises(ValueError, match="behavior log-probs of every group"):
        rows_of([group_of(5, [1, 2], behavior_logprobs=None)], algorithm, 0, MAX_NEW_TOKENS)
