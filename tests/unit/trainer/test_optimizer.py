"""The optimizer: AdamW's arithmetic, warm-up, clipping, and a state that survives being written down."""

import pytest
import torch

from protocol.run_spec import AlgorithmSpec
from tests.unit.trainer.factory import tiny_model
from trainer.optimizer import Optimizer, learning_rate
from trainer.policy import Policy, PolicyLoadError


def set_gradients(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("warmup", "updates", "expected"), [(0, 0, 1.0), (4, 0, 0.25), (4, 1, 0.5), (4, 3, 1.0), (4, 99, 1.0)]
)
def test_warm_up_is_linear(warmup: int, updates: int, expected: float) -> None:
    algorithm = AlgorithmSpec(learning_rate=0.5, warmup_updates=warmup)
    assert learning_rate(algorithm, updates) == 0.5 * expected


def test_a_batch_that_is_worth_fewer_completions_gets_a_smaller_step() -> None:
    algorithm = AlgorithmSpec(learning_rate=0.5, warmup_updates=2, ess_lr_scaling=True)
    assert learning_rate(algorithm, 0, ess_ratio=0.25) == pytest.approx(0.5 * 0.5 * 0.5)
    assert learning_rate(algorithm, 5, ess_ratio=1.0) == 0.5
    assert learning_rate(AlgorithmSpec(learning_rate=0.5), 5, ess_ratio=0.25) == 0.5


def test_the_first_step_is_adamws() -> None:
    algorithm = AlgorithmSpec(learning_rate=0.01, weight_decay=0.1, max_grad_norm=1e6)
    policy = Policy(tiny_model())
    optimizer = Optimizer(policy, algorithm)
    set_gradients(policy, 0)
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    assert optimizer.step(0) == 0.01
    for name, value in before.items():
        decay = 0.1 if value.ndim >= 2 else 0.0
        gradient = gradients[name]
        # With bias correction the first step is lr · g / (|g| + 1e-8).
        expected = value * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(policy.tensors()[name], expected, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_gradients_are_clipped_to_the_norm_and_their_own_norm_is_reported() -> None:
    policy = Policy(tiny_model())
    optimizer = Optimizer(policy, AlgorithmSpec(max_grad_norm=0.5))
    set_gradients(policy, 0)

    def norm() -> float:
        return float(
            torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]).norm()
        )

    before = norm()
    assert optimizer.clip_gradients() == pytest.approx(before, rel=1e-5)
    assert norm() == pytest.approx(0.5, rel=1e-4)


def test_a_saved_state_continues_bit_for_bit() -> None:
    algorithm = AlgorithmSpec(learning_rate=0.01)
    first, second = Policy(tiny_model()), Policy(tiny_model())
    straight = Optimizer(first, algorithm)
    for step in range(3):
        set_gradients(first, step)
        straight.step(step)
        if step == 1:
            resumed = Optimizer(second, algorithm)
            resumed.load_tensors({name: tensor.clone() for name, tensor in straight.tensors().items()})
            second.load_tensors(first.tensors())
    set_gradients(second, 2)
    resumed.step(2)
    for one, other in ((first.tensors(), second.tensors()), (straight.tensors(), resumed.tensors())):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(PolicyLoadError, match=r"exp_avg\.nothing"):
        Optimizer(Policy(tiny_model()), AlgorithmSpec()).load_tensors({"exp_avg.nothing": torch.zeros(1)})
