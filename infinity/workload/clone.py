"""One clone of a job: its files, its engine, its buffers, and the passes that it makes over them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from infinity.errors import StorageError
from infinity.native import READ, SYNC, TRANSFER, WRITE, Aio, available_backends
from infinity.sizes import SECTOR_BYTES, align_up
from infinity.workload.hop import Copied, Hop, device_of, hop_sets
from infinity.workload.job import Job
from infinity.workload.jobfile import JobText
from infinity.workload.layout import Place, open_target
from infinity.workload.memory import Buffers
from infinity.workload.offsets import Pattern
from infinity.workload.pump import Failure, Pump, Rows, Sets, count_blocks
from infinity.workload.stats import CloneStats
from infinity.workload.usage import Usage, thread_ids, usage_of
from infinity.workload.verify import Verifier


@dataclass(slots=True)
class CloneResult:
    """What one clone of a job did."""

    text: JobText
    job: Job
    clone: int
    group: int
    backend: str
    page_bytes: int
    places: tuple[Place, ...]
    stats: CloneStats = field(default_factory=CloneStats)
    usage: Usage = field(default_factory=Usage)
    elapsed_ns: int = 0
    """From the first block to the last, without ramp time."""
    is_covered: bool = False
    """A whole pass was done."""
    moved: dict[int, int] = field(default_factory=lambda: {READ: 0, WRITE: 0})
    """Bytes of each direction so far, ramp time included: for whoever watches."""
    blocks: int = 0
    """As many blocks."""
    hops: dict[int, Copied] = field(default_factory=dict)
    """With target=cuda, by direction: the copies between pinned memory and HBM, without ramp time."""


class Clone:
    """Prepared in the main thread, run in its own, closed in the main thread again."""

    def __init__(self, text: JobText, job: Job, clone: int, group: int, places: Sequence[Place], stop: threading.Event) -> None:
        self.job = job
        self._places = places
        self._stop = stop
        self._threads: frozenset[int] = frozenset()
        self._open: ExitStack = ExitStack()
        self.pattern = Pattern(job, [place.nbytes for place in places], clone=clone)
        stride = align_up(max(blocks.largest for blocks in job.blocks), SECTOR_BYTES)
        device = device_of(job)
        with ExitStack() as opening:  # undone when something below is refused
            fds = []
            for place in places:
                fds.append(fd := open_target(place.target, job))
                opening.callback(os.close, fd)
            before = thread_ids()
            aio = opening.enter_context(_engine(job))
            self._threads = thread_ids() - before
            sets = _sets(job, len(places), stride)
            shared = (1 + (job.reads and job.writes)) * aio.slots()
            buffers = Buffers(job.iomem, stride, sets.blocks * sets.count if sets is not None else shared, seed=clone)
            self._verifier = Verifier(job, buffers, places, clone) if job.verify else None
            self._hop = opening.enter_context(Hop(buffers, device)) if device is not None else None
            self._pump = Pump(job, aio, fds, buffers, stop, self._verifier or self._hop, sets)
            self.result = CloneResult(text, job, clone, group, aio.backend, buffers.page_bytes(), tuple(places))
            self._open = opening.pop_all()

    def run(self) -> None:
        """All of it. Raises StorageError for the first block that fails."""
        self._threads |= {threading.get_native_id()}
        before = usage_of(self._threads)
        if self.job.ramp_time:
            ramp_ns = time.monotonic_ns() + round(self.job.ramp_time * 1e9)
            self._pass(ramp_ns, loop=True, stats=None)
            self._restart()
            before = usage_of(self._threads)
        self._measured()
        self.result.usage = usage_of(self._threads) - before

    def close(self) -> None:
        """Waits for what is under way."""
        self._open.close()

    def _restart(self) -> None:
        """What was done so far does not count."""
        self.pattern.restart()
        if self._verifier is not None:
            self._verifier.restart()
        if self._hop is not None:
            self._hop.restart()

    def _measured(self) -> None:
        job, begin_ns = self.job, time.monotonic_ns()
        until_ns = begin_ns + round(job.runtime * 1e9) if job.runtime else 0
        reads_back = self._verifier is not None and job.writes
        while True:
            self._pass(until_ns, loop=job.time_based and not reads_back, stats=self.result.stats)
            if self._verifier is not None and reads_back:
                self._read_back(self._verifier)
            if not (job.time_based and reads_back) or time.monotonic_ns() >= until_ns or self._stop.is_set():
                break
            self.pattern.restart()
        self.result.elapsed_ns = time.monotonic_ns() - begin_ns
        if self._hop is not None:
            self.result.hops = self._hop.copied()

    def _pass(self, until_ns: int, *, loop: bool, stats: CloneStats | None) -> None:
        """The pattern until it or the time is over; with `loop`, from the start again when it is over."""
        taken, first_pass = 0, 0

        def take(count: int) -> Rows:
            nonlocal taken, first_pass
            found = self.pattern.take(count)
            if not len(found):
                first_pass = first_pass or taken
                if loop:
                    self.pattern.restart()
                    found = self.pattern.take(count)
            taken += int(found["nbytes"].sum())
            return found

        moved = self._move(take, until_ns, stats)
        self.result.is_covered |= bool(first_pass) and moved >= first_pass  # transfers are done in their order

    def _read_back(self, verifier: Verifier) -> None:
        """What this pass has written, in the order in which it was. fio counts these reads too."""
        with verifier.reading_back() as written:
            rest = deque(written)

            def take(count: int) -> Rows:
                found = rest.popleft() if rest else np.zeros(0, TRANSFER)
                found["direction"] = READ
                return found

            self._move(take, 0, self.result.stats)

    def _move(self, take: Callable[[int], Rows], until_ns: int, stats: CloneStats | None) -> int:
        """Everything that is taken; returns its bytes."""
        moved = 0
        moving: set[int] = set()
        try:
            for transfers, timings in self._pump.run(take, until_ns):
                moved += int(transfers["nbytes"].sum())
                moving |= set(np.unique(transfers["direction"]).tolist())
                self._count(transfers, timings, stats)
        except Failure as failure:
            raise self._explain(failure) from failure
        for direction in moving - {SYNC}:
            if stats is not None:
                stats.directions[direction].elapsed_ns += self._pump.stopped_ns - self._pump.started_ns
        return moved

    def _count(self, transfers: Rows, timings: Rows, stats: CloneStats | None) -> None:
        if stats is not None:
            stats.add(transfers, timings, start_ns=self._pump.started_ns, is_async=self.job.ioengine == "libaio")
        for direction in self.result.moved:
            self.result.moved[direction] += int(transfers["nbytes"][transfers["direction"] == direction].sum())
        self.result.blocks += len(transfers)

    def _explain(self, failure: Failure) -> StorageError:
        row, code = failure.row, failure.code
        word = {READ: "read", WRITE: "write", SYNC: "fsync"}[int(row["direction"])]
        hint = f"job {self.job.name}: the {word} failed"
        if code == errno.EINVAL and self.job.direct:
            hint += ": its size may not fit direct I/O here. Try larger blocks, or direct=0"
        elif code == errno.EIO and word == "read":
            hint += ": the drive failed, or the file ends before it"
        elif code in (errno.ENOSPC, errno.EDQUOT):
            hint += ": the disk is full"
        return StorageError(code, str(self._places[int(row["file"])].target.path), int(row["offset"]), int(row["nbytes"]), hint)


def _sets(job: Job, files: int, stride: int) -> Sets | None:
    """Buffers in sets, for a job with a stage."""
    if job.verify:
        return Sets(blocks=count_blocks(job, files, stride))
    return hop_sets(job, files, stride) if job.target != "cpu" else None


def _engine(job: Job) -> Aio:
    """The engine that training uses, with the job's block size as its largest transfer. Raises StorageError."""
    largest = max(blocks.largest for blocks in job.blocks)
    if job.ioengine == "psync":
        return Aio(block_bytes=largest, queue_depth=1, backend="threads")
    binding = available_backends()[0]  # the library, or the system calls that it wraps
    try:
        return Aio(block_bytes=largest, queue_depth=job.depth, backend=binding)
    except StorageError as error:
        hint = f"job {job.name}: the kernel gives no context of iodepth={job.iodepth}. Raise fs.aio-max-nr, or lower iodepth or numjobs"
        raise StorageError(error.errno or errno.EAGAIN, "kernel AIO", hint=hint) from error
