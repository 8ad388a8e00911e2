"""Checkpoints: everything a learner needs to go on as if nothing had happened, in files that cannot run code.

    <folder>/v<n>/model.safetensors       master weights, float32
    <folder>/v<n>/optimizer.safetensors   AdamW's moments
    <folder>/v<n>/state.json              version, counters, consumed groups, random state
    <folder>/v<n>/manifest.json           size and SHA-256 of the others, written last

The newest one whose files match its manifest wins; a damaged one is named in a warning and passed over.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.files import (
    file_digest,
    keep_newest,
    new_directory,
    read_json,
    version_directories,
    write_json,
)

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, STATE, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
FORMAT = 2


class CheckpointError(Exception):
    """No checkpoint can be used although there are some; the message says what to do."""


class _Damaged(Exception):
    """One checkpoint cannot be used."""


@dataclass(frozen=True)
class LearnerState:
    """All of a learner that is not a tensor."""

    run_id: bytes
    policy: bytes
    version: int
    updates: int
    consumed: dict[int, list[bytes]]
    """Group ids by the version that training on them made, of recent versions."""
    eval_before: float | None
    elapsed_s: float
    """Time since training first started, over all lives of the learner."""
    generator_state: dict[str, Any]
    """Of the NumPy generator that draws external groups."""
    torch_state: bytes
    controls: dict[str, float]
    """What the learner adapts or counts from update to update, by name."""


@dataclass(frozen=True)
class Checkpoint:
    state: LearnerState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write one; it exists completely or not at all, whenever the process dies. Keeps the `keep` newest."""
    final = folder / f"v{checkpoint.state.version}"
    with new_directory(final) as temporary:
        save_file(_on_cpu(checkpoint.model), temporary / MODEL)
        save_file(_on_cpu(checkpoint.optimizer), temporary / OPTIMIZER)
        write_json(temporary / STATE, _plain(checkpoint.state))
        files = {
            name: {"size_bytes": (temporary / name).stat().st_size, "sha256": file_digest(temporary / name)}
            for name in (MODEL, OPTIMIZER, STATE)
        }
        write_json(
            temporary / MANIFEST, {"format": FORMAT, "version": checkpoint.state.version, "files": files}
        )
    keep_newest(folder, keep)
    return final


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint; None when there is none at all. Raises `CheckpointError` if all are
    damaged."""
    newest = load_newest_up_to(folder, None)
    found = version_directories(folder)
    if newest is None and found:
        raise CheckpointError(
            f"all {len(found)} checkpoints in {folder} are damaged: restore them from a copy, or delete the "
            "folder to start again from the base model"
        )
    return newest


def load_newest_up_to(folder: Path, version: int | None) -> Checkpoint | None:
    """The newest complete checkpoint of `version` or an earlier one; None when there is none."""
    for found, directory in sorted(version_directories(folder).items(), reverse=True):
        if version is not None and found > version:
            continue
        try:
            return _load(directory, found)
        except _Damaged as error:
            log.warning("checkpoint %s is damaged (%s): trying the one before it", directory, error)
    return None


def _load(directory: Path, version: int) -> Checkpoint:
    try:
        manifest = read_json(directory / MANIFEST)
        if manifest["format"] != FORMAT or manifest["version"] != version:
            raise _Damaged(f"its {MANIFEST} is of another format or version")
        for name in (MODEL, OPTIMIZER, STATE):
            expected = manifest["files"][name]
            path = directory / name
            if path.stat().st_size != expected["size_bytes"] or file_digest(path) != expected["sha256"]:
                raise _Damaged(f"{name} does not match its {MANIFEST}")
        return Checkpoint(
            state=_from_plain(read_json(directory / STATE)),
            model=load_file(directory / MODEL),
            optimizer=load_file(directory / OPTIMIZER),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def generator_from(state: dict[str, Any]) -> np.random.Generator:
    """The NumPy generator whose `bit_generator.state` this was."""
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _plain(state: LearnerState) -> dict[str, Any]:
    return {
        "run_id": state.run_id.hex(),
        "policy": state.policy.hex(),
        "version": state.version,
        "updates": state.updates,
        "consumed": {str(version): [name.hex() for name in ids] for version, ids in state.consumed.items()},
        "eval_before": state.eval_before,
        "elapsed_s": state.elapsed_s,
        "generator_state": state.generator_state,
        "torch_state": state.torch_state.hex(),
        "controls": state.controls,
    }


def _from_plain(value: dict[str, Any]) -> LearnerState:
    return LearnerState(
        run_id=bytes.fromhex(value["run_id"]),
        policy=bytes.fromhex(value["policy"]),
        version=value["version"],
        updates=value["updates"],
        consumed={
            int(version): [bytes.fromhex(name) for name in ids] for version, ids in value["consumed"].items()
        },
        eval_before=value["eval_before"],
        elapsed_s=value["elapsed_s"],
        generator_state=value["generator_state"],
        torch_state=bytes.fromhex(value["torch_state"]),
        controls={name: float(number) for name, number in value["controls"].items()},
    )


def torch_random_state() -> bytes:
    """The state of PyTorch's CPU generator."""
    return torch.get_rng_state().numpy().tobytes()


def set_torch_random_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
