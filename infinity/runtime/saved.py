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
    offset_bytes: int
    """From the start of the flat buffer."""
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


Elsewhere = tuple[Hook, Any]
"""A tensor that the hook pair below has packed, behind that pair's unpack."""


class LiveStorages:
    """Which unit a piece of memory belongs to, while the unit is live. Asked for every tensor that autograd saves; few units are live."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, AttachedUnit, int]] = []
        """(first address, end, unit, flat index) of every flat buffer that is live."""

    def add(self, unit: AttachedUnit) -> None:
        for index, flat in enumerate(unit.flats or ()):
            start = flat.data_ptr()
            self.runs.append((start, start + flat.nbytes, unit, index))

    def remove(self, unit: AttachedUnit) -> None:
        self.runs = [run for run in self.runs if run[2] is not unit]


class SavedTensors:
    """One entry on torch's stack of saved-tensor hooks, passing what is not a unit's on to the entry that was on top before.

    torch applies only the top entry; without the chain a user's `save_on_cpu`, or a checkpoint around the model, would go blind.
    """

    def __init__(self, storages: LiveStorages, fetch: Callable[[AttachedUnit], list[Tensor]], below: tuple[Hook, Hook] | None) -> None:
        self._storages, self._fetch = storages, fetch
        self._pack_below: Hook | None = below[0] if below is not None else None
        self._unpack_below: Hook | None = below[1] if below is not None else None

    def open(self) -> None:
        """Put the entry on the stack."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def close(self) -> None:
        """Take the entry off the stack again. It is on top, unless an interrupt came before that, or after this."""
        top = top_hooks()
        if not can_chain() or (top is not None and getattr(top[0], "__self__", None) is self):
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: Tensor) -> Coordinates | Elsewhere | Tensor:
        if tensor.layout is _STRIDED and type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH:
            address = tensor.data_ptr()
            for start, end, unit, flat in self._storages.runs:
                if start <= address < end:
                    return Coordinates(
                        unit,
                        unit.unit.version,
                        flat,
                        tensor.dtype,
                        address - start,
                        tensor.shape,
                        tensor.stride(),
                        tensor.is_conj(),
                        tensor.is_neg(),
                    )
        if self._pack_below is None or self._unpack_below is None:
            return tensor.detach()  # an output that is packed as itself holds its own graph, and nothing ever frees them
        return self._unpack_below, self._pack_below(tensor)

    def unpack(self, packed: Coordinates | Elsewhere | Tensor) -> Tensor:
        if isinstance(packed, Coordinates):
            return self._locate(packed)
        if isinstance(packed, tuple):
            unpack_below, below = packed
            tensor: Tensor = unpack_below(below)
            return tensor
        return packed

    def _locate(self, at: Coordinates) -> Tensor:
        if at.version != at.unit.unit.version:
            raise TraceError(
                f"one of the parameters of unit {at.unit.unit.name!r} that backward needs has been modified: it is at version "
                f"{at.unit.unit.version}, expected version {at.version}. Call backward before optimizer.step(), or run the forward again"
            )
        unit = at.unit
        flats = self._fetch(unit) if unit.flats is None or unit.is_outdated() else unit.flats
        tensor = _view(flats[at.flat], at)
        if at.is_conj:
            tensor = tensor.conj()
        return tensor._neg_view() if at.is_neg else tensor


def _view(flat: Tensor, at: Coordinates) -> Tensor:
    """A tensor of its own: whoever keeps it is counted as a user of the buffer."""
    offset = (int(flat.storage_offset()) * flat.itemsize + at.offset_bytes) // at.dtype.itemsize
    if at.dtype is flat.dtype:
        return flat.as_strided(at.shape, at.stride, offset)
    return torch.empty(0, dtype=at.dtype, device=flat.device).set_(flat.untyped_storage(), offset, at.shape, at.stride)


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
_STRIDED = torch.strided
_PLAIN_DISPATCH = Tensor.__torch_dispatch__
