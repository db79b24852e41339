"""The memory of the compute device that visits of units take: one byte budget, and the buffers that are idle within it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.runtime.buffers import Buffers
from infinity.runtime.fetches import Fetch
from infinity.storage.slabs import SlabPool


class Room:
    """Counts what the visits take and provides their buffers. Not thread-safe: the scheduler's lock guards it.

    A fetch is counted before its buffers are taken. A buffer that is idle afterwards may stay allocated as long as the budget has room for
    it beside what is counted.
    """

    def __init__(self, device: torch.device, slabs: SlabPool, stream: torch.cuda.Stream | None, *, budget_bytes: int, spare_bytes: int) -> None:
        """`stream`: the first that writes a buffer on a GPU. `spare_bytes`: what visits may take beyond the budget when they cannot do without."""
        self._slabs, self._budget_bytes, self._spare_bytes = slabs, budget_bytes, spare_bytes
        self._buffers = Buffers(device, slabs, stream)
        self._retired: deque[Fetch] = deque()
        """Released, and kept allocated until the compute stream is done with them."""
        self._is_overdrawn = False
        """Spare bytes are taken, or were and may be idle now."""
        self.used_bytes = 0
        """Of live units, of those that come, and of those retired, until the stream has passed; idle buffers are beside it."""
        self.peak_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """The most that visits can ever take."""
        return self._budget_bytes + self._spare_bytes

    @property
    def waits_for_a_stream(self) -> bool:
        """More room comes without a word, once the compute stream has passed."""
        return bool(self._retired)

    def fits(self, nbytes: int) -> bool:
        """The budget has room for so many more bytes."""
        return self.used_bytes + nbytes <= self._budget_bytes

    def overdraw(self, nbytes: int) -> bool:
        """Whether the spare bytes are enough where the budget is not. What they are taken for goes back to the system afterwards."""
        if self.used_bytes + nbytes > self.limit_bytes:
            return False
        self._is_overdrawn = True
        return True

    def count(self, fetch: Fetch) -> None:
        """Its buffers may be taken from now on."""
        fetch.counted = True
        self.used_bytes += fetch.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def uncount(self, fetch: Fetch) -> None:
        """It takes no room any more; so far it may not have."""
        if fetch.counted:
            fetch.counted = False
            self.used_bytes -= fetch.nbytes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of a fetch that is counted, contents undefined. What is idle beside it stays within the budget."""
        return self._buffers.take(numel, dtype, max(0, self._budget_bytes - self.used_bytes))

    def retire(self, fetch: Fetch) -> None:
        """Views of its buffers are left, so they serve nobody else; they count until the compute stream has passed."""
        self._retired.append(fetch)

    def reap(self) -> None:
        """Count no more what the compute stream has passed."""
        while self._retired and _is_over(self._retired[0].last_use):
            self.uncount(self._retired[0])
            self._retired.popleft()

    def reuse(self, fetch: Fetch) -> None:
        """Its buffers serve others from its last use on."""
        for flat in fetch.borrowed:
            self._buffers.give(flat, fetch.last_use)

    def repay(self, is_last: Callable[[], bool]) -> None:
        """Give back to the system what was taken beyond the budget, once it is free. `is_last`: whether no visit is left that may have taken it."""
        if self._is_overdrawn and self.used_bytes <= self._budget_bytes:
            self._buffers.shrink(self._budget_bytes - self.used_bytes)
            self._slabs.trim()
            self._is_overdrawn = not is_last()

    def close(self) -> None:
        """Every buffer is dropped; a view that somebody has keeps its own memory."""
        self._retired.clear()
        self._buffers.shrink(0)


def _is_over(use: torch.cuda.Event | None) -> bool:
    return use is None or bool(use.query())  # type: ignore[no-untyped-call]
