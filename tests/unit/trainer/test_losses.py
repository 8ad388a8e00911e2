"""Exact pushes on log π of every loss, from an independent table of numbers."""

import math

import pytest
import torch

from protocol.run_spec import AlgorithmSpec
from trainer.losses import LOSSES
from trainer.losses.base import LOG_RATIO_LIMIT

RATIOS = [0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 8.0]

# Of each ratio: the push g on log π, d(loss)/d(log π) = −g, for A = +1 and A = −1.
PUSHES = {
    "cispo": (
        [0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 5.0],
        [-0.2, -0.5, -0.9, -1.0, -1.1, -1.5, -3.0, -5.0],
    ),
    "grpo": (
        [0.2, 0.5, 0.9, 1.0, 1.1, 0.0, 0.0, 0.0],
        [0.0, 0.0, -0.9, -1.0, -1.1, -1.5, -3.0, -8.0],
    ),
}
ALGORITHMS = {
    "cispo": AlgorithmSpec(loss_type="cispo", epsilon_high=5.0),
    "grpo": AlgorithmSpec(loss_type="grpo", epsilon=0.2, epsilon_high=0.2),
}
CLIPPED = {
    "cispo": ([False] * 7 + [True], [False] * 7 + [True]),
    "grpo": ([False] * 5 + [True] * 3, [True] * 2 + [False] * 6),
}


def pushes(name: str, ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pushes [A, R] and clip marks of one row per advantage and one token per ratio."""
    behavior_BT = torch.full((len(advantages), len(ratios)), -2.0, dtype=torch.float64)
    logprobs_BT = behavior_BT + torch.tensor(ratios, dtype=torch.float64).log()
    logprobs_BT.requires_grad_(True)
    terms = LOSSES[name](
        logprobs_BT, behavior_BT, torch.tensor(advantages, dtype=torch.float64), ALGORITHMS[name]
    )
    (gradient,) = torch.autograd.grad(terms.loss_BT.sum(), logprobs_BT)
    return -gradient, terms.clipped_BT


@pytest.mark.parametrize("name", PUSHES)
def test_the_push_on_every_token_is_the_published_one(name: str) -> None:
    actual, clipped = pushes(name, RATIOS, [1.0, -1.0])
    expected = torch.tensor(PUSHES[name], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert clipped.tolist() == [list(marks) for marks in CLIPPED[name]]


@pytest.mark.parametrize("name", PUSHES)
def test_at_zero_lag_the_push_is_the_advantage(name: str) -> None:
    actual, clipped = pushes(name, [1.0, 1.0], [0.7, -1.3, 0.0])
    torch.testing.assert_close(actual.float(), torch.tensor([[0.7, 0.7], [-1.3, -1.3], [0.0, 0.0]]))
    assert not clipped.any()


@pytest.mark.parametrize("name", PUSHES)
def test_a_falsified_behavior_logprob_gives_finite_losses(name: str) -> None:
    actual, _ = pushes(name, [math.exp(150.0), math.exp(-150.0)], [1.0, -1.0])
    assert torch.isfinite(actual).all()
    assert float(actual.abs().max()) <= math.exp(LOG_RATIO_LIMIT)


def test_grpo_values_are_those_of_the_clipped_surrogate() -> None:
    behavior_BT = torch.zeros(2, 3, dtype=torch.float64)
    logprobs_BT = torch.tensor([[0.5, 1.0, 1.5]] * 2, dtype=torch.float64).log()
    terms = LOSSES["grpo"](
        logprobs_BT, behavior_BT, torch.tensor([2.0, -2.0], dtype=torch.float64), ALGORITHMS["grpo"]
    )
    # −min(r·A, clip(r, 0.8, 1.2)·A)
    assert terms.loss_BT.tolist()[0] == pytest.approx([-1.0, -2.0, -2.4])
    assert terms.loss_BT.tolist()[1] == pytest.approx([1.6, 2.0, 3.0])
