"""Which bytes of which tensors were never given a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.runtime.storage_ref import StorageRef

_FEWEST_TO_SWEEP = 256


@dataclass(slots=True)
class _Blank:
    """A storage with elements that nobody has filled."""

    storage: StorageRef
    nbytes: int
    filled: torch.Tensor | None = None
    """bool, one per `itemsize` bytes of the storage; None: nothing is filled yet."""
    itemsize: int = 1


class FillMap:
    """Keeps, for storages that began as uninitialised memory, which elements were written since. What is not in it is filled.

    `blank_flags(n)` returns n false bools: the flags of a storage that was written in part, of which there are few.
    """

    def __init__(self, blank_flags: Callable[[int], torch.Tensor]) -> None:
        self._blank_flags = blank_flags
        self._blanks: dict[int, _Blank] = {}
        """By the address of the storage's C++ object, which a reference keeps from being used again."""
        self._sweep_at = _FEWEST_TO_SWEEP

    def blank(self, tensor: torch.Tensor) -> None:
        """The whole storage of `tensor` is uninitialised memory."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._blanks[storage._cdata] = _Blank(StorageRef(storage), storage.nbytes())
            if len(self._blanks) >= self._sweep_at:
                self._sweep()

    def write(self, tensor: torch.Tensor, filled: bool) -> None:
        """The elements of `tensor` were overwritten, with proper values or with unfilled ones."""
        blank = self._find(tensor)
        if blank is None and (filled or not tensor.numel()):
            return
        if _covers_its_storage(tensor):
            return self._forget(tensor.untyped_storage()._cdata) if filled else self.blank(tensor)
        if blank is None:
            self.blank(tensor)
            blank = self._find(tensor)
            assert blank is not None
            self._flags(blank, tensor).fill_(True)
            assert blank.filled is not None
            blank.filled.fill_(True)
        self._flags(blank, tensor).fill_(filled)

    def is_filled(self, tensor: torch.Tensor) -> bool:
        """Whether every element of `tensor` is known to hold a value."""
        blank = self._find(tensor)
        if blank is None or not tensor.numel():
            return True
        return blank.filled is not None and bool(self._flags(blank, tensor).all())

    def _find(self, tensor: torch.Tensor) -> _Blank | None:
        if not self._blanks:
            return None
        return self._blanks.get(tensor.untyped_storage()._cdata)

    def _sweep(self) -> None:
        """Forget storages that are dead, each time that there are twice as many as there were alive."""
        self._blanks = {address: blank for address, blank in self._blanks.items() if not blank.storage.is_dead()}
        self._sweep_at = max(_FEWEST_TO_SWEEP, 2 * len(self._blanks))

    def _forget(self, address: int) -> None:
        self._blanks.pop(address, None)

    def _flags(self, blank: _Blank, tensor: torch.Tensor) -> torch.Tensor:
        """The flags of the elements of `tensor`, as a view [*tensor.shape, flags per element]."""
        itemsize = tensor.element_size()
        if blank.filled is None:
            self._sweep()  # flags are large, those of the dead can go
            blank.filled, blank.itemsize = self._blank_flags(-(-blank.nbytes // itemsize)), itemsize
        if itemsize % blank.itemsize:
            blank.filled, blank.itemsize = blank.filled.repeat_interleave(blank.itemsize), 1
        per = itemsize // blank.itemsize
        stride = (*(step * per for step in tensor.stride()), 1)
        return blank.filled.as_strided((*tensor.shape, per), stride, tensor.storage_offset() * per)


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
