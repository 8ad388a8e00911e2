"""The policy in training: a causal language model with float32 master weights, and log-probs of completions
under it.

The model stays in evaluation mode: dropout would make the ratio at zero lag differ from 1. Only folders on
disk are read, only safetensors, and no code that comes with a model is ever run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from protocol.adapter import AdapterSpec
from trainer.batching import MicroBatch
from trainer.forward import row_logits, row_predictions
from trainer.head import chosen_logprobs
from trainer.lora import AdapterError, add_adapter, loadable_tensors, without_adapter
from trainer.model_checks import known_head, share_prompts_if_exact
from trainer.shared_prompts import can_share_prompts, packed_predictions


class PolicyLoadError(Exception):
    """A model folder cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of each completion token: log-prob (with gradient) and the entropy of its distribution (without)."""

    logprobs_BT: Tensor
    entropy_BT: Tensor


class Policy:
    """`model` holds the master weights. `share_prompts` tells whether a prompt is computed once for its
    completions."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        autocast: bool = False,
        share_prompts: bool | None = None,
        fp32_head: bool = True,
        checkpoint_layers: bool = False,
    ) -> None:
        """`autocast`: compute in bfloat16, but for the last layer when `fp32_head`. `checkpoint_layers`: keep
        only the layers' inputs for the backward pass and compute the rest again. `share_prompts`: None means
        whether the model allows it."""
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._autocast = autocast
        self._head = known_head(model, autocast=autocast)
        self._head_dtype = torch.float32 if fp32_head or not autocast else torch.bfloat16
        exact = share_prompts is not False and share_prompts_if_exact(model, self._head, autocast=autocast)
        self.share_prompts = exact
        if checkpoint_layers:
            checkpoint_decoder_layers(model)

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """Log-probs [B, T] of the completion tokens under softmax(logits / temperature), in float32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            if self._head is None:
                logits_BTV = row_logits(self.model, batch).float() / temperature
                return _from_logits(logits_BTV, batch.completion_ids_BT)
            shared = self.share_prompts and can_share_prompts(self.model.config, batch)
            found = (packed_predictions if shared else row_predictions)(self.model, batch)
        logprobs_M, entropy_M = chosen_logprobs(found, self._head, temperature, self._head_dtype)
        width = batch.mask_BT.shape[1]
        places = found.places_M // width, found.places_M % width
        nothing_BT = torch.zeros_like(batch.mask_BT)
        return TokenLogprobs(
            nothing_BT.index_put(places, logprobs_M), nothing_BT.index_put(places, entropy_M)
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is trained and published, live, by name: the adapter where there is one, else all weights and
        buffers; of tensors that share memory (tied embeddings) only the first."""
        return self._live_tensors()

    # Where several processes hold a policy, these three are more than nothing (`trainer.sharded_policy`).

    def tell(self, action: str, tensors: Mapping[str, Tensor] | None = None, **values: Any) -> None:
        """Have all who hold a part of this policy do `action` too. Here it has one holder."""

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole of tensors of which this process holds a part."""
        return tensors

    def part_of(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, split and placed as `like` is."""
        return tensor.to(like.device, copy=True)

    def _live_tensors(self) -> dict[str, Tensor]:
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in loadable_tensors(self.model).items():
            unique.setdefault(id(tensor), (name, tensor.detach()))
        return dict(unique.values())

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy weights in, in place. Raises `PolicyLoadError` when names or shapes are not this model's."""
        own = self._live_tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise PolicyLoadError(
                "the saved weights are not of this model: give the model that the run began with"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.part_of(tensors[name], tensor))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the model is the base model."""
        with without_adapter(self.model):
            yield

    def sequence_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-prob (temperature 1) of each token after the first given those before it, without gradient."""
        ids = torch.tensor([token_ids], device=self.device)
        with torch.no_grad():
            logprobs = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return [float(value) for value in logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)]

    @contextmanager
    def rounded_to_bfloat16(self) -> Iterator[None]:
        """Inside, the model computes with the weights that it publishes. One module's are in memory twice at
        a time."""
        masters: dict[nn.Parameter, Tensor] = {}

        def round_weights(module: nn.Module, _inputs: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:  # a frozen base model is not published, and nobody rounds it
                    masters[parameter] = parameter.data
                    parameter.data = parameter.data.to(torch.bfloat16).float()

        def restore(module: nn.Module, *_: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter in masters:
                    parameter.data = masters.pop(parameter)

        handles = []
        for module in self.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(round_weights))
                handles.append(module.register_forward_hook(restore, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, master in masters.items():
                parameter.data = master


class BasePolicy:
    """The base model under a policy's adapter, without a copy of it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """As `Policy.token_logprobs`."""
        with self._policy.without_adapter():
            return self._policy.token_logprobs(batch, temperature)


def load_policy(
    model_dir: Path | str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    adapter: AdapterSpec | None = None,
    seed: int = 0,
    fp32_head: bool = True,
    checkpoint_layers: bool = False,
) -> Policy:
    """The policy of a Hugging Face folder. `dtype` "bfloat16" computes in it.

    What is trained is float32 either way; a base model under an adapter is kept in `dtype`. `seed` is that of
    the adapter's first weights. Raises `PolicyLoadError` with one line.
    """
    if dtype not in ("float32", "bfloat16"):
        raise PolicyLoadError(f"dtype {dtype!r} is not known: choose float32 or bfloat16")
    folder = Path(model_dir)
    if not folder.is_dir():
        raise PolicyLoadError(f"no model folder at {folder}: give the path of a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise PolicyLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise PolicyLoadError(
            f"{folder} has no *.safetensors: convert the model, save_pretrained of transformers does"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=torch.bfloat16 if adapter is not None and dtype == "bfloat16" else torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a corrupt file surfaces as any of a dozen classes of four libraries
        raise PolicyLoadError(
            f"the model in {folder} cannot be loaded ({_one_line(error)}): copy or download the folder again"
        ) from error
    model, info = loaded
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise PolicyLoadError(
            f"the weights in {folder} do not fit its config.json ({len(absent)} missing or of another shape, "
            f"first {absent[0]}): copy or download the folder again"
        )
    if adapter is not None:
        try:
            add_adapter(model, adapter, dtype=torch.float32, seed=seed)
        except AdapterError as error:
            raise PolicyLoadError(str(error)) from error
    try:
        model = model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise PolicyLoadError(f"device {device!r} cannot be used: {_one_line(error)}") from error
    return Policy(
        model, autocast=dtype == "bfloat16", fp32_head=fp32_head, checkpoint_layers=checkpoint_layers
    )


def _from_logits(logits_BTV: Tensor, ids_BT: Tensor) -> TokenLogprobs:
    logprobs_BTV = logits_BTV.log_softmax(-1)
    with torch.no_grad():
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    return TokenLogprobs(logprobs_BTV.gather(-1, ids_BT[..., None])[..., 0], entropy_BT)


def checkpoint_decoder_layers(model: PreTrainedModel) -> None:
    """Keep only what goes into each decoder layer. Raises `PolicyLoadError`.

    Dropout stays off: the layers themselves are in training mode, which is where transformers looks, but not
    what is in them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise PolicyLoadError(
            f"{type(model).__name__} cannot checkpoint its layers: set learner.gradient_checkpointing = false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
