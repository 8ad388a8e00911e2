"""Advantages: exact values of each scaling, and exact zeros where there is nothing to compare."""

import math

import numpy as np
import pytest

from trainer.advantages import group_advantages, is_informative, value_advantages


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


@pytest.mark.parametrize(
    ("right", "good", "bad"), [(1, 0.805, -0.195), (4, 0.380, -0.620), (7, 0.082, -0.918)]
)
def test_oapl_compares_with_the_value_of_the_best_policy_within_reach(
    right: int, good: float, bad: float
) -> None:
    """Eight binary rewards, β = 1."""
    (values,) = value_advantages([[1.0] * right + [0.0] * (8 - right)], 1.0)
    assert values[0] == pytest.approx(good, abs=5e-4) and values[-1] == pytest.approx(bad, abs=5e-4)


def test_a_large_beta_makes_the_value_the_mean_and_a_small_one_the_best_reward() -> None:
    (values,) = value_advantages([[1.0, 0.0, 0.0, 0.0]], 1e6)
    assert values.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-5)
    (values,) = value_advantages([[1.0, 0.0]], 1e-3)
    assert values[0] == pytest.approx(1e-3 * math.log(2))
    assert value_advantages([[0.3] * 3], 1.0)[0].tolist() == [0.0] * 3
