"""Bytes that may be held in a tier. Who asks for more waits until others give back."""

from __future__ import annotations

import time

from infinity.errors import CapacityError, MoverError
from infinity.kinds import Tier
from infinity.sizes import format_bytes
from infinity.storage.condition import Condition


class Held:
    """Bytes of a budget, while they are counted there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_counted = False


class Budget:
    """A counter with a limit. Takers are not queued: whoever fits goes on.

    A queue would deadlock: a prefetch that waits for many bytes would stand in front of the on-demand fetch
    whose completion frees them. Bytes are counted once and given back once, however often that is asked for: who is interrupted
    may not know any more.
    """

    def __init__(self, tier: Tier, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._failure: BaseException | None = None
        self._changed = Condition()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken at one time."""
        return self._peak_bytes

    def take(self, held: Held, name: str, timeout_s: float) -> None:
        """Wait until the bytes fit and count them.

        Raises CapacityError at once if they can never fit, MoverError after `timeout_s`, and what `fail` was given.
        """
        nbytes = held.nbytes
        if nbytes > self.limit_bytes:
            raise CapacityError(
                f"{name} needs {format_bytes(nbytes)} ({nbytes} bytes) of the {self.tier} tier, budgets.{self.tier} is "
                f"{format_bytes(self.limit_bytes)} ({self.limit_bytes} bytes). Set budgets.{self.tier} to {nbytes} or more"
            )
        deadline = time.monotonic() + timeout_s
        with self._changed.lock:
            while not self._fits(nbytes):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise MoverError(
                        f"{name} waited {timeout_s:g} s for {format_bytes(nbytes)} of the {self.tier} tier: "
                        f"{format_bytes(self._used_bytes)} of {format_bytes(self.limit_bytes)} are held. Raise budgets.{self.tier}"
                    )
                self._changed.wait(left_s)
            self._count(held)

    def try_take(self, held: Held) -> bool:
        """Count the bytes if they fit right now; False is an answer."""
        with self._changed.lock:
            fits = self._fits(held.nbytes)
            if fits:
                self._count(held)
            return fits

    def give(self, held: Held) -> None:
        """The bytes are free again: the last use has completed, not merely been queued."""
        with self._changed.lock:
            self._changed.notify_all()  # first, so that no interrupt comes between: who waits goes on once the lock is free
            if held.is_counted:
                held.is_counted = False
                self._used_bytes -= held.nbytes

    def fail(self, failure: BaseException) -> None:
        """Whoever should have given bytes back is dead: every taker, now and later, raises its exception."""
        with self._changed.lock:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        if self._failure is not None:
            raise MoverError(f"{self.tier} budget: {self._failure}") from self._failure
        return self._used_bytes + nbytes <= self.limit_bytes

    def _count(self, held: Held) -> None:
        assert not held.is_counted
        held.is_counted = True
        self._used_bytes += held.nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
