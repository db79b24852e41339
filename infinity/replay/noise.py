"""Memory that is written to drives: some of them, and some file systems, are faster where everything is zero."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.storage.slabs import SlabPool


def noisy(slabs: SlabPool) -> Callable[[int], torch.Tensor]:
    """Makes uint8 [nbytes] from the pool, full of random bytes; `nbytes` are whole sectors."""

    def make(nbytes: int) -> torch.Tensor:
        buffer = slabs.take(nbytes)
        buffer.view(torch.int64).random_()
        return buffer

    return make
