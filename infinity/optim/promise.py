"""A Work that somebody keeps later: an update that is not under way yet."""

from __future__ import annotations

import threading
import time

from infinity.errors import MoverError
from infinity.storage.work import COMPLETED, Work


class Promise:
    """Over once it was kept and the Work it was kept with is over, or once it was broken."""

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._decided = threading.Event()
        self._after: Work = COMPLETED
        self._failure: BaseException | None = None

    def keep(self, after: Work = COMPLETED) -> None:
        """Done as soon as `after` is. Only the first decision counts."""
        if not self._decided.is_set():
            self._after = after
            self._decided.set()

    def fail(self, failure: BaseException) -> None:
        """It will never be done: every waiter raises `failure`."""
        if not self._decided.is_set():
            self._failure = failure
            self._decided.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raise what it was broken with, what `after` raises, or MoverError past the deadline."""
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        start = time.monotonic()
        if not self._decided.wait(limit_s):
            raise MoverError(f"{self._name} did not finish within {limit_s:g} s")
        if self._failure is not None:
            raise self._failure
        self._after.wait(None if timeout_s is None else max(0.0, limit_s - (time.monotonic() - start)))

    def is_completed(self) -> bool:
        return self._decided.is_set() and (self._failure is not None or self._after.is_completed())
