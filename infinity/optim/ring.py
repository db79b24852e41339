"""A few equal buffers, lent in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from infinity.storage.work import Work


class Ring:
    """`count` buffers of `nbytes`, uint8 each, made by `make`; none if `nbytes` is 0. Used by one thread at a time.

    A loan ends when the Work that the buffer came back with is over. After an error the buffers in question stay out of the ring: a device
    may still be writing into them.
    """

    def __init__(self, make: Callable[[int], Tensor], *, count: int, nbytes: int) -> None:
        self.nbytes = count * nbytes
        self._free = [make(nbytes) for _ in range(count)] if nbytes else []
        self._returning: deque[tuple[Tensor, Work]] = deque()

    def has_free(self) -> bool:
        """Whether `take()` would return at once."""
        return bool(self._free) or (bool(self._returning) and self._returning[0][1].is_completed())

    def take(self) -> Tensor:
        """A buffer, contents undefined, waiting for the oldest return if none is free. Raises what the return raises."""
        if self._free:
            return self._free.pop()
        assert self._returning, "every buffer of the ring is on loan: it is smaller than what its borrower holds at once"
        buffer, work = self._returning.popleft()
        work.wait()
        return buffer

    def give_back(self, buffer: Tensor, after: Work) -> None:
        """End a loan once `after` is over: until then a disk or a stream uses the buffer."""
        self._returning.append((buffer, after))

    def close(self) -> None:
        """Let go of the buffers; those that a device still uses follow when it is done."""
        self._free.clear()
        self._returning.clear()

    def drain(self) -> None:
        """Wait until nothing uses a returned buffer any more; raise the first error after having waited for all."""
        failure: Exception | None = None
        while self._returning:
            buffer, work = self._returning.popleft()
            try:
                work.wait()
                self._free.append(buffer)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
