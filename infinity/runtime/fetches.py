"""One unit's flat buffers on their way to the compute device: asked for, started, awaited by the hooks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.errors import MoverError
from infinity.storage.condition import Condition
from infinity.storage.work import Work, follow


class Parts:
    """Pieces on their way that make one thing together: each is started by whoever can, and all are awaited at once.

    A waiter first waits until everything has been started, then for the works; on CUDA the last wait is the current stream's, not the host's.
    """

    def __init__(self, name: str, changed: Condition, deadline_s: float, is_alive: Callable[[], bool]) -> None:
        """`changed`: one for all of a scheduler's, few threads wait. `is_alive`: whether those who start them still run."""
        self.name = name
        self._works: list[Work] = []
        self._unstarted = 1
        self._error: BaseException | None = None
        self._changed, self._deadline_s, self._is_alive = changed, deadline_s, is_alive

    def expect(self, parts: int) -> None:
        """`parts` more pieces will be started by somebody else."""
        with self._changed.lock:
            self._unstarted += parts

    def started(self, work: Work | None = None) -> None:
        """One piece is under way as `work`, or (None) needs no waiting."""
        with self._changed.lock:
            if work is not None:
                self._works.append(work)
            self._unstarted -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Every waiter, now and later, raises `error`."""
        with self._changed.lock:
            self._error = error
            self._changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """Pieces that have not been started never will be: waiters raise `error`. With all of them under way it changes nothing."""
        with self._changed.lock:
            if self._unstarted:
                self._error = error
                self._changed.notify_all()

    def is_completed(self) -> bool:
        """It can be waited for no more: everything is over, or it has failed."""
        with self._changed.lock:
            return self._error is not None or (self._unstarted == 0 and all([work.is_completed() for work in self._works]))

    def has_failed(self) -> bool:
        """Nobody will get this."""
        with self._changed.lock:
            return self._error is not None or any(work.is_completed() and _is_broken(work) for work in self._works)

    def sync_current_stream(self) -> None:
        """Block the host until all works exist; then make the current stream (CUDA) or the host (CPU) wait for them."""
        self._wait_started()
        for work in self._works:
            follow(work, self._deadline_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until all works are over. Raises the first failure."""
        self._wait_started()
        for work in self._works:
            work.wait(self._deadline_s if timeout_s is None else timeout_s)

    def join(self) -> None:
        """Block the host until nothing is in the air any more, however it went."""
        self._is_started_in_time()
        for work in self._works:
            _is_broken(work, self._deadline_s)

    def _wait_started(self) -> None:
        if not self._is_started_in_time():
            state = "did not answer" if self._is_alive() else "is dead"
            raise MoverError(f"unit {self.name!r} was not fetched within {self._deadline_s:g} s: the mover {state}. nvme.deadline_s sets the limit.")
        if self._error is not None:
            raise self._error

    def _is_started_in_time(self) -> bool:
        """Wait until all works exist, or it has failed. False where whoever starts them is dead, or too late."""
        stop = time.monotonic() + self._deadline_s
        with self._changed.lock:
            while self._unstarted and self._error is None:
                left_s = max(0.0, stop - time.monotonic())
                if not self._changed.wait(timeout=min(1.0, left_s)) and (time.monotonic() >= stop or not self._is_alive()):
                    return False
        return True


class Fetch(Parts):
    """One unit on its way to the compute device, from the request to the release. Whoever starts it fills `flats` and adds works."""

    def __init__(self, index: int, name: str, nbytes: int, changed: Condition, deadline_s: float, is_alive: Callable[[], bool]) -> None:
        super().__init__(name, changed, deadline_s, is_alive)
        self.index, self.nbytes = index, nbytes
        self.flats: list[Tensor] = []
        self.borrowed: list[Tensor] = []
        """Those of `flats` that are buffers for this visit; the others are where the unit rests."""
        self.shards: Parts | None = None
        """What this rank brings of the unit, where the parts of the unit itself are gathers."""
        self.is_to_gather = False
        """Its gathers have not been asked for yet."""
        self.last_use: torch.cuda.Event | None = None
        """When the compute stream is done with the buffers, of a unit that was released and kept for its next visit."""
        self.is_held = False
        """Views of the buffers may be left from a visit: they serve nobody else when it is over."""
        self.asked_at: torch.cuda.Event | None = None
        """On the stream of whoever asked, of a unit that comes from HBM: an update of what rests there may still be queued before it."""
        self.counted = False
        """Its bytes are among those in use of the scheduler's room."""
        self.urgent = False
        """A thread waits for it now."""
        self.attached = False
        """Handed to the hooks: it may not be given up."""

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self.shards is not None:
            self.shards.break_off(error)  # what has been started comes, and the ranks' gathers are not broken off for it


def _is_broken(work: Work, deadline_s: float | None = None) -> bool:
    """Whether a motion went wrong, once it is over."""
    try:
        work.wait(deadline_s)
    except Exception:
        return True
    return False
