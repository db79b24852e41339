"""What can go wrong, as types.

    InfinityError
      ConfigError     (ValueError)    a value that cannot work; raised before anything is built
      CapacityError   (MemoryError)   a tier or pool that cannot hold what the plan asks
      StorageError    (OSError)       errno, path, offset, bytes
      TraceError      (RuntimeError)  a parameter or gradient was used where the engine cannot honour it
      LockError       (OSError)       another job holds the store: pid, host, since when
      CheckpointError (ValueError)    a file that is not what its manifest says
      MoverError      (RuntimeError)  a background thread died or missed its deadline; its cause is chained
      RankError       (RuntimeError)  another rank of the job died, stopped, or is elsewhere in the program
      ClosedError     (RuntimeError)  the engine was used after close()

Each is also the builtin that a stranger would catch. A message names the thing, the number and the way out.
"""

from __future__ import annotations

import os


class InfinityError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """A value that cannot work; raised before anything is built or written."""


class CapacityError(InfinityError, MemoryError):
    """A tier, pool or budget that cannot hold what the plan asks of it."""


class StorageError(InfinityError, OSError):
    """A read or write that failed: `errno`, `filename`, `offset` and `nbytes` say which."""

    def __init__(self, errno: int, path: str, offset: int = 0, nbytes: int = 0, hint: str = "") -> None:
        text = f"{os.strerror(errno)} at byte {offset}, {nbytes} bytes wanted"
        super().__init__(errno, f"{text}. {hint}" if hint else text, path)
        self.offset = offset
        self.nbytes = nbytes


class TraceError(InfinityError, RuntimeError):
    """A parameter or gradient was used where the engine cannot honour it."""


class LockError(InfinityError, OSError):
    """Another job holds the store."""


class CheckpointError(InfinityError, ValueError):
    """A file that is not what its manifest says."""


class MoverError(InfinityError, RuntimeError):
    """A background thread died or a wait missed its deadline; the cause is chained."""


class RankError(InfinityError, RuntimeError):
    """A rank of the job died, stalled, or does something else than this one: the message names it, and the collective."""


class ClosedError(InfinityError, RuntimeError):
    """The engine was used after `close()`."""
