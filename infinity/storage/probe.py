"""What a path is and how fast: file system, free bytes, direct I/O, and a short measurement of its rates."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Lane
from infinity.native import Aio
from infinity.sizes import MiB
from infinity.storage.shardfile import open_direct
from infinity.storage.slabs import SlabPool
from infinity.storage.work import AioWork, join
from infinity.timeline import Timeline

HOME = "infinity"
"""Everything this package writes below a path is in PATH/infinity."""

_FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x01021997: "9p",
}
"""statfs(2) f_type of the file systems this page has something to say about."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "cifs", "smb2", "ceph", "lustre", "9p", "fuse"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """What the system says about a path."""

    path: Path
    file_system: str
    device: str
    """`major:minor` of the device below the path."""
    free_bytes: int
    is_writable: bool
    direct_io_align: tuple[int, int] | None
    """(memory, offset) alignment that statx reports for direct I/O; None where the kernel or file system does not say."""

    @property
    def is_memory(self) -> bool:
        """Memory, not a disk: its bytes count against the machine's memory, its rates say nothing of a drive."""
        return self.file_system in _IN_MEMORY

    @property
    def is_network(self) -> bool:
        return self.file_system in _NETWORK

    @property
    def is_overlay(self) -> bool:
        """A container's layered file system: use a real mount or volume."""
        return self.file_system == "overlayfs"

    @property
    def warning(self) -> str:
        """One sentence for people, empty when there is nothing to say."""
        if self.is_memory:
            return f"{self.path} is {self.file_system}: memory, not a disk. What lives there counts against CPU memory"
        if self.is_network:
            return f"{self.path} is {self.file_system}, a network or user-space file system: expect its latency in every step"
        if self.is_overlay:
            return f"{self.path} is a container's overlay: mount a real disk there, direct I/O on overlays is slow or refused"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Sequential rates of a path in bytes per second, measured through the engine's own I/O."""

    read: float
    write: float
    device: str = ""
    date: str = ""
    """Where and when; empty where nobody keeps them."""

    @property
    def weight(self) -> float:
        """The rate of equal bytes read and written, one after the other: what a path's share follows."""
        return 2 / (1 / self.read + 1 / self.write)


def check_path(path: Path) -> PathFacts:
    """The path's facts. Raises ConfigError when it is missing, not a directory or not writable."""
    if not path.exists():
        raise ConfigError(f"nvme.paths: {path} does not exist. Create the directory, or mount the disk there")
    if not path.is_dir():
        raise ConfigError(f"nvme.paths: {path} is not a directory. Give a directory on the disk, not a file or a block device")
    found = facts(path)
    if not found.is_writable:
        raise ConfigError(f"nvme.paths: {path} is not writable for this user, or mounted read-only")
    if found.direct_io_align is not None and found.direct_io_align[1] > 4096:
        wanted = found.direct_io_align[1]
        raise ConfigError(f"nvme.paths: {path} wants direct I/O in multiples of {wanted} bytes, shard files are laid out in multiples of 4096")
    return found


def facts(path: Path) -> PathFacts:
    """What the system says about an existing directory."""
    space, device = os.statvfs(path), os.stat(path).st_dev
    return PathFacts(
        path=path,
        file_system=_file_system(path),
        device=f"{os.major(device)}:{os.minor(device)}",
        free_bytes=space.f_bavail * space.f_frsize,
        is_writable=os.access(path, os.W_OK | os.X_OK) and not space.f_flag & os.ST_RDONLY,
        direct_io_align=direct_io_align(path),
    )


def _file_system(path: Path) -> str:
    """statfs(2): the first word of the answer is the file system's magic number on 64-bit Linux."""
    answer = (ctypes.c_long * 32)()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), ctypes.byref(answer)):
        return "unknown"
    magic = answer[0] & 0xFFFFFFFF
    return _FILE_SYSTEMS.get(magic, f"{magic:#x}")


_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STATX_MASK_AT, _STATX_DIO_AT = 0, 0x98
_STATX_SYSCALL = {"x86_64": 332, "aarch64": 291}


