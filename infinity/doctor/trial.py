"""One sector written and read back through direct I/O, as a run would, in a file that has no name."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from infinity.native import Aio
from infinity.sizes import SECTOR_BYTES
from infinity.storage.shardfile import open_direct
from infinity.storage.slabs import SlabPool

DEADLINE_S = 10.0
"""A drive that takes longer for a sector is none to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How it went."""

    is_direct: bool
    """The file system took O_DIRECT: open(2)."""
    backend: str
    """What moved the bytes: "libaio", "kernel", or "threads" where asynchronous calls were refused."""
    error: int
    """0, or the errno of the first transfer that failed; EIO also when other bytes came back."""


def try_direct_io(directory: Path) -> Trial:
    """Write 4096 bytes and read them back. Raises StorageError when no file can be made."""
    fd = _open_nameless(directory)
    try:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        with closing(SlabPool(pin=False, threads=1)) as pool, Aio(block_bytes=SECTOR_BYTES, queue_depth=1, deadline_s=DEADLINE_S) as aio:
            error = _round_trip(aio, fd, pool)
            return Trial(is_direct=is_direct, backend=aio.backend, error=error)
    finally:
        os.close(fd)


def _open_nameless(directory: Path) -> int:
    """O_TMPFILE, open(2): nothing stays even if the process is killed. Where that is refused, a named file that is unlinked at once."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        file = directory / f".infinity-doctor-{os.getpid()}"
        fd = open_direct(file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file.unlink()
        return fd


def _round_trip(aio: Aio, fd: int, pool: SlabPool) -> int:
    written = pool.take(SECTOR_BYTES).fill_(0x5A)
    read = pool.take(SECTOR_BYTES).fill_(0)
    for move, buffer in ((aio.write, written), (aio.read, read)):
        if code := move(fd, 0, buffer.data_ptr(), SECTOR_BYTES, buffer).wait():
            return -code
    return 0 if read.equal(written) else errno.EIO
