"""The model that an engine runs, from a folder: empty for whole versions, or the base model for adapters."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from protocol.adapter import AdapterSpec
from swarmnode.engines.base import EngineError
from swarmnode.engines.memory import refuse_unless_fits
from trainer.lora import add_adapter


def model_without_weights(
    model_dir: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Any:
    """A model of the folder's configuration whose weights are yet to be loaded. Raises `EngineError`,
    `NotEnoughMemory`."""
    try:
        # Twice, because old and new weights are both there while a version is loaded and checked.
        _refuse_unless_fits(config, dtype, device, copies=2)
        model = _empty(config, dtype)
        model.tie_weights()  # part of the initialization that was left out
        return model.to(device).eval().requires_grad_(False)
    except (ValueError, ImportError, OSError) as error:
        raise EngineError(f"{model_dir}: transformers cannot build this model: {error}") from error


def _empty(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _refuse_unless_fits(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, copies: int
) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in _empty(config, dtype).parameters())
    refuse_unless_fits(
        copies * count * dtype.itemsize,
        device,
        f"a model of {count / 1e6:,.1f} million parameters",
        'use engine.dtype = "bfloat16", a smaller model, or another machine',
    )


def base_model_with_adapter(
    model_dir: Path,
    config: PreTrainedConfig,
    adapter: AdapterSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The folder's model, weights included, with an adapter that changes nothing yet. Raises `EngineError`,
    `NotEnoughMemory`."""
    if not any(model_dir.glob("*.safetensors")):
        raise EngineError(f"{model_dir} has no *.safetensors: the run's adapter needs its base model")
    try:
        _refuse_unless_fits(config, dtype, device, copies=1)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        add_adapter(model, adapter, dtype=dtype)
    except (ValueError, ImportError, OSError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"{model_dir}: the base model cannot be used: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        what = str(error).splitlines()[0]
        raise EngineError(
            f'engine.device = "{name}" cannot be used ({what}): use "cpu", or a torch built for that device'
        ) from error
    return device


def load_config(model_dir: Path) -> PreTrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise EngineError(f"{model_dir} is not a model folder: it has no config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_dir, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        raise EngineError(f"{model_dir}/config.json cannot be used: {error}") from error
    return config
