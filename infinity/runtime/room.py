"""The memory of the compute device that visits of units take: one byte budget, and the buffers that are idle within it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from infinity.runtime.buffers import Buffers
from infinity.runtime.fetches import Fetch, Retired
from infinity.storage.slabs import SlabPool


class Room:
    """Counts what the visits take and provides their buffers. Not thread-safe: the scheduler's lock guards it.

    A fetch is counted before its buffers are taken, and until nobody needs them: a buffer that is idle afterwards may stay allocated as long
    as the budget has room for it beside what is counted.
    """

    def __init__(self, device: torch.device, slabs: SlabPool, stream: torch.cuda.Stream | None, *, budget_bytes: int, spare_bytes: int) -> None:
        """`stream`: the first that writes a buffer on a GPU. `spare_bytes`: what a visit alone may take beyond the budget."""
        self._slabs, self._budget_bytes, self._spare_bytes = slabs, budget_bytes, spare_bytes
        self._buffers = Buffers(device, slabs, stream)
        self._retired: deque[Retired] = deque()
        self.is_overdrawn = False
        """Spare bytes are taken, or were and may be idle now."""
        self.used_bytes = 0
        """Of live units, of those that come, and of what a stream may still read; idle buffers are beside it."""
        self.peak_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """The most that visits can ever take."""
        return self._budget_bytes + self._spare_bytes

    @property
    def waits_for_a_stream(self) -> bool:
        """More room comes without a word, once the compute stream has passed."""
        return bool(self._retired)

    def has(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self._budget_bytes

    def overdraw(self, nbytes: int) -> bool:
        """Whether the spare bytes are enough where the budget is not. What they are taken for goes back to the system afterwards."""
        if self.used_bytes + nbytes > self.limit_bytes:
            return False
        self.is_overdrawn = True
        return True

    def count(self, fetch: Fetch) -> None:
        """Its buffers may be taken from now on."""
        fetch.counted = True
        self.used_bytes += fetch.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of a fetch that is counted, contents undefined. What is idle beside it stays within the budget."""
        return self._buffers.take(numel, dtype, max(0, self._budget_bytes - self.used_bytes))

    def retire(self, fetch: Fetch) -> None:
        """Views of its buffers are left, so they serve nobody else; they count until the compute stream has passed."""
        assert fetch.last_use is not None
        self._retired.append(Retired(fetch, fetch.last_use))

    def reap(self) -> None:
        """Count no more what the compute stream has passed."""
        while self._retired and self._retired[0].event.query():  # type: ignore[no-untyped-call]
            self.used_bytes -= self._retired.popleft().nbytes

    def reuse(self, fetch: Fetch) -> None:
        """Its buffers serve others from its last use on."""
        for flat in fetch.borrowed:
            self._buffers.give(flat, fetch.last_use)

    def release(self, fetch: Fetch) -> None:
        """It counts no more."""
        if fetch.counted:
            self.used_bytes -= fetch.nbytes
            fetch.borrowed.clear()

    def repay(self, *, is_last: bool) -> None:
        """Give back to the system what was taken beyond the budget, as far as it is free. `is_last`: no visit is left that may have taken it."""
        if self.used_bytes <= self._budget_bytes:
            self.is_overdrawn = not is_last
            self._buffers.shrink(self._budget_bytes - self.used_bytes)
            self._slabs.trim()

    def close(self) -> None:
        """Every buffer is dropped; a view that somebody has keeps its own memory."""
        self._retired.clear()
        self._buffers.shrink(0)
