"""Low-rank adapters in a model, for the learner and for whatever generates with its versions: the same layers
(peft's), under the same names, so that both compute the same.

A version's file holds `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Nothing is ever merged into the
base model: in 16-bit weights most of a small adapter would be rounded away.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from protocol.adapter import AdapterSpec

ADAPTER = "default"
"""Peft's name of the only adapter there is; left out of the names of tensors."""


class AdapterError(ValueError):
    """An adapter does not fit a model. One line that says what to change."""


def add_adapter(model: PreTrainedModel, spec: AdapterSpec, *, dtype: torch.dtype, seed: int = 0) -> None:
    """Freeze the model and add an adapter, which at first changes nothing: B is 0, A follows from `seed`.

    Raises `AdapterError`.
    """
    # Here and not above: a second and a half that runs without an adapter do not need.
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(model, spec)
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # a float will do
        target_modules=spec.target_modules,
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    trained = {id(parameter) for parameter in adapter_tensors(model).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
        if id(parameter) in trained:
            parameter.data = parameter.data.to(dtype)
    model.eval()


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The live tensors of the model's adapter, by the names that a version's file has; empty without one."""
    return {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
    }


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would also stop and restart their gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def loadable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a version's file replaces, live, by name: the adapter where there is one, else all weights and
    buffers (tied ones once per name, as one object)."""
    adapter: dict[str, Tensor] = dict(adapter_tensors(model))
    return adapter or dict(model.state_dict(keep_vars=True))


def _check_targets(model: PreTrainedModel, spec: AdapterSpec) -> None:
    output = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    for target in spec.target_modules:
        named = [name for name in linear if name == target or name.endswith("." + target)]
        others = [
            name
            for name, _ in model.named_modules()
            if (name == target or name.endswith("." + target)) and name not in linear
        ]
        if others:
            raise AdapterError(
                f"adapter.target_modules: {target} is {others[0]}, which can have no adapter: only linear "
                "layers other than the last one can"
            )
        if not named:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise AdapterError(
                f"adapter.target_modules: the model has no linear layer {target}; it has {', '.join(known)}"
            )
