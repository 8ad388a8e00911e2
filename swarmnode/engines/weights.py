"""Weights of a version, from a safetensors file into a running model: all checks come before any change."""

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from swarmnode.engines.base import LoadError

FLOAT_TYPES = frozenset({"BF16", "F16", "F32"})

Tensors = dict[str, torch.Tensor]


def tied_names(own: Tensors) -> list[list[str]]:
    """The names, those of one tensor (tied weights) together."""
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        by_tensor[id(tensor)].append(name)
    return list(by_tensor.values())


def read_weights(path: Path, own: Tensors) -> Tensors:
    """The file's tensors for a model whose live ones are `own`: one per tied group, on its device, in its
    types.

    Raises `LoadError` unless the file has every one, nothing else, in the same shapes, finite.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            present = set(file.keys())
            _refuse_other_names(path, present, own, tied_names(own))
            for name in sorted(present):
                part = file.get_slice(name)
                shape, kind = list(part.get_shape()), part.get_dtype()
                if shape != list(own[name].shape):
                    raise LoadError(
                        f"{path}: {name} has shape {shape}, the model needs {list(own[name].shape)}"
                    )
                if own[name].is_floating_point() and kind not in FLOAT_TYPES:
                    raise LoadError(
                        f"{path}: {name} is of type {kind}, only {', '.join(sorted(FLOAT_TYPES))} load"
                    )
            return _read_checked(path, file, present, own, tied_names(own))
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} cannot be read as safetensors: {error}") from error


def _refuse_other_names(path: Path, present: set[str], own: Tensors, groups: list[list[str]]) -> None:
    missing = [names[0] for names in groups if not present.intersection(names)]
    unknown = sorted(present - own.keys())
    if missing or unknown:
        what = [f"lacks {len(missing)} weights, such as {missing[0]}"] if missing else []
        what += [f"has {len(unknown)} that the model does not, such as {unknown[0]}"] if unknown else []
        raise LoadError(f"{path} is of another model: it {' and '.join(what)}")


def _read_checked(
    path: Path, file: safe_open, present: set[str], own: Tensors, groups: list[list[str]]
) -> Tensors:
    tensors: Tensors = {}
    for names in groups:
        given = [name for name in names if name in present]
        first = file.get_tensor(given[0])
        for other in given[1:]:
            if not torch.equal(first, file.get_tensor(other)):
                raise LoadError(
                    f"{path}: {given[0]} and {other} are one weight in this model but differ here"
                )
        if first.is_floating_point() and not torch.isfinite(first).all():
            raise LoadError(f"{path}: {given[0]} holds values that are not finite")
        target = own[names[0]]
        # A copy, since what the reader hands out may be the mapped file itself.
        tensors[names[0]] = first.to(device=target.device, dtype=target.dtype, copy=True)
    return tensors


def swap_weights(own: Tensors, tensors: Tensors) -> Tensors:
    """Put `tensors` (one per tied group) in the place of a model's own; return what was there before."""
    previous: Tensors = {}
    for name, tensor in tensors.items():
        previous[name] = own[name].data
        own[name].data = tensor
    return previous
