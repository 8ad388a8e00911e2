"""Advantages: exact values of each scaling, and exact zeros where there is nothing to compare."""

import math

import numpy as np
import pytest

from trainer.advantages import group_advantages, is_informative


def test_group_scaling_divides_by_the_groups_unbiased_deviation() -> None:
    (values,) = group_advantages([[1.0, 0.0, 0.0, 0.0]], "group")
    deviation = 0.5  # sqrt((0.75² + 3 · 0.25²) / 3)
    assert values.tolist() == pytest.approx(
        [0.75 / (deviation + 1e-4)] + [-0.25 / (deviation + 1e-4)] * 3, rel=1e-12
    )


def test_batch_scaling_divides_by_the_deviation_of_all_rewards() -> None:
    first, second = group_advantages([[1.0, 0.0], [1.0, 1.0]], "batch")
    deviation = math.sqrt((3 * 0.25**2 + 0.75**2) / 3)
    assert first.tolist() == pytest.approx([0.5 / (deviation + 1e-4), -0.5 / (deviation + 1e-4)])
    assert second.tolist() == [0.0, 0.0]


def test_without_scaling_only_the_mean_is_taken_off() -> None:
    (values,) = group_advantages([[3.0, 1.0, 2.0]], "none")
    assert values.tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to(scale: str) -> None:
    first, second = group_advantages([[0.1] * 7, [0.3]], scale)  # type: ignore[arg-type]
    assert np.array_equal(first, np.zeros(7)) and np.array_equal(second, np.zeros(1))
    assert not is_informative([0.1] * 7)
    assert is_informative([0.1] * 6 + [0.2])


def test_no_groups_give_no_advantages() -> None:
    assert group_advantages([], "batch") == []
