"""A packed row: every prompt once, no padding, each token at the place where its own sequence has it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batching import PromptRows, TrainingRow, collate
from trainer.packing import Segment, SharedPrompt, pack

SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


def groups_of(shapes: list[tuple[int, list[int]]]) -> list[PromptRows]:
    """Token ids count up from 1, so that each is found again."""
    ids = iter(range(1, 10_000))

    def tokens(count: int) -> np.ndarray:
        return np.array([next(ids) for _ in range(count)])

    return [
        PromptRows(tokens(prompt), tuple(TrainingRow(tokens(count), None, 0.0) for count in counts))
        for prompt, counts in shapes
    ]


def test_the_row_of_two_groups() -> None:
    row = pack(collate(groups_of([(2, [3, 3, 1]), (1, [2])])))
    #                            prompts | 3 4 of 345, 6 7 of 678, nothing of 9 | 11 of 11 12
    assert row.ids_N.tolist() == [1, 2, 10, 3, 4, 6, 7, 11]
    assert row.positions_N.tolist() == [0, 1, 0, 2, 3, 2, 3, 1]
    assert row.targets_M.tolist() == [3, 4, 5, 6, 7, 8, 9, 11, 12]
    assert row.predictors_M.tolist() == [1, 3, 4, 1, 5, 6, 1, 2, 7]
    assert row.places_M.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert row.layout.prompt_tokens == 3
    assert row.layout.segments == (Segment(0, 2, 1), Segment(2, 1, 1), Segment(3, 2, 2), Segment(7, 1, 1))
    assert row.layout.shared == (SharedPrompt(3, 7, 0, 2), SharedPrompt(7, 8, 2, 3))


@settings(deadline=None)
@given(SHAPES)
def test_every_completion_token_is_predicted_by_the_one_before_it(
    shapes: list[tuple[int, list[int]]],
) -> None:
    groups = groups_of(shapes)
    batch = collate(groups)
    row = pack(batch)
    expected = [
        (before, token)
        for group in groups
        for each in group.rows
        for before, token in zip([group.prompt_ids[-1], *each.token_ids[:-1]], each.token_ids, strict=True)
    ]
    assert list(zip(row.ids_N[row.predictors_M].tolist(), row.targets_M.tolist(), strict=True)) == expected
    assert torch.equal(batch.completion_ids_BT.flatten()[row.places_M], row.targets_M)
    assert sum(each.length * each.count for each in row.layout.segments) == len(row.ids_N)
    assert len(row.ids_N) == sum(
        len(g.prompt_ids) + sum(len(r.token_ids) - 1 for r in g.rows) for g in groups
    )


def test_completions_out_of_order_are_refused() -> None:
    batch = collate(groups_of([(2, [1]), (2, [1])]))
    batch.row_prompts_B.copy_(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="order of their prompts"):
        pack(batch)
