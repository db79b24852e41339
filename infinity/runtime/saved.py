"""Tensors that autograd saves for backward: those that lie in a live unit's buffers are kept as coordinates, not as memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.errors import TraceError
from infinity.runtime.attach import AttachedUnit

Hook = Callable[[Any], Any]


class Coordinates(NamedTuple):
    """A tensor in a unit's flat buffer, from which it can be had again."""

    unit: AttachedUnit
    version: int
    flat: int
    dtype: torch.dtype
    offset: int
    """In elements of `dtype`, from the start of the flat buffer."""
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class Elsewhere(NamedTuple):
    """A tensor that the hook pair below has packed."""

    unpack: Hook
    packed: Any


class LiveStorages:
    """Which unit a piece of memory belongs to, while the unit is live. Asked for every tensor that autograd saves; few units are live."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, AttachedUnit, int]] = []

    def add(self, unit: AttachedUnit) -> None:
        for index, flat in enumerate(unit.flats or ()):
            start = flat.data_ptr()
            self._runs.append((start, start + flat.nbytes, unit, index))

    def remove(self, unit: AttachedUnit) -> None:
        self._runs = [run for run in self._runs if run[2] is not unit]

    def find(self, tensor: Tensor) -> tuple[int, int, AttachedUnit, int] | None:
        """(first address, end, unit, flat index) of the flat buffer that a strided tensor lies in."""
        address = tensor.data_ptr()
        for run in self._runs:
            if run[0] <= address < run[1]:
                return run
        return None


class SavedTensors:
    """One entry on torch's stack of saved-tensor hooks, passing what is not a unit's on to the entry that was on top before.

    torch applies only the top entry; without the chain a user's `save_on_cpu`, or a checkpoint around the model, would go blind.
    """

    def __init__(self, storages: LiveStorages, fetch: Callable[[AttachedUnit], list[Tensor]]) -> None:
        self._storages, self._fetch = storages, fetch
        below = top_hooks()
        self._pack_below: Hook | None = below[0] if below is not None else None
        self._unpack_below: Hook | None = below[1] if below is not None else None
        self._context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._context.__enter__()

    def close(self) -> None:
        """Take the entry off the stack again; it is on top."""
        self._context.__exit__(None, None, None)

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH:
            found = self._storages.find(tensor)
            if found is not None:
                start, _, unit, flat = found
                offset = (tensor.data_ptr() - start) // tensor.itemsize
                return Coordinates(
                    unit, unit.unit.version, flat, tensor.dtype, offset, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
                )
        if self._pack_below is None or self._unpack_below is None:
            return tensor
        return Elsewhere(self._unpack_below, self._pack_below(tensor))

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Coordinates):
            return self._locate(packed)
        if isinstance(packed, Elsewhere):
            below: Tensor = packed.unpack(packed.packed)
            return below
        plain: Tensor = packed
        return plain

    def _locate(self, at: Coordinates) -> Tensor:
        if at.version != at.unit.unit.version:
            raise TraceError(
                f"one of the parameters of unit {at.unit.unit.name!r} that backward needs has been modified: it is at version "
                f"{at.unit.unit.version}, expected version {at.version}. Call backward before optimizer.step(), or run the forward again"
            )
        flat = self._fetch(at.unit)[at.flat]
        offset = int(flat.storage_offset()) * flat.itemsize // at.dtype.itemsize + at.offset
        if at.dtype is flat.dtype:
            tensor = flat.as_strided(at.shape, at.stride, offset)
        else:
            tensor = torch.empty(0, dtype=at.dtype, device=flat.device).set_(flat.untyped_storage(), offset, at.shape, at.stride)
        if at.is_conj:
            tensor = tensor.conj()
        return tensor._neg_view() if at.is_neg else tensor


def top_hooks() -> tuple[Hook, Hook] | None:
    """The (pack, unpack) pair that autograd would use now. Before torch 2.8 it cannot be asked for, and the answer is None."""
    if _TOP is None:
        return None
    pair: tuple[Hook, Hook] | None = _TOP(False)
    return pair


def can_chain() -> bool:
    """Whether this torch tells which saved-tensor hooks are on top."""
    return _TOP is not None


def is_ours(pair: tuple[Hook, Hook] | None, storages: LiveStorages) -> bool:
    """Whether the pair on top belongs to this model's hooks."""
    owner = getattr(pair[0], "__self__", None) if pair is not None else None
    return isinstance(owner, SavedTensors) and owner._storages is storages


def is_checkpoints(pair: tuple[Hook, Hook] | None) -> bool:
    """Whether the pair on top is torch.utils.checkpoint's, which counts what is saved, in forward and again in recomputation."""
    return pair is not None and getattr(pair[0], "__module__", "") == "torch.utils.checkpoint"


_TOP = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_PLAIN_DISPATCH = Tensor.__torch_dispatch__
