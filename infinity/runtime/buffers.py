"""Memory of the compute device that serves one unit after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.storage.slabs import SlabPool, footprint


@dataclass(frozen=True, slots=True)
class _Idle:
    flat: Tensor
    nbytes: int
    last_use: torch.cuda.Event | None


class Buffers:
    """Flat buffers on the compute device, in HBM from torch's allocator, in CPU memory from the slabs. Not thread-safe.

    A buffer that comes back may still be in use by what a stream has queued: `last_use` says until when. Whoever takes it next makes
    `stream` wait for that, the host never does. So `stream` must be the one that writes first, which also owns the memory in torch's eyes;
    on a CPU device there is none.
    """

    def __init__(self, device: torch.device, slabs: SlabPool, stream: torch.cuda.Stream | None) -> None:
        self._device, self._slabs, self._stream = device, slabs, stream
        self._idle: list[_Idle] = []
        """In the order in which they came back."""
        self.idle_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, idle_limit_bytes: int) -> Tensor:
        """[numel], contents undefined. What is not served from idle memory is allocated after idle memory has shrunk to the limit."""
        for at in reversed(range(len(self._idle))):
            flat = self._idle[at].flat
            if flat.dtype is dtype and flat.numel() == numel:
                return self._withdraw(at)
        self.shrink(idle_limit_bytes)
        if self._device.type == "cpu":
            return self._slabs.take(numel * dtype.itemsize).view(dtype)
        with torch.cuda.stream(self._stream):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, flat: Tensor, last_use: torch.cuda.Event | None = None) -> None:
        """The buffer is nobody's any more: no view of it is left, and streams are done with it at `last_use`."""
        nbytes = footprint(flat.nbytes, self._device)
        self._idle.append(_Idle(flat, nbytes, last_use))
        self.idle_bytes += nbytes

    def shrink(self, limit_bytes: int) -> None:
        """Free what has been idle longest, until at most `limit_bytes` are left idle."""
        while self._idle and self.idle_bytes > limit_bytes:
            self._withdraw(0)

    def _withdraw(self, at: int) -> Tensor:
        idle = self._idle[at]
        if idle.last_use is not None and self._stream is not None:
            self._stream.wait_event(idle.last_use)  # before it is nobody's: an interrupt here must not free what a stream still reads
        del self._idle[at]
        self.idle_bytes -= idle.nbytes
        return idle.flat
