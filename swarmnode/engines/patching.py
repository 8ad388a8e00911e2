"""Deltas applied to the weights of a running model: only what changed is written, and it can be taken back.

A delta tells new values by the bits of the old ones, so a weight can be patched only if the model holds it
without loss: in the file's own type, or as a float32 made from bfloat16 or float16.
"""

import mmap
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.delta import Change, DeltaError, DeltaFile
from swarmnode.engines.base import LoadError
from swarmnode.engines.layout import Layout, Placed

Array = npt.NDArray[Any]

_SAME = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types to move bits about in, by size."""
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
"""All of these bits set: the value is not finite."""


def _float16_of(bits: Array) -> Array:
    return bits.view(np.float32).astype(np.float16).view(np.uint16)


def _from_float16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


Convert = Callable[[Array], Array]


@dataclass(frozen=True)
class _Live:
    """One tensor of the file in the running model."""

    placed: Placed
    width: int
    """Bytes per element in the file."""
    bits: torch.Tensor
    """The model's elements as integers, flat, in its own memory. Of a float32 made from a bfloat16 the upper
    half only: they are the same but for sixteen zeros."""
    convert: tuple[Convert, Convert] | None
    """From the model's bits to those in the file, and back."""


@dataclass(frozen=True)
class _Written:
    bits: torch.Tensor
    at: torch.Tensor
    before: torch.Tensor


class LivePatch:
    """Changes to the weights of one model that can be undone. The model must not compute meanwhile."""

    def __init__(self, own: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """`own` are the model's weights by the names they have in the file that they were loaded from (those
        of one weight are one object), `layout` is that file's.

        Raises `LoadError` when the model does not hold some weight as the file does.
        """
        self._size = layout.size_bytes
        named: dict[int, str] = {}
        for placed in layout.tensors:
            if placed.name not in own:
                raise LoadError(f"{placed.name} is in the file but not in this model")
            other = named.setdefault(id(own[placed.name]), placed.name)
            if other != placed.name:
                raise LoadError(f"{other} and {placed.name} are one weight in this model but two in the file")
        self._live = [_live(placed, own[placed.name]) for placed in layout.tensors]
        self._begins = [live.placed.begin for live in self._live]
        self._written: list[_Written] = []

    def apply(self, path: Path) -> None:
        """Apply one delta. Raises `LoadError`; what was written until then stays, for `undo`."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                delta = DeltaFile(data)
                if delta.snapshot_size != self._size:
                    raise LoadError(
                        f"{path} is for a file of {delta.snapshot_size} bytes, this one has {self._size}"
                    )
                for index in range(delta.chunk_count):
                    for change in delta.changes(index):
                        self._apply(change)
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} cannot be applied: {error}") from error

    def undo(self) -> None:
        """Put back what was there before, bit for bit."""
        while self._written:
            written = self._written.pop()
            written.bits.index_copy_(0, written.at, written.before)

    def _apply(self, change: Change) -> None:
        offsets, at = change.offsets, 0
        while at < len(offsets):
            live = self._at(int(offsets[at]), change.width)
            end = int(np.searchsorted(offsets, live.placed.end))
            self._write(live, Change(change.width, offsets[at:end], change.low[at:end], change.bits[at:end]))
            at = end

    def _at(self, offset: int, width: int) -> _Live:
        index = bisect_right(self._begins, offset) - 1
        if index < 0 or offset >= self._live[index].placed.end:
            raise DeltaError(f"it changes byte {offset}, which belongs to no tensor")
        live = self._live[index]
        if live.width != width:
            raise DeltaError(f"it changes {live.placed.name} in pieces of {width} bytes, not {live.width}")
        return live

    def _write(self, live: _Live, change: Change) -> None:
        # Widths are powers of two, and a division is slow.
        elements = (change.offsets - live.placed.begin) >> (live.width.bit_length() - 1)
        at = torch.from_numpy(elements).to(live.bits.device)
        before = live.bits.index_select(0, at)
        current = before.cpu().numpy()
        current = current.view(f"<u{current.itemsize}")
        if live.convert is not None:
            current = live.convert[0](current)
        values = change.values(current)
        exponent = _EXPONENT.get(live.placed.dtype)
        if exponent is not None and bool(np.any((values & values.dtype.type(exponent)) == exponent)):
            raise DeltaError(f"it gives {live.placed.name} values that are not finite")
        new = values if live.convert is None else live.convert[1](values)
        if new.itemsize > 1:
            new = new.view(f"<i{new.itemsize}")
        self._written.append(_Written(live.bits, at, before))
        live.bits.index_copy_(0, at, torch.from_numpy(new).to(live.bits.device))


def _live(placed: Placed, tensor: torch.Tensor) -> _Live:
    same = _SAME.get(placed.dtype)
    if not tensor.is_contiguous():
        raise LoadError(f"{placed.name} is not contiguous in this engine")
    flat = tensor.data.view(-1)
    if same is not None and tensor.dtype == same:
        return _Live(placed, same.itemsize, flat.view(_BITS[same.itemsize]), None)
    if tensor.dtype == torch.float32 and same == torch.bfloat16 and sys.byteorder == "little":
        return _Live(placed, same.itemsize, flat.view(torch.int16)[1::2], None)
    if tensor.dtype == torch.float32 and same == torch.float16:
        return _Live(placed, same.itemsize, flat.view(torch.int32), (_float16_of, _from_float16))
    raise LoadError(f"{placed.name} is {placed.dtype} in the file and {tensor.dtype} in this engine")
