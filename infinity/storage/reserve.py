"""A fixed number of equal buffers. A full reserve is an answer, not an error: the borrower waits."""

from __future__ import annotations

import time

import torch

from infinity.errors import MoverError
from infinity.storage.condition import Condition
from infinity.storage.slabs import SlabPool


class Reserve:
    """`count` buffers of `nbytes` from a pool, all taken at construction so that nothing grows later."""

    def __init__(self, pool: SlabPool, nbytes: int, count: int, name: str) -> None:
        self.name = name
        self.nbytes = nbytes
        self.count = count
        self._free = [pool.take(nbytes) for _ in range(count)]
        self._failure: BaseException | None = None
        self._changed = Condition()

    def borrow(self, timeout_s: float) -> torch.Tensor:
        """A buffer, uint8 [nbytes], contents undefined. The borrower gives it back.

        Raises MoverError after `timeout_s`, and whatever `fail` was given as soon as it is.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed.lock:
            while not self._free:
                self._raise_failure()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise MoverError(f"reserve {self.name}: none of its {self.count} buffers of {self.nbytes} bytes came back within {timeout_s:g} s")
                self._changed.wait(left_s)
            self._raise_failure()
            return self._free.pop()

    def give(self, buffer: torch.Tensor) -> None:
        """Nothing reads or writes the buffer any more."""
        assert buffer.numel() == self.nbytes, f"reserve {self.name}: {buffer.numel()} bytes given back, buffers have {self.nbytes}"
        with self._changed.lock:
            assert len(self._free) < self.count, f"reserve {self.name}: more buffers given back than lent"
            self._free.append(buffer)
            self._changed.notify()

    def fail(self, failure: BaseException) -> None:
        """Whoever should have given buffers back is dead: every borrower, now and later, raises its exception."""
        with self._changed.lock:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the free buffers; lent ones follow as they are dropped."""
        with self._changed.lock:
            self._free.clear()
            self._failure = self._failure or MoverError(f"reserve {self.name} is closed")
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MoverError(f"reserve {self.name}: {self._failure}") from self._failure
