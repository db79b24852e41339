"""The files of a run: found or laid out, guarded against losing anybody's data, and left or removed as fio would.

Nothing is created or written before every file of every job has been looked at. What a run created it removes again when it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from infinity.errors import ConfigError, StorageError
from infinity.native import Aio, Request
from infinity.sizes import MiB, format_bytes
from infinity.storage.probe import direct_io_align, facts
from infinity.storage.rundir import our_files
from infinity.storage.shardfile import fallocate
from infinity.workload.job import Job
from infinity.workload.marks import Journal, Mark, left_by_killed_runs, open_hint
from infinity.workload.memory import Buffers

_BLKGETSIZE64 = 0x80081272
_LAYOUT_DEPTH = 16
_LAYOUT_REQUESTS = 4


@dataclass(slots=True)
class Target:
    """One file or block device, and what all jobs together will do to it."""

    path: Path
    nbytes: int
    """From its start, what jobs move."""
    has_bytes: int
    """Its size now."""
    is_device: bool = False
    exists: bool = False
    mark: Mark | None = None
    reads: bool = False
    writes: bool = False
    verifies: bool = False
    direct: bool = False
    unlinks: bool = False
    is_fresh: bool = False
    """Created by this run and not filled: writes extend it."""

    @property
    def is_ours(self) -> bool:
        return not self.exists or self.mark is not None or (not self.is_device and not self.has_bytes)

    @property
    def needs_filling(self) -> bool:
        """Reads need bytes that were written. A job that verifies brought its own, in an earlier run."""
        if self.is_device or not self.reads:
            return False
        return self.has_bytes < self.nbytes or (self.mark is not None and not self.mark.is_full and not self.verifies)

    @property
    def changes(self) -> bool:
        return self.writes or self.needs_filling or self.unlinks


@dataclass(frozen=True, slots=True)
class Place:
    """One file of one clone: which target, and how much of it."""

    target: Target
    nbytes: int


@dataclass(slots=True)
class Layout:
    """Use it under `with`: `prepare` makes the files ready; leaving it settles what stays."""

    destroy_data: bool
    say: Callable[[str], None]
    """For people: a file is being laid out, a killed run left something."""
    is_wanted: Callable[[], bool] = lambda: True
    """Asked while a file is laid out: False ends that with KeyboardInterrupt."""
    targets: dict[str, Target] = field(default_factory=dict)
    _touched: list[Target] = field(default_factory=list)
    _journals: list[Journal] = field(default_factory=list)

    def add(self, job: Job, clone: int) -> tuple[Place, ...]:
        """The files of one clone of a job. Raises ConfigError for what cannot work."""
        paths = _paths(job, clone)
        return tuple(self._place(job, path, None if job.size is None else job.size // len(paths)) for path in paths)

    def _place(self, job: Job, path: Path, share: int | None) -> Place:
        found = self.targets.get(key := os.path.realpath(path))
        target = found if found is not None else _look_at(path)
        nbytes = share if share is not None else max(target.has_bytes, target.nbytes if found else 0)
        if not nbytes:
            raise ConfigError(f"job {job.name}: {path} does not exist or is empty, so size must say how much: size=1g")
        if target.is_device and nbytes > target.has_bytes:
            raise ConfigError(f"job {job.name}: size={nbytes} is more than the {target.has_bytes} bytes of {path}")
        if (largest := max(blocks.largest for blocks in job.blocks)) > nbytes:
            raise ConfigError(f"job {job.name}: {path} has {nbytes} bytes, a block has {largest}")
        target.nbytes = max(target.nbytes, nbytes)
        target.reads |= job.reads
        target.writes |= job.writes
        target.verifies |= bool(job.verify) and not job.writes
        target.direct |= job.direct
        target.unlinks |= job.unlink and not target.is_device
        if job.direct:
            _check_alignment(job, target)
        self.targets[key] = target
        return Place(target, nbytes)

    def prepare(self) -> None:
        """Look at everything, then lay out what is missing. Raises before anything is touched when data would be lost or space is short."""
        for directory in sorted({target.path.parent for target in self.targets.values()}):
            for line in left_by_killed_runs(directory):
                self.say(line)
        for target in self.targets.values():
            if target.changes and not target.is_ours and not self.destroy_data:
                raise ConfigError(_refusal(target))
            if target.verifies and not target.writes and target.has_bytes < target.nbytes:
                raise ConfigError(f"{target.path}: there are not {target.nbytes} bytes to verify: write it with verify=crc32c first")
            if target.is_device and target.writes:
                _check_unused(target)
        self._check_space()
        self._open_journals()
        for target in self.targets.values():
            self._make(target)

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            for target in self._touched:
                _undo(target)
        for journal in self._journals:
            journal.close()

    def finish(self, filled: Iterable[Target]) -> None:
        """The run went well. `filled` are those that it wrote all over."""
        done = list(filled)
        for target in self._touched:
            if target.unlinks:
                target.path.unlink(missing_ok=True)
            elif target.mark is not None:
                _settle(target, any(other is target for other in done))

    def _check_space(self) -> None:
        """Per file system, what is to be laid out against what is free."""
        wanted: dict[int, list[Target]] = {}
        for target in self.targets.values():
            if target.changes and not target.is_device and target.has_bytes < target.nbytes:
                wanted.setdefault(os.stat(target.path.parent).st_dev, []).append(target)
        for targets in wanted.values():
            held = sum(os.stat(target.path).st_blocks * 512 for target in targets if target.exists)
            needed = sum(target.nbytes for target in targets) - held
            place = targets[0].path.parent
            free = facts(place).free_bytes
            if needed > free:
                hint = f"{format_bytes(needed)} are to be laid out, {format_bytes(free)} are free: lower size or numjobs, or use another disk"
                raise StorageError(errno.ENOSPC, str(place), 0, needed, hint)

    def _open_journals(self) -> None:
        """A run that is killed leaves its new files, and the journal says so to the next one."""
        changing: dict[Path, list[Path]] = {}
        for target in self.targets.values():
            if not target.exists:
                changing.setdefault(target.path.parent, []).append(target.path)
        for directory, files in changing.items():
            self._journals.append(journal := Journal(directory))
            journal.write(files)

    def _make(self, target: Target) -> None:
        if target.is_device or not target.changes:
            return
        if not target.exists:
            os.close(_open(target.path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self._touched.append(target)
        if target.has_bytes < target.nbytes:
            target.is_fresh = True
            self._reserve(target)
        ours = target.is_ours
        if target.needs_filling:
            self.say(f"laying out {target.path} ({format_bytes(target.nbytes)})")
            self._fill(target)
            target.mark, target.is_fresh = Mark(max(target.nbytes, target.has_bytes), None, target.nbytes >= target.has_bytes), False
        elif ours:
            target.mark = Mark(max(target.nbytes, target.has_bytes), None, target.mark is not None and target.mark.is_full and not target.is_fresh)
        if target.mark is not None:
            target.mark.put(target.path)

    def _reserve(self, target: Target) -> None:
        """Space is taken now, so that a full disk is known before anything is timed. Where that cannot be, writes find out."""
        fd = _open(target.path, os.O_RDWR)
        try:
            code = fallocate(fd, target.nbytes)
        finally:
            os.close(fd)
        if code and code != errno.EOPNOTSUPP:
            raise StorageError(code, str(target.path), 0, target.nbytes, open_hint(code))

    def _fill(self, target: Target) -> None:
        """Write noise all over it, in large direct blocks where the file system takes them, and sync."""
        whole = target.nbytes // MiB * MiB
        noise = Buffers("mmaphuge", MiB, _LAYOUT_DEPTH, seed=1)
        fd = _open(target.path, os.O_RDWR | (os.O_DIRECT if target.direct else 0))
        under_way: deque[Request] = deque()
        try:
            with Aio(block_bytes=MiB, queue_depth=_LAYOUT_DEPTH) as aio:
                for at in range(0, whole, noise.nbytes):
                    if not self.is_wanted():
                        raise KeyboardInterrupt
                    under_way.append(aio.write(fd, at, noise.address, min(noise.nbytes, whole - at), noise))
                    if len(under_way) > _LAYOUT_REQUESTS:
                        _wait(under_way.popleft(), target)
                for request in under_way:
                    _wait(request, target)
            _fill_rest(target, whole, noise)
            os.fsync(fd)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, str(target.path), hint=open_hint(error.errno)) from error
        finally:
            os.close(fd)


def _paths(job: Job, clone: int) -> list[Path]:
    """fio's names: what filename lists, in the first directory, or JOB.CLONE.0 in the clone's directory."""
    directories = [Path(name) for name in job.directory] or [Path(".")]
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"job {job.name}: directory {directory} {'is no directory' if directory.exists() else 'does not exist'}")
    if job.filename:
        return [directories[0] / name for name in job.filename]
    return [directories[clone % len(directories)] / f"{job.name}.{clone}.0"]


def _look_at(path: Path) -> Target:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: its directory {path.parent} does not exist") from None
        return Target(path, 0, 0)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(path), hint=open_hint(error.errno)) from error
    if stat.S_ISBLK(found.st_mode):
        return Target(path, 0, _device_bytes(path), is_device=True, exists=True)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is neither a file nor a block device")
    return Target(path, 0, found.st_size, exists=True, mark=Mark.of(path))


def _device_bytes(path: Path) -> int:
    fd = _open(path, os.O_RDONLY)
    try:
        return int(struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0])
    finally:
        os.close(fd)


def _check_alignment(job: Job, target: Target) -> None:
    align = direct_io_align(target.path if target.exists else target.path.parent)
    for blocks in job.blocks:
        for size in blocks.sizes:
            if align is not None and size % align[1]:
                raise ConfigError(
                    f"job {job.name}: a block of {size} bytes does not fit direct I/O on {target.path}, which takes multiples of {align[1]}: "
                    "change bs, or give direct=0"
                )


def _refusal(target: Target) -> str:
    what = "removed" if target.unlinks and not target.writes and not target.needs_filling else "overwritten"
    if target.is_device:
        return f"{target.path} is a block device: everything on it would be {what}. If that is wanted, give --destroy-data"
    if target.path.resolve() in [path.resolve() for path in our_files(target.path.resolve().parent)]:
        return f"{target.path} holds the state of a training run: it would be {what}. Choose another file; --destroy-data would destroy the run"
    return (
        f"{target.path} has {target.has_bytes} bytes that `infinity io` did not lay out, or that changed since: they would be {what}. "
        "Choose another file, or give --destroy-data"
    )


def _check_unused(target: Target) -> None:
    """O_EXCL on a block device fails while it, or a part of it, is mounted or otherwise in use."""
    try:
        os.close(os.open(target.path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise ConfigError(f"{target.path} is in use, mounted or part of another device: it is not written to, --destroy-data or not") from error
        raise StorageError(error.errno or errno.EIO, str(target.path), hint=open_hint(error.errno)) from error


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(path), hint=open_hint(error.errno)) from error


def open_target(target: Target, job: Job) -> int:
    """A descriptor as the job wants it; its cached pages are dropped first, as fio's invalidate does. Raises StorageError."""
    fd = _open(target.path, (os.O_RDWR if job.writes else os.O_RDONLY) | (os.O_DIRECT if job.direct else 0))
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def _wait(request: Request, target: Target) -> None:
    if code := request.wait():
        raise StorageError(-code, str(target.path), max(request.failed_offset, 0), target.nbytes, open_hint(-code))


def _fill_rest(target: Target, start: int, noise: Buffers) -> None:
    """The end that is no whole MiB, through the page cache: it need not be aligned."""
    if start == target.nbytes:
        return
    fd = _open(target.path, os.O_RDWR)
    try:
        while start < target.nbytes:
            start += os.pwrite(fd, noise.bytes[: target.nbytes - start].tobytes(), start)
        os.fsync(fd)
    finally:
        os.close(fd)


def _undo(target: Target) -> None:
    """The run failed: a file that it made goes, one that it made longer is as long as before."""
    with contextlib.suppress(OSError):
        if not target.exists:
            target.path.unlink(missing_ok=True)
            return
        if target.has_bytes < target.path.stat().st_size:
            os.truncate(target.path, target.has_bytes)
        if target.mark is not None:
            _settle(target, False)


def _settle(target: Target, is_filled: bool) -> None:
    """From now on a change of the file shows."""
    full = is_filled or (target.mark is not None and target.mark.is_full)
    found = target.path.stat()
    Mark(found.st_size, found.st_mtime_ns, full).put(target.path)
