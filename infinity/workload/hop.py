"""target=cuda: the way between pinned memory and HBM, under way while the drive moves other blocks."""

from __future__ import annotations

from collections.abc import Iterator
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
from infinity.timeline import LaneSummary, Timeline
from infinity.workload.job import Job
from infinity.workload.memory import Buffers
from infinity.workload.pump import QUEUED, Rows, Sets, count_blocks

LEAST_BYTES, MOST_BYTES = 2 * MiB, 8 * MiB
"""Of a set: copies of less do not reach the rate of the link, and the larger all sets together, the less of them stays in the CPU's caches."""

_LANES = {READ: Lane.UPLOAD, WRITE: Lane.DOWNLOAD}


class Hop:
    """The stage of a job whose blocks end in HBM, or come from there. Use it under `with`: it pins the buffers as long as it lives.

    It copies as training does, on a stream for each direction, and HBM has a place for each buffer.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        """Raises CapacityError when HBM is full, or the system refuses to pin the buffers."""
        self._buffers = buffers
        self._is_pinned = False
        self._timeline = Timeline()
        try:
            self._hbm = torch.from_numpy(buffers.bytes).to(device, copy=True)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"HBM has no {format_bytes(buffers.nbytes)} for as many bytes of buffers: lower iodepth or bs") from error
        if device.type == "cuda":
            pin_memory(buffers.address, buffers.nbytes)
            self._is_pinned = True
        self._copies = Copies(device, self._timeline)

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

    def summaries(self, since_ns: int) -> dict[int, LaneSummary]:
        """By direction of the drive, what was copied since then. None of it is still under way."""
        lanes = {summary.lane: summary for summary in self._timeline.summary(since_ns=since_ns)}
        return {direction: lanes[lane] for direction, lane in _LANES.items() if lane in lanes}

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
    """A quarter of what is in flight is copied at once, while the drive has its queue full beside it."""
    blocks = max(min(max(job.depth * stride // 4, LEAST_BYTES), MOST_BYTES) // stride, files, 1)
    return Sets(blocks=blocks, queued=max(QUEUED, -(-count_blocks(job, files) // blocks)), lead=1, lag=2)


def device_of(job: Job) -> torch.device | None:
    """Where the job's blocks end beyond CPU memory. Raises ConfigError for a device that this machine does not have."""
    if job.target == "cpu":
        return None
    device = torch.device(job.target)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"this machine has {count}" if count else "torch finds no CUDA device on this machine"
        raise ConfigError(f"job {job.name}: target={job.target}: {found}. Leave target at cpu, or name one that is there")
    return device
