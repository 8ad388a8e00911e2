"""AdamW with gradient clipping and linear warm-up, and its state as named tensors (never a pickle)."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from protocol.algorithm import AlgorithmSpec
from trainer.policy import Policy, PolicyLoadError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """One AdamW over a policy's weights. Weight decay falls on matrices only."""

    def __init__(self, policy: Policy, algorithm: AlgorithmSpec) -> None:
        policy.tell("optimizer", algorithm=algorithm.encode())
        self._policy, self._algorithm = policy, algorithm
        self._parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        groups = [
            {
                "params": [p for p in self._parameters.values() if p.ndim >= 2],
                "weight_decay": algorithm.weight_decay,
            },
            {"params": [p for p in self._parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=algorithm.learning_rate,
            betas=(algorithm.adam_beta1, algorithm.adam_beta2),
            fused=True,
        )

    def clip_gradients(self) -> float:
        """Scale the gradients to a norm of at most `max_grad_norm`; their norm before that."""
        self._policy.tell("clip_gradients")
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._algorithm.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, updates_done: int, ess_ratio: float = 1.0) -> float:
        """One step with the accumulated gradients, which are cleared. Returns the learning rate.

        `ess_ratio` is the effective share of the batch's completions; 1 on policy.
        """
        self._policy.tell("step", updates_done=updates_done, ess_ratio=ess_ratio)
        rate = learning_rate(self._algorithm, updates_done, ess_ratio)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return rate

    def clear_gradients(self) -> None:
        self._policy.tell("clear_gradients")
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The live state, named "<moment>.<parameter>"."""
        self._policy.tell("optimizer_tensors")
        return self._policy.whole(
            {
                f"{moment}.{name}": self._adamw.state[parameter][moment]
                for name, parameter in self._parameters.items()
                if parameter in self._adamw.state
                for moment in MOMENTS
            }
        )

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over a saved state. Raises `PolicyLoadError` when it is not one of this model."""
        self._policy.tell("load_optimizer", tensors)
        self._adamw.state.clear()
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            parameter = self._parameters.get(name)
            if moment not in MOMENTS or parameter is None:
                raise PolicyLoadError(
                    f"the saved optimizer state has {key!r}, this model has not: give the model of the run"
                )
            state = self._adamw.state[parameter]
            if moment == "step":
                state[moment] = tensor.to(parameter.device, copy=True)
            else:
                state[moment] = self._policy.part_of(tensor, parameter)


def learning_rate(algorithm: AlgorithmSpec, updates_done: int, ess_ratio: float = 1.0) -> float:
    """Linear from learning_rate / warmup_updates to learning_rate over the first `warmup_updates` updates.

    With `ess_lr_scaling` times √ess_ratio: a batch that is worth fewer completions gets a smaller step (VCPO,
    arXiv 2602.17616; the on-policy share is 1).
    """
    rate = algorithm.learning_rate
    if algorithm.warmup_updates:
        rate *= min(1.0, (updates_done + 1) / algorithm.warmup_updates)
    return rate * math.sqrt(min(1.0, ess_ratio)) if algorithm.ess_lr_scaling else rate
