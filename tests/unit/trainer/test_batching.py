"""Micro-batches hold every completion once, within the budget, with the prompt that it continues."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batching import PromptRows, TrainingRow, collate, computed_tokens, plan_micro_batches

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
        assert computed_tokens(part, share_prompts=share) <= budget or rows == 1
        seen += [(len(piece.prompt_ids), int(row.advantage)) for piece in part for row in piece.rows]
    expected = [(len(group.prompt_ids), int(row.advantage)) for group in groups for row in group.rows]
    assert sorted(seen) == sorted(expected)


def test_a_budget_that_is_large_enough_gives_one_micro_batch() -> None:
    groups = rows_of([(10, [3, 4]), (5, [1])])
    # Packed: every prompt once, and of each completion all but the last token.
    assert computed_tokens(groups, share_prompts=True) == 10 + (3 - 1) + (4 - 1) + 5 + (1 - 1)
    assert computed_tokens(groups, share_prompts=False) == 3 * (10 + 4)
    for budget, share, count in ((20, True, 1), (19, True, 2), (42, False, 1), (41, False, 2)):
        assert len(list(plan_micro_batches(groups, budget, share_prompts=share))) == count


def test_packed_pieces_fill_what_others_leave() -> None:
    groups = rows_of([(6, [1]), (5, [1]), (4, [1]), (3, [1])])
    parts = plan_micro_batches(groups, 9, share_prompts=True)
    assert [[len(piece.prompt_ids) for piece in part] for part in parts] == [[6, 3], [5, 4]]


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
