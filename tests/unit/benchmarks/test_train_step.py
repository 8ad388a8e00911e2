"""What the train step benchmark compares: the same completions after prompts of the length asked for."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.train_step import check_same, lengths
from benchmarks.train_step_rollouts import Rollouts, RolloutsGroup, read_rollouts, with_prompt_length

ROLLOUTS = Rollouts(
    [
        RolloutsGroup([1, 2, 3], [[4, 5], [6]], [1.0, 0.0]),
        RolloutsGroup([7], [[8, 9, 1, 2], [3]], [1.0, 0.0]),
    ]
)


def test_longer_prompts_leave_the_completions() -> None:
    longer = with_prompt_length(ROLLOUTS, 8)
    assert [group.prompt for group in longer.groups] == [[2, 3, 1, 2, 3, 1, 2, 3], [7] * 8]
    assert [group.completions for group in longer.groups] == [group.completions for group in ROLLOUTS.groups]
    assert lengths(longer) == {
        "prompt_tokens_mean": 8,
        "completion_tokens_mean": 2,
        "completion_tokens_max": 4,
        "padded_tokens": 4 * (8 + 4),
        "needed_tokens": 2 * 8 + 8,
        "group_size": 2,
    }


def test_rollouts_reach_the_sides_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(asdict(ROLLOUTS)))
    assert read_rollouts(path) == ROLLOUTS


def test_sides_that_did_not_do_the_same_are_not_compared() -> None:
    check_same({"a": {"loss": -0.2, "grad_norm": 3.0}, "b": {"loss": -0.200001, "grad_norm": 3.0001}}, 1e-4)
    with pytest.raises(SystemExit, match="grad_norm"):
        check_same({"a": {"loss": 1.0, "grad_norm": 3.0}, "b": {"loss": 1.0, "grad_norm": 3.1}}, 1e-4)
