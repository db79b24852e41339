"""A reference to a storage that does not keep it alive."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageRef:
    """As `weakref.ref`, but to the storage in C++: before torch 2.8 the Python object that stands for it may die before it does."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.UntypedStorage | None:
        """The storage, None once it is dead."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage

    def is_dead(self) -> bool:
        dead: bool = self._weak.expired()  # type: ignore[no-untyped-call]
        return dead
