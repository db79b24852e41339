"""The file of one path that trials read and overwrite: laid out once, without a name, gone with the process."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from infinity.errors import StorageError
from infinity.kinds import Lane
from infinity.native import Aio
from infinity.sizes import MiB, format_bytes
from infinity.storage.probe import check_path
from infinity.storage.shardfile import fallocate, open_direct
from infinity.storage.slabs import SlabPool
from infinity.storage.work import AioWork, Work
from infinity.timeline import Timeline
from infinity.tune.setting import MOST_IN_FLIGHT, Setting

REQUEST_BYTES = 16 * MiB
"""What one request moves, as a chunk of training does; the engine cuts it into blocks."""

LEAST_BYTES = 8 * REQUEST_BYTES
"""Of a file, so that no request meets another's place."""


class Ground:
    """A preallocated file of `nbytes`, overwritten once before anything is timed, and the memory that is moved. Use under `with`.

    Raises ConfigError for a path that cannot work, StorageError when there is no room, before anything is written.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes // REQUEST_BYTES * REQUEST_BYTES
        found = check_path(path)
        if self.nbytes > found.free_bytes:
            hint = f"{format_bytes(self.nbytes)} are to be laid out, {format_bytes(found.free_bytes)} are free: lower --size, or use another disk"
            raise StorageError(errno.ENOSPC, str(path), 0, self.nbytes, hint)
        file = path / f".infinity-tune-{os.getpid()}"
        self._name = str(file)
        self._fd = open_direct(file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._pool = SlabPool(pin=False, threads=1)
        self._timeline = Timeline()
        try:
            file.unlink()
            code = fallocate(self._fd, self.nbytes)
            if code not in (0, errno.EOPNOTSUPP):  # where space cannot be taken ahead, the first pass takes it
                raise StorageError(code, self._name, 0, self.nbytes, "the file of the trials could not be laid out: lower --size")
            self._buffers = [self._pool.take(REQUEST_BYTES).random_(0, 256) for _ in range(2 * requests_ahead(MOST_IN_FLIGHT))]
            self.overwrite()
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        os.close(self._fd)
        self._buffers = []
        self._pool.close()

    def overwrite(self) -> None:
        """Every byte once: blocks that were never written are read and written at other rates."""
        with closing(Aio(block_bytes=MiB, queue_depth=32)) as aio:
            stream = _Stream(self, aio, Lane.NVME_WRITE, self._buffers[:4])
            while stream.moved < self.nbytes:
                stream.turn()

    def rate(self, setting: Setting, lanes: tuple[Lane, ...], seconds: float) -> float:
        """Bytes per second of `lanes` together, as many bytes of each, kept as full as `setting` says for `seconds`."""
        ahead = requests_ahead(setting.in_flight)
        aio = Aio(block_bytes=setting.block_bytes, queue_depth=setting.depth, readers=setting.workers, writers=setting.workers)
        with closing(aio):
            begin = time.monotonic()
            streams = [_Stream(self, aio, lane, self._buffers[at * ahead : (at + 1) * ahead]) for at, lane in enumerate(lanes)]
            while time.monotonic() - begin < seconds:
                for stream in streams:
                    stream.turn()
            for stream in streams:
                stream.drain()
            return sum(stream.moved for stream in streams) / (time.monotonic() - begin)

    def start(self, aio: Aio, lane: Lane, at: int, buffer: Tensor) -> Work:
        """One request, at request number `at` of the file."""
        offset = at * REQUEST_BYTES % self.nbytes
        move = aio.read if lane is Lane.NVME_READ else aio.write
        request = move(self._fd, offset, buffer.data_ptr(), REQUEST_BYTES, buffer)
        return AioWork(request, lane, "trial", self._name, offset, REQUEST_BYTES, self._timeline)


class _Stream:
    """One direction: requests one after the other through the file, one for each buffer under way."""

    def __init__(self, ground: Ground, aio: Aio, lane: Lane, buffers: Sequence[Tensor]) -> None:
        self._ground, self._aio, self._lane = ground, aio, lane
        self._next = ground.nbytes // REQUEST_BYTES // 2 if lane is Lane.NVME_WRITE else 0  # a mix reads what was written a while ago
        self._under_way = deque((self._start(buffer), buffer) for buffer in buffers)
        self.moved = 0

    def turn(self) -> None:
        """Wait for the oldest request, and put its buffer to use again. Raises StorageError."""
        work, buffer = self._under_way.popleft()
        work.wait()
        self.moved += REQUEST_BYTES
        self._under_way.append((self._start(buffer), buffer))

    def drain(self) -> None:
        """Wait for all of them: they count, as does the time that they take."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
            self.moved += REQUEST_BYTES

    def _start(self, buffer: Tensor) -> Work:
        self._next += 1
        return self._ground.start(self._aio, self._lane, self._next - 1, buffer)


def requests_ahead(in_flight: int) -> int:
    """Requests that keep `in_flight` bytes with the kernel while one ends and another begins."""
    return in_flight // REQUEST_BYTES + 2
