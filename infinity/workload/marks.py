"""What this package remembers of the files it lays out: a mark on each file, and a journal beside them while a run is under way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import StorageError

_ATTRIBUTE = "user.infinity.io"
_JOURNAL = ".infinity-io-"


@dataclass(frozen=True, slots=True)
class Mark:
    """An extended attribute: it goes where the file goes. Without one, or when size or time differ, a file is somebody else's."""

    nbytes: int
    mtime_ns: int | None
    """None: a run is writing it, or was killed while it did."""
    is_full: bool
    """All of it was written once: reads come from the disk, not from the file system's knowledge that nothing is there."""

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """The mark of a file that is as this package left it."""
        try:
            found = json.loads(os.getxattr(path, _ATTRIBUTE))
            mark = cls(nbytes=int(found["bytes"]), mtime_ns=found["mtime_ns"], is_full=bool(found["full"]))
            facts = path.stat()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return mark if facts.st_size == mark.nbytes and mark.mtime_ns in (None, facts.st_mtime_ns) else None

    def put(self, path: Path) -> None:
        """Where the file system has no extended attributes, the next run will ask for --destroy-data."""
        with contextlib.suppress(OSError):
            os.setxattr(path, _ATTRIBUTE, json.dumps({"bytes": self.nbytes, "mtime_ns": self.mtime_ns, "full": self.is_full}).encode())


class Journal:
    """DIRECTORY/.infinity-io-PID.json while a run writes there: which files it made. It is locked as long as its process lives."""

    def __init__(self, directory: Path) -> None:
        """Raises StorageError where nothing can be written."""
        self.path = directory / f"{_JOURNAL}{os.getpid()}.json"
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with contextlib.suppress(OSError):  # without locks a journal looks like that of a dead run, which only says too much
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, str(directory), hint=open_hint(error.errno)) from error

    def write(self, files: Sequence[Path]) -> None:
        """Before anything is done to them."""
        text = json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z"), "files": [path.name for path in files]})
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, str(self.path), hint=open_hint(error.errno)) from error

    def close(self) -> None:
        """The run is over and has said what it left."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def left_by_killed_runs(directory: Path) -> list[str]:
    """One sentence for each run that died in this directory, said once: its journal is removed."""
    said = []
    for path in sorted(directory.glob(f"{_JOURNAL}*.json")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a run that lives
                said.append(_obituary(directory, os.pread(fd, 1 << 20, 0)))
                path.unlink()
            finally:
                os.close(fd)
    return [line for line in said if line]


def _obituary(directory: Path, text: bytes) -> str:
    try:
        found = json.loads(text)
        names, since = [str(name) for name in found["files"]], str(found["since"])
    except (ValueError, KeyError, TypeError):
        return ""
    there = [directory / name for name in names if (directory / name).is_file()]
    nbytes = sum(path.stat().st_size for path in there)
    if not there:
        return ""
    return f"a run of {since} was killed and left {', '.join(map(str, there))} ({nbytes} bytes): a job may use them again, or remove them"


def open_hint(code: int | None) -> str:
    """What to do about an error of open(2)."""
    hints = {
        errno.ENOENT: "The path does not exist: create the directory, or mount the disk there",
        errno.ENOTDIR: "A part of the path is not a directory",
        errno.EROFS: "The file system is mounted read-only: writing and laying out files need another one",
        errno.EACCES: "This user may not open it",
        errno.EMFILE: "Raise the descriptor limit (ulimit -n), or lower numjobs",
        errno.ENOSPC: "The file system is full",
        errno.EINVAL: "This file system takes no direct I/O: give --direct=0",
        errno.ENAMETOOLONG: "Shorten the name of the job or the file",
    }
    return hints.get(code or 0, "")
