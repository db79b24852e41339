"""target=cuda: the way between pinned memory and HBM, under way while the drive moves other blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from infinity.errors import CapacityError, ConfigError
from infinity.kinds import Lane
from infinity.native import READ, WRITE
from infinity.sizes import MiB, format_bytes
from infinity.storage.copies import Copies
from infinity.storage.slabs import pin_memory, unpin_memory
from infinity.storage.work import Work, join
from infinity.timeline import Timeline
from infinity.workload.job import Job
from infinity.workload.memory import Buffers
from infinity.workload.pump import LARGE_BYTES, QUEUED, Rows, Sets, count_blocks

LEAST_BYTES = 2 * MiB
"""Of a set: copies of less do not reach the rate of the link."""

_LANES = {READ: Lane.UPLOAD, WRITE: Lane.DOWNLOAD}


@dataclass(slots=True)
class Copied:
    """What went one way over the link."""

    lane: Lane
    nbytes: int = 0
    """More than the drive moved where a time limit cut writes off whose blocks had come from HBM already."""
    busy_ns: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second of copying."""
        return self.nbytes * 1e9 / self.busy_ns if self.busy_ns else 0.0


class _Sums(Timeline):
    """Adds up the copies, which in a long run are too many to remember. Those of one lane come one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self.copied = {direction: Copied(lane) for direction, lane in _LANES.items()}

    def record(self, lane: Lane, name: str, start_ns: int, stop_ns: int, nbytes: int = 0) -> None:
        with self._adding:
            for copied in self.copied.values():
                if copied.lane is lane:
                    copied.nbytes += nbytes
                    copied.busy_ns += stop_ns - start_ns


class Hop:
    """The stage of a job whose blocks end in HBM, or come from there. Use it under `with`: it pins the buffers as long as it lives.

    It copies as training does, on a stream for each direction, and HBM has a place for each buffer.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        """Raises CapacityError when HBM is full, or the system refuses to pin the buffers."""
        self._buffers = buffers
        self._is_pinned = False
        self._sums = _Sums()
        try:
            self._hbm = torch.from_numpy(buffers.bytes).to(device, copy=True)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"HBM has no {format_bytes(buffers.nbytes)} for as many bytes of buffers: lower iodepth or bs") from error
        self._copies = Copies(device, self._sums)
        if device.type == "cuda":
            pin_memory(buffers.address, buffers.nbytes)
            self._is_pinned = True

    def __enter__(self) -> Hop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._copies.close()
        if self._is_pinned:
            unpin_memory(self._buffers.address)

    def before(self, transfers: Rows) -> Work:
        spans = list(self._spans(transfers, WRITE))
        return join(self._copies.download(self._hbm[span], torch.from_numpy(self._buffers.bytes[span])) for span in spans)

    def after(self, transfers: Rows) -> Work:
        spans = list(self._spans(transfers, READ))
        return join(self._copies.upload(torch.from_numpy(self._buffers.bytes[span]), self._hbm[span]) for span in spans)

    def restart(self) -> None:
        """What was copied so far does not count."""
        self._copies.drain_spans()
        self._sums.restart()

    def copied(self) -> dict[int, Copied]:
        """By direction of the drive, what was copied since. None of it is still under way."""
        self._copies.drain_spans()
        return {direction: copied for direction, copied in self._sums.copied.items() if copied.nbytes}

    def _spans(self, transfers: Rows, direction: int) -> Iterator[slice]:
        """Bytes of the buffers that hold this direction's blocks; blocks that lie end to end are one span."""
        mine = np.sort(transfers[transfers["direction"] == direction], order="buffer")
        starts = mine["buffer"].astype(np.int64) * self._buffers.stride
        stops = starts + mine["nbytes"].astype(np.int64)
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        for part in np.split(np.arange(len(mine)), breaks):
            if len(part):
                yield slice(int(starts[part[0]]), int(stops[part[-1]]))


def hop_sets(job: Job, files: int, stride: int) -> Sets:
    """A quarter of what is in flight is copied at once, while the drive has its queue full beside it. The larger all sets together, the less of
    them stays in the CPU's caches."""
    blocks = max(min(max(job.depth * stride // 4, LEAST_BYTES), LARGE_BYTES) // stride, files, 1)
    return Sets(blocks=blocks, queued=max(QUEUED, -(-count_blocks(job, files, stride) // blocks)), lead=1, lag=2)


def device_of(job: Job) -> torch.device | None:
    """Where the job's blocks end beyond CPU memory. Raises ConfigError for a device that this machine does not have."""
    if job.target == "cpu":
        return None
    index = int(job.target.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"this machine has {count}" if count else "torch finds no CUDA device on this machine"
        raise ConfigError(f"job {job.name}: target={job.target}: {found}. Leave target at cpu, or name one that is there")
    return torch.device("cuda", index)
