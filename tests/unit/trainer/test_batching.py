"""Micro-batches hold every completion once, within the budget, with the prompt that it continues."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batching import PromptRows, TrainingRow, collate, padded_tokens, plan_micro_batches

GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=6)), max_size=8
)


def rows_of(shapes: list[tuple[int, list[int]]]) -> list[PromptRows]:
    """Groups of these lengths; the tokens of each completion are a number of its own."""
    number = 0
    groups = []
    for prompt, lengths in shapes:
        rows = []
        for length in lengths:
            number += 1
            rows.append(
                TrainingRow(np.full(length, number), np.full(length, -number, np.float32), float(number))
            )
        groups.append(PromptRows(np.full(prompt, prompt), tuple(rows)))
    return groups


@settings(deadline=None)
@given(GROUPS, st.integers(1, 200), st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, share: bool
) -> None:
    groups = rows_of(shapes)
    seen: list[tuple[int, int]] = []
    for part in plan_micro_batches(groups, budget, share_prompts=share):
        rows = sum(len(piece.rows) for piece in part)
        assert padded_tokens(part, share_prompts=share) <= budget or rows == 1
        seen += [(len(piece.prompt_ids), int(row.advantage)) for piece in part for row in piece.rows]
    expected = [(len(group.prompt_ids), int(row.advantage)) for group in groups for row in group.rows]
    assert sorted(seen) == sorted(expected)


def test_a_budget_that_is_large_enough_gives_one_micro_batch() -> None:
    groups = rows_of([(10, [3, 4]), (5, [1])])
    assert padded_tokens(groups, share_prompts=True) == 2 * 10 + 3 * 4
    assert padded_tokens(groups, share_prompts=False) == 3 * (10 + 4)
    assert len(list(plan_micro_batches(groups, 32, share_prompts=True))) == 1
    assert len(list(plan_micro_batches(groups, 31, share_prompts=True))) == 2


def test_collating_pads_on_the_right_and_keeps_what_belongs_together() -> None:
    prompts = [np.array([7, 8]), np.array([9])]
    groups = [
        PromptRows(prompts[0], (TrainingRow(np.array([1, 2, 3]), np.float32([-1, -2, -3]), 0.5),)),
        PromptRows(prompts[1], (TrainingRow(np.array([4]), None, -0.5),)),
    ]
    batch = collate(groups)
    assert batch.prompt_ids_PL.tolist() == [[7, 8], [9, 0]]
    assert batch.prompt_lengths_P.tolist() == [2, 1]
    assert batch.row_prompts_B.tolist() == [0, 1]
    assert batch.completion_ids_BT.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.mask_BT.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.behavior_logprobs_BT.tolist() == [[-1, -2, -3], [0, 0, 0]]
    assert batch.own_behavior_B.tolist() == [False, True]
    assert batch.advantages_B.tolist() == [0.5, -0.5]