def direct_io_align(path: Path) -> tuple[int, int] | None:
    """(memory, offset) alignment for direct I/O on a file, or on files of a directory. None where nobody says; 4096 is then assumed.

    Directories have no answer of their own: a temporary file in them is asked.
    """
    if not path.is_dir():
        return _statx_align(path)
    probe = path / f".infinity-align-{os.getpid()}"
    try:
        probe.touch()
        return _statx_align(probe)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _statx_align(file: Path) -> tuple[int, int] | None:
    """statx(2) with STATX_DIOALIGN (Linux 6.1)."""
    number = _STATX_SYSCALL.get(platform.machine())
    if number is None:
        return None
    answer = ctypes.create_string_buffer(256)
    code = ctypes.CDLL(None, use_errno=True).syscall(number, _AT_FDCWD, os.fsencode(file), 0, _STATX_DIOALIGN, answer)
    if code or not int.from_bytes(answer.raw[_STATX_MASK_AT : _STATX_MASK_AT + 4], "little") & _STATX_DIOALIGN:
        return None
    memory, offset = (int.from_bytes(answer.raw[_STATX_DIO_AT + at : _STATX_DIO_AT + at + 4], "little") for at in (0, 4))
    return (memory, offset) if offset else None


_PROBE_BYTES = 32 * MiB
_REQUEST_BYTES = 8 * MiB
_PASS_S = 0.08


def rates(path: Path, *, refresh: bool = False) -> Rates:
    """The path's rates: from PATH/infinity/rates.json when they are of this device, else measured now and kept there."""
    kept = path / HOME / "rates.json"
    if not refresh:
        known = _load(kept)
        if known is not None and known.device == facts(path).device:
            return known
    measured = measure(path)
    kept.parent.mkdir(exist_ok=True)
    temporary = kept.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"version": 1, **asdict(measured)}, indent=1))
    temporary.replace(kept)
    return measured


def measure(path: Path) -> Rates:
    """Overwrite and read a temporary file with O_DIRECT for about 0.1 s each, after laying it out once."""
    found = check_path(path)
    nbytes = min(_PROBE_BYTES, found.free_bytes // 2 // _REQUEST_BYTES * _REQUEST_BYTES)
    if not nbytes:
        hint = f"{found.free_bytes} bytes are free, measuring the path takes {2 * _REQUEST_BYTES}. Free some, or choose another disk"
        raise StorageError(errno.ENOSPC, str(path), 0, _REQUEST_BYTES, hint)
    file = path / f".infinity-rates-{os.getpid()}"
    fd = open_direct(file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    pool = SlabPool(pin=False, threads=1)
    aio = Aio(block_bytes=MiB, queue_depth=32)
    try:
        file.unlink()
        once = _Passes(aio, fd, str(file), pool, nbytes)
        once.run(Lane.NVME_WRITE, seconds=0)
        write, read = (once.run(lane, seconds=_PASS_S) for lane in (Lane.NVME_WRITE, Lane.NVME_READ))
    finally:
        aio.close()
        os.close(fd)
        pool.close()
    return Rates(read=read, write=write, device=found.device, date=time.strftime("%Y-%m-%dT%H:%M:%S%z"))


class _Passes:
    """Passes over one temporary file."""

    def __init__(self, aio: Aio, fd: int, path: str, pool: SlabPool, nbytes: int) -> None:
        self._aio = aio
        self._fd = fd
        self._path = path
        self._nbytes = nbytes
        self._buffer = pool.take(nbytes).fill_(0x5A)
        self._timeline = Timeline()

    def run(self, lane: Lane, seconds: float) -> float:
        """Whole passes until `seconds` are over, at least one; bytes per second."""
        start, moved = time.monotonic(), 0
        while True:
            join(self._move(lane, at) for at in range(0, self._nbytes, _REQUEST_BYTES)).wait()
            moved += self._nbytes
            elapsed_s = time.monotonic() - start
            if elapsed_s >= seconds:
                return moved / max(elapsed_s, 1e-9)

    def _move(self, lane: Lane, at: int) -> AioWork:
        move = self._aio.read if lane is Lane.NVME_READ else self._aio.write
        request = move(self._fd, at, self._buffer.data_ptr() + at, _REQUEST_BYTES, self._buffer)
        return AioWork(request, lane, "probe", self._path, at, _REQUEST_BYTES, self._timeline)


def _load(kept: Path) -> Rates | None:
    try:
        found = json.loads(kept.read_text())
        return Rates(read=float(found["read"]), write=float(found["write"]), device=str(found["device"]), date=str(found["date"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
