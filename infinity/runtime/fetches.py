"""One unit's flat buffers on their way to the compute device: asked for, started, awaited by the hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.errors import MoverError
from infinity.storage.work import Work


class Fetch:
    """The state of one unit between the request and the release.

    Whoever starts it fills `flats` and adds works; a waiter first waits until everything has been started, then for the
    works. On CUDA the last wait is the current stream's, not the host's.
    """

    def __init__(self, index: int, name: str, nbytes: int, changed: threading.Condition) -> None:
        self.index, self.name, self.nbytes = index, name, nbytes
        self.flats: list[Tensor] = []
        self.borrowed: list[Tensor] = []
        """Those of `flats` that are buffers for this visit; the others are where the unit rests."""
        self.last_use: torch.cuda.Event | None = None
        """When the compute stream is done with the buffers, of a unit that was released and kept for its next visit."""
        self.asked_at: torch.cuda.Event | None = None
        """On the stream of whoever asked, of a unit that is partly in HBM: an update of what rests there may still be queued before it."""
        self.counted = False
        """Its bytes are among those that the scheduler has given out."""
        self.urgent = False
        """A thread waits for it now."""
        self.attached = False
        """Handed to the hooks: it may not be given up."""
        self._works: list[Work] = []
        self._unstarted = 1
        self._error: BaseException | None = None
        self._changed = changed  # one for all fetches of a scheduler: at most one thread waits

    def expect(self, parts: int) -> None:
        """`parts` more pieces will be started by somebody else."""
        with self._changed:
            self._unstarted += parts

    def started(self, work: Work | None = None) -> None:
        """One piece is under way as `work`, or (None) needs no waiting."""
        with self._changed:
            if work is not None:
                self._works.append(work)
            self._unstarted -= 1
            self._changed.notify_all()

    def begun(self) -> list[Work]:
        """What is under way by now."""
        with self._changed:
            return list(self._works)

    def fail(self, error: BaseException) -> None:
        """Every waiter, now and later, raises `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def has_landed(self) -> bool:
        """Nothing is in the air: the buffers may be given up, or used where it did not fail."""
        with self._changed:
            return self._error is not None or (self._unstarted == 0 and all([work.is_completed() for work in self._works]))

    def has_failed(self) -> bool:
        """Nobody will get this unit."""
        with self._changed:
            return self._error is not None or any(work.is_completed() and _is_broken(work) for work in self._works)

    def wait(self, deadline_s: float, is_alive: Callable[[], bool]) -> None:
        """Block the host until all works exist; then make the current stream (CUDA) or the host (CPU) wait for them."""
        stop = time.monotonic() + deadline_s
        with self._changed:
            while self._unstarted and self._error is None:
                if not self._changed.wait(timeout=min(1.0, max(0.0, stop - time.monotonic()))) and (time.monotonic() >= stop or not is_alive()):
                    state = "did not answer" if is_alive() else "is dead"
                    raise MoverError(
                        f"unit {self.name!r} was not fetched within {deadline_s:g} s: the mover {state}. nvme.deadline_s sets the limit."
                    )
            if self._error is not None:
                raise self._error
        for work in self._works:
            sync = getattr(work, "sync_current_stream", None)
            if sync is None:
                work.wait(deadline_s)
            else:
                sync()

    def join(self, deadline_s: float, is_alive: Callable[[], bool]) -> None:
        """Block the host until nothing is in the air any more, however it went."""
        stop = time.monotonic() + deadline_s
        with self._changed:
            while self._unstarted and self._error is None and is_alive() and time.monotonic() < stop:
                self._changed.wait(timeout=min(1.0, deadline_s))
        for work in self._works:
            _is_broken(work, deadline_s)


def _is_broken(work: Work, deadline_s: float | None = None) -> bool:
    """Whether a motion went wrong, once it is over."""
    try:
        work.wait(deadline_s)
    except Exception:
        return True
    return False


class Retired:
    """Buffers of which views are left, and that the compute stream may still read; their bytes count until `event` has completed."""

    def __init__(self, fetch: Fetch, event: torch.cuda.Event) -> None:
        self.nbytes = fetch.nbytes
        self.event = event
        self._flats = fetch.flats  # kept allocated until the event says that the stream is done with them
