"""One job at a time in a run's directory: a record lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from infinity.errors import LockError, StorageError

LOCK_NAME = "lock"
_LINE_BYTES = 256
"""Each rank owns one line of the file: it locks that line's bytes and writes who it is there."""

_held: set[tuple[int, str, int]] = set()
"""(pid, path, rank): record locks do not exclude their own process, so a second store in it is refused here."""
_held_lock = threading.Lock()


class RunLock:
    """The lock of one rank on one directory. Ranks of one job hold different lines of one file.

    fcntl record locks vanish when *any* descriptor of the file is closed in the process: nothing else here opens it.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        """Raises LockError naming pid, host and since-when of the holder; StorageError where the file system has no locks."""
        self.path = directory / LOCK_NAME
        self._claim = (os.getpid(), str(self.path.resolve()), rank)
        self._rank = rank
        with _held_lock:
            if self._claim in _held:
                raise _refusal(self.path, f"this process (pid {os.getpid()})")
            self._fd = self._acquire()
            _held.add(self._claim)

    def close(self) -> None:
        """Let the next job in. The file stays: its content is who held it last."""
        with _held_lock:
            if self._claim in _held and self._claim[0] == os.getpid():
                _held.remove(self._claim)
                os.close(self._fd)

    def _acquire(self) -> int:
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._lock_line(fd)
                if _is_still(self.path, fd):
                    os.pwrite(fd, _describe_self(), self._rank * _LINE_BYTES)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lock_line(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _LINE_BYTES, self._rank * _LINE_BYTES)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _refusal(self.path, _describe_holder(os.pread(fd, _LINE_BYTES, self._rank * _LINE_BYTES))) from error
            hint = "This file system offers no record locks: use a local one"
            raise StorageError(error.errno or errno.ENOLCK, str(self.path), hint=hint) from error


def _is_still(path: Path, fd: int) -> bool:
    """False when the file was removed between opening and locking it: the lock would guard nothing."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _describe_self() -> bytes:
    who = {"pid": os.getpid(), "host": socket.gethostname()[:128], "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    return json.dumps(who).encode().ljust(_LINE_BYTES - 1) + b"\n"


def _describe_holder(line: bytes) -> str:
    try:
        who = json.loads(line)
        return f"pid {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(path: Path, holder: str) -> LockError:
    return LockError(errno.EAGAIN, f"the run is in use by {holder}. Wait for it, stop it, or choose another store.run", str(path))
