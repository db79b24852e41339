"""A directory or file that appears under its name complete and durable, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infinity.errors import CheckpointError, StorageError
from infinity.sharding.ranks import ALONE, Ranks
from infinity.sizes import format_bytes

_LOCK = ".lock"


@contextmanager
def staged_directory(target: Path, nbytes: int, ranks: Ranks = ALONE) -> Iterator[Path]:
    """Yield an empty folder beside `target`, and rename it to `target` when the block ends well on all ranks; on an exception remove it.

    Rank 0 makes it, names it and removes it; the others work in it. What a killed process left there is removed first. `nbytes` is what all
    will write. Raises CheckpointError when `target` is taken, another process is writing it or a rank does not reach it, StorageError when the
    disk has no room.
    """
    folder, word = _place(target), ""
    with ranks.all_or_none("looking for the directory"):
        refusal = _taken(target) if ranks.rank == 0 else ""
    if refusal := ranks.everybodys(refusal, "whether the directory exists")[0]:
        raise CheckpointError(refusal)
    with ExitStack() as stack:
        with ranks.all_or_none("making the directory"):
            if ranks.rank == 0:
                stack.enter_context(_workplace(target, nbytes))
                word = (folder / _LOCK).read_text()
        word = ranks.everybodys(word, "the word in the directory")[0]
        with ranks.all_or_none("reaching the directory"):
            _check_reached(folder, word, ranks.rank)
        yield folder
        with ranks.all_or_none("naming the directory"):
            if ranks.rank == 0:
                _name(folder, target)


def _name(folder: Path, target: Path) -> None:
    """The lock is still held: nobody else can empty the folder before it has its name."""
    _sync(folder)
    os.rename(folder, target)
    (target / _LOCK).unlink()
    _sync(target)
    _sync(target.parent)


def _check_reached(folder: Path, word: str, rank: int) -> None:
    """Raise CheckpointError where the folder is not the one that rank 0 has made."""
    try:
        found = (folder / _LOCK).read_text()
    except OSError:
        found = ""
    if found != word:
        raise CheckpointError(f"rank {rank} does not reach {folder}, which rank 0 has made: save into a directory that all ranks share")


@contextmanager
def staged_file(target: Path, nbytes: int) -> Iterator[Path]:
    """The same for a single file: yield the path to write, which is linked to `target` when the block ends well."""
    with _workplace(target, nbytes) as folder:
        yield folder / target.name
        os.link(folder / target.name, target)
        _sync(target.parent)
        shutil.rmtree(folder)


@contextmanager
def _workplace(target: Path, nbytes: int) -> Iterator[Path]:
    folder = _place(target)
    _check_free(target)
    _check_ours(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, target)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(folder)) from error
    try:
        _check_free(target)
        _empty(folder)
        check_room(folder, nbytes)
        yield folder
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or errno.EIO, str(target), 0, nbytes) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _place(target: Path) -> Path:
    return target.with_name(f"{target.name}.tmp")


def _lock(folder: Path, target: Path) -> int:
    """An exclusive lock on the folder, which dies with the process; the file holds a word that no other folder has."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
            os.pwrite(lock, uuid.uuid4().hex.encode(), 0)
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    raise CheckpointError(f"{target}: another process is writing it now: give each process its own directory")


def _check_free(target: Path) -> None:
    if told := _taken(target):
        raise CheckpointError(told)


def _taken(target: Path) -> str:
    """Why `target` cannot be written; "" where it can."""
    if not (target.exists() or target.is_symlink()) or (target.is_dir() and not any(target.iterdir())):
        return ""
    return f"{target} exists, and nothing is ever overwritten: choose another name, or remove it first"


def _check_ours(folder: Path) -> None:
    """What an interrupted save left may be emptied; anything else of that name is somebody's."""
    if folder.exists() and not (folder / _LOCK).exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and was not left by an interrupted save: move it away, or choose another name")


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def check_room(folder: Path, nbytes: int) -> None:
    """Raises StorageError (ENOSPC) with needed and free bytes when the file system of `folder` cannot take `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        hint = f"Needed {nbytes} bytes ({format_bytes(nbytes)}), free {free} ({format_bytes(free)}): free some, or choose another disk"
        raise StorageError(errno.ENOSPC, str(folder), 0, nbytes, hint)


def write_text(path: Path, text: str) -> None:
    """A small file, on the disk when this returns."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
