"""One policy over several processes (FSDP2): each holds a part of every weight and computes part of a batch.

The leader runs the learner as if the policy were its alone. What the policy does, the followers do with it:
a micro-batch's completions are shared out by their tokens, log-probs come together on the leader, which
computes the loss, and the gradient of the log-probs goes back to whoever computed them. So losses, metrics
and the learner know nothing of processes, and one process and many make the same update but for rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from protocol.adapter import AdapterSpec
from protocol.algorithm import AlgorithmSpec
from trainer.batching import MicroBatch
from trainer.distributed import Message, Processes
from trainer.optimizer import Optimizer
from trainer.policy import Policy, TokenLogprobs, load_policy


class ShardedPolicy(Policy):
    """See `Policy`. The leader's methods have the followers do the same with their parts."""

    def __init__(self, policy: Policy, processes: Processes) -> None:
        """Takes over `policy`, of which every process has the same one, and keeps this process's part."""
        vars(self).update(vars(policy))
        self._processes = processes
        _shard(self.model, processes)
        # A method of the model, so that weights are gathered before it and freed after it.
        self.model.logprobs_of_part = self._logprobs_of_part
        register_fsdp_forward_method(self.model, "logprobs_of_part")

    def _logprobs_of_part(self, part: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        found = super().token_logprobs(part, temperature)
        return found.logprobs_BT, found.entropy_BT

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        gradient = torch.is_grad_enabled()
        self.tell("token_logprobs", vars(batch), temperature=temperature, gradient=gradient)
        part = self.part_logprobs(batch, temperature)
        logprobs_BT, entropy_BT = _Together.apply(
            part.logprobs, part.entropy.detach(), part, lambda gradient: self.tell("backward", gradient)
        )
        return TokenLogprobs(logprobs_BT, entropy_BT)

    def part_logprobs(self, batch: MicroBatch, temperature: float) -> "Part":
        """This process's part of a batch. One that has none computes a row all the same, for nothing: the
        others could not do without its weights."""
        rows = rows_of_process(batch, self._processes.rank, self._processes.count)
        computed = rows if rows.stop > rows.start else slice(0, 1)
        logprobs, entropy = self.model.logprobs_of_part(select_rows(batch, computed), temperature)
        if not torch.is_grad_enabled():
            self._free()
        return Part(logprobs, entropy, rows, batch.mask_BT.shape)

    def _free(self) -> None:
        """Keep only this process's part again of the weights outside the layers: gathered by a computation
        without a backward pass, they would stay, and stay what they were."""
        self.model.reshard()

    def _live_tensors(self) -> dict[str, Tensor]:
        self._free()
        return super()._live_tensors()

    def tell(self, action: str, tensors: Mapping[str, Tensor] | None = None, **values: Any) -> None:
        if self._processes.leads:
            self._processes.send(action, tensors, **values)

    def tensors(self) -> dict[str, Tensor]:
        """What is trained and published, gathered in the leader's host memory; followers get nothing."""
        self.tell("tensors")
        return self.whole(self._live_tensors())

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gathered = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._processes.leads:
                gathered[name] = full.cpu()
        return gathered

    def part_of(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().part_of(tensor, like)
        # Everybody has the whole: nothing needs to be sent.
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.tell("load_tensors", tensors)
        super().load_tensors(tensors)

    def sequence_logprobs(self, token_ids: list[int]) -> list[float]:
        self.tell("sequence_logprobs", token_ids=token_ids)
        found = super().sequence_logprobs(token_ids)
        self._free()
        return found

    @contextmanager
    def rounded_to_bfloat16(self) -> Iterator[None]:
        """Inside, the model computes with the weights that it publishes. This process's part is in memory
        twice."""
        self.tell("enter", context="rounded_to_bfloat16")
        self._free()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        before = {parameter: _local(parameter).clone() for parameter in trained}
        try:
            for parameter in before:
                _local(parameter).copy_(_local(parameter).to(torch.bfloat16))
            yield
        finally:
            self.tell("leave")
            for parameter, tensor in before.items():
                _local(parameter).copy_(tensor)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        self.tell("enter", context="without_adapter")
        try:
            with super().without_adapter():
                yield
        finally:
            self.tell("leave")

    def close(self) -> None:
        """The followers end."""
        self.tell("stop")


@dataclass(frozen=True)
class Part:
    """What one process computed of a batch of `shape` (B, T): the rows `rows`, unless these are none."""

    logprobs: Tensor
    entropy: Tensor
    rows: slice
    shape: tuple[int, ...]

    def placed(self) -> Tensor:
        """Log-probs and entropies [2, B, T], zeros where other processes compute."""
        both = self.logprobs.new_zeros(2, *self.shape)
        count = self.rows.stop - self.rows.start
        both[0, self.rows], both[1, self.rows] = self.logprobs[:count].detach(), self.entropy[:count].detach()
        return both

    def own(self, gradient_BT: Tensor) -> Tensor:
        """The part of a gradient that belongs to `logprobs`."""
        own = torch.zeros_like(self.logprobs)
        own[: self.rows.stop - self.rows.start] = gradient_BT[self.rows]
        return own


class _Together(torch.autograd.Function):
    """All processes' parts as one; its gradient is sent to all, and the leader goes on with its own."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor, part: Part, send: Callable[[Mapping[str, Tensor]], None]
    ) -> tuple[Tensor, Tensor]:
        ctx.part, ctx.send = part, send
        both = part.placed()
        dist.all_reduce(both)
        ctx.mark_non_differentiable(entropy_BT := both[1].clone())
        return both[0].clone(), entropy_BT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.send({"gradient": grads[0]})
        return ctx.part.own(grads[0]), None, None, None


def rows_of_process(batch: MicroBatch, rank: int, count: int) -> slice:
    """Neighbouring rows for each process, of about equal work: a row's tokens and a share of its prompt's."""
    rows_per_prompt = torch.bincount(batch.row_prompts_B, minlength=len(batch.prompt_lengths_P))
    work_B = batch.mask_BT.sum(-1) + (batch.prompt_lengths_P / rows_per_prompt)[batch.row_prompts_B]
    # A row belongs to the process in whose share of the work its middle lies.
    middles_B = work_B.cumsum(0) - work_B / 2
    owners_B = (middles_B * count / work_B.sum()).long().clamp(max=count - 1)
    start = int((owners_B < rank).sum())
    return slice(start, start + int((owners_B == rank).sum()))


def select_rows(batch: MicroBatch, rows: slice) -> MicroBatch:
    """Some neighbouring rows of a batch and their prompts."""
    prompts, row_prompts = batch.row_prompts_B[rows].unique(return_inverse=True)
    by_prompt = {
        "prompt_ids_PL": batch.prompt_ids_PL[prompts],
        "prompt_lengths_P": batch.prompt_lengths_P[prompts],
    }
    by_row = {name: tensor[rows] for name, tensor in vars(batch).items() if name not in by_prompt}
    return replace(batch, **{**by_row, **by_prompt, "row_prompts_B": row_prompts})


def load_sharded_policy(
    processes: Processes,
    model_dir: Path | str,
    *,
    device: str = "cpu",
    adapter: AdapterSpec | None = None,
    **settings: Any,
) -> ShardedPolicy:
    """The leader's `load_policy`: every process reads the folder and keeps its part. Raises
    `PolicyLoadError`."""
    policy = load_policy(model_dir, device=device, adapter=adapter, **settings)
    encoded = None if adapter is None else adapter.encode()
    processes.send("load_policy", model_dir=str(model_dir), device=device, adapter=encoded, **settings)
    return ShardedPolicy(policy, processes)


def follow(processes: Processes) -> None:
    """What a follower does, until the leader closes its policy."""
    first = processes.receive()
    if first.action == "stop":
        return
    values = dict(first.values)
    encoded = values.pop("adapter")
    adapter = None if encoded is None else AdapterSpec.decode(encoded)
    policy = ShardedPolicy(load_policy(values.pop("model_dir"), adapter=adapter, **values), processes)
    actions = _Actions(policy)
    while (message := processes.receive()).action != "stop":
        getattr(actions, message.action)(message)


class _Actions:
    """What a follower does at each of the leader's words."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self._policy = policy
        self._optimizer: Optimizer | None = None
        self._parts: list[Part] = []
        self._entered: list[ExitStack] = []

    def token_logprobs(self, message: Message) -> None:
        batch = MicroBatch(**message.tensors).to(self._policy.device)
        with torch.set_grad_enabled(message.values["gradient"]):
            part = self._policy.part_logprobs(batch, message.values["temperature"])
        dist.all_reduce(part.placed())
        if message.values["gradient"]:
            self._parts.append(part)

    def backward(self, message: Message) -> None:
        part = self._parts.pop()
        part.logprobs.backward(part.own(message.tensors["gradient"].to(self._policy.device)))

    def optimizer(self, message: Message) -> None:
        self._optimizer = Optimizer(self._policy, AlgorithmSpec.decode(message.values["algorithm"]))

    def clip_gradients(self, message: Message) -> None:
        self._own_optimizer.clip_gradients()

    def step(self, message: Message) -> None:
        self._own_optimizer.step(**message.values)

    def clear_gradients(self, message: Message) -> None:
        self._parts.clear()
        self._own_optimizer.clear_gradients()

    def tensors(self, message: Message) -> None:
        self._policy.tensors()

    def load_tensors(self, message: Message) -> None:
        self._policy.load_tensors(dict(message.tensors))

    def optimizer_tensors(self, message: Message) -> None:
        self._own_optimizer.tensors()

    def load_optimizer(self, message: Message) -> None:
        self._own_optimizer.load_tensors(dict(message.tensors))

    def sequence_logprobs(self, message: Message) -> None:
        self._policy.sequence_logprobs(message.values["token_ids"])

    def enter(self, message: Message) -> None:
        stack = ExitStack()
        stack.enter_context(getattr(self._policy, message.values["context"])())
        self._entered.append(stack)

    def leave(self, message: Message) -> None:
        self._entered.pop().close()

    @property
    def _own_optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "the leader makes an optimizer before it uses one"
        return self._optimizer


def _shard(model: PreTrainedModel, processes: Processes) -> None:
    """Split every weight; a layer's are gathered while it computes."""
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=processes.mesh)
    fully_shard(model, mesh=processes.mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is one for all, so gradients add up. Sums are what every back end has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _local(parameter: nn.Parameter) -> Tensor:
    """This process's part of a weight, live."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
