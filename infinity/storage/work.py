"""The handle of a motion under way: `wait()` and `is_completed()`, like torch.distributed."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from infinity.errors import StorageError
from infinity.kinds import Lane
from infinity.native import Request
from infinity.timeline import Timeline


class Work(Protocol):
    """A motion under way. Both calls may come from any thread and any number of times."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the motion is over; raise what went wrong with it, every time. None is the mover's own deadline."""

    def is_completed(self) -> bool:
        """True when `wait` would not block: the motion is over, well or badly."""
        ...


class StreamedWork(Work, Protocol):
    """A motion behind which a stream can queue more."""

    def sync_current_stream(self) -> None:
        """Work queued from now on to the current stream runs after it. Blocks the host where there is no stream."""


def follow(work: Work, timeout_s: float | None = None) -> None:
    """What this thread does or queues from now on comes after the motion. Raises what went wrong with it, as far as the host knows."""
    sync = getattr(work, "sync_current_stream", None)
    if sync is None:
        work.wait(timeout_s)
    else:
        sync()


class CompletedWork:
    """Nothing has to move any more."""

    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def sync_current_stream(self) -> None:
        return


COMPLETED: StreamedWork = CompletedWork()


class JoinedWork:
    """Over when all its parts are; waits for every one of them before it raises the first failure."""

    def __init__(self, parts: Iterable[Work]) -> None:
        self._parts = tuple(parts)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failure: Exception | None = None
        for part in self._parts:
            try:
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)


def join(parts: Iterable[Work]) -> Work:
    """Several motions as one."""
    waiting = [part for part in parts if part is not COMPLETED]
    if not waiting:
        return COMPLETED
    return waiting[0] if len(waiting) == 1 else JoinedWork(waiting)


class AioWork:
    """One read or write of the native engine, which keeps the buffer alive until the device is done with it, come what may."""

    def __init__(self, request: Request, lane: Lane, name: str, path: str, offset: int, nbytes: int, timeline: Timeline) -> None:
        self._request = request
        self._lane = lane
        self._name = name
        self._path = path
        self._offset = offset
        self._nbytes = nbytes
        self._timeline = timeline
        self._is_recorded = False
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raise StorageError with errno, path, offset and nbytes if the device said no, or if it said nothing in time."""
        try:
            code = self._request.wait(timeout_s)
        except TimeoutError as error:
            hint = f"Still under way after {timeout_s} s"
            raise StorageError(errno.ETIMEDOUT, self._path, self._offset, self._nbytes, hint) from error
        self._record()
        if code < 0:
            offset = max(self._offset, self._request.failed_offset)
            raise StorageError(-code, self._path, offset, self._nbytes, _HINTS.get(-code, ""))

    def is_completed(self) -> bool:
        if not self._is_recorded and self._request.done():
            self._record()
        return self._is_recorded

    def abandon(self) -> None:
        """Wait until the device is done, or has missed its deadline; nobody asks how it went."""
        self._request.wait()
        self._record()

    def _record(self) -> None:
        """Leave the span of a finished request, once."""
        with self._lock:
            recorded, self._is_recorded = self._is_recorded, True
        if not recorded:
            self._timeline.record(self._lane, self._name, self._request.started_ns, self._request.finished_ns, self._nbytes)


_HINTS = {
    errno.ETIMEDOUT: "The drive did not answer before the deadline; the buffer is not used again",
    errno.EIO: "The drive failed, or the file is shorter than its manifest says: look at the system's log, then load a checkpoint",
}


class Window:
    """At most `limit` works under way: adding one more waits for the oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[Work] = deque()

    def add(self, work: Work) -> None:
        self._under_way.append(work)
        while len(self._under_way) > self._limit:
            self._under_way.popleft().wait()

    def drain(self) -> None:
        """Wait for all of them; raise the first failure once none is under way."""
        works, self._under_way = list(self._under_way), deque()
        join(works).wait()
