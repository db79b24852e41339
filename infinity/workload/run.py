"""Runs jobs: one thread and one I/O engine for each clone, scattered requests queued so that the engine never runs dry."""

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
from numpy.typing import NDArray

from infinity.errors import StorageError
from infinity.native import READ, SYNC, TIMING, TRANSFER, WRITE, Aio, Backend, Request
from infinity.sizes import SECTOR_BYTES, align_up
from infinity.workload.job import Job
from infinity.workload.jobfile import JobText
from infinity.workload.layout import Layout, Place, Target, open_target
from infinity.workload.memory import Buffers
from infinity.workload.offsets import Pattern
from infinity.workload.stats import CloneStats
from infinity.workload.usage import Usage, thread_ids, usage_of
from infinity.workload.verify import flaw, seal

_QUEUED = 2
"""Scattered requests per clone: while one is counted the other keeps the queue full."""

_REQUEST_S = 0.05
"""How long one of them should take: long enough to cost nothing, short enough for a live rate."""

_FIRST_COUNT, _MOST_COUNT = 64, 16384
_POLL_S = 0.2


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


@dataclass(frozen=True, slots=True)
class Progress:
    """Where all clones of a group are, for a line on a terminal."""

    jobs: int
    elapsed_s: float
    total_s: float
    """0 where bytes decide."""
    read_bytes: int
    write_bytes: int
    ios: int
    share: float
    """0 to 1."""


@dataclass(slots=True)
class _Batch:
    transfers: NDArray[np.void]
    timings: NDArray[np.void]
    request: Request
    buffer_set: int


class Clone:
    """One clone of a job: prepared in the main thread, run in its own, closed in the main thread again."""

    def __init__(self, text: JobText, job: Job, clone: int, group: int, places: Sequence[Place], stop: threading.Event) -> None:
        self.job = job
        self._places = places
        self._stop = stop
        self._is_async = job.ioengine == "libaio"
        self._number = int.from_bytes(os.urandom(4), "little") << 16  # of the pass: no other run writes the same
        self._clone = clone
        self._count = min(_FIRST_COUNT, 4 * job.depth)
        self._written: list[NDArray[np.void]] = []
        self._threads: frozenset[int] = frozenset()
        self._open: ExitStack = ExitStack()
        self.pattern = Pattern(job, [place.nbytes for place in places], clone=clone)
        with ExitStack() as opening:  # undone when something below is refused
            self._fds = []
            for place in places:
                self._fds.append(fd := open_target(place.target, job))
                opening.callback(os.close, fd)
            before = thread_ids()
            self._aio = opening.enter_context(_engine(job))
            self._threads = thread_ids() - before
            stride = align_up(max(blocks.largest for blocks in job.blocks), SECTOR_BYTES)
            self._set = max(2 * job.depth, len(places), 16) if job.verify else 0
            self._buffers = Buffers(job.iomem, stride, self._set * _QUEUED or (1 + (job.reads and job.writes)) * self._aio.slots(), seed=clone)
            self._open = opening.pop_all()
        self._sets = deque(range(_QUEUED))
        self.result = CloneResult(text, job, clone, group, self._aio.backend, self._buffers.page_bytes(), tuple(places))

    def run(self) -> None:
        """All of it. Raises StorageError for the first block that fails."""
        self._threads |= {threading.get_native_id()}
        before = usage_of(self._threads)
        if self.job.ramp_time:
            ramp_ns = time.monotonic_ns() + round(self.job.ramp_time * 1e9)
            self._move(ramp_ns, loop=True, stats=None)
            self.pattern.restart()
            before = usage_of(self._threads)
        self._measured()
        self.result.usage = usage_of(self._threads) - before

    def close(self) -> None:
        """Waits for what is under way."""
        self._open.close()

    def _measured(self) -> None:
        job, begin_ns = self.job, time.monotonic_ns()
        until_ns = begin_ns + round(job.runtime * 1e9) if job.runtime else 0
        writes_verified = bool(job.verify) and job.writes
        while True:
            self._number += 1
            self._move(until_ns, loop=job.time_based and not writes_verified, stats=self.result.stats)
            if writes_verified:
                self._read_back()
            if not (job.time_based and writes_verified) or time.monotonic_ns() >= until_ns or self._stop.is_set():
                break
            self.pattern.restart()
        self.result.elapsed_ns = time.monotonic_ns() - begin_ns

    def _move(self, until_ns: int, *, loop: bool, stats: CloneStats | None) -> None:
        """The pattern until it or the time is over; with `loop`, from the start again when it is over."""

        taken, first_pass = 0, 0

        def take() -> NDArray[np.void]:
            nonlocal taken, first_pass
            found = self.pattern.take(self._set or self._count)
            if not len(found):
                first_pass = first_pass or taken
                if loop:
                    self.pattern.restart()
                    found = self.pattern.take(self._set or self._count)
            taken += int(found["nbytes"].sum())
            return found

        moved = self._pump(take, until_ns, stats)
        self.result.is_covered |= bool(first_pass) and moved >= first_pass  # transfers are done in their order

    def _read_back(self) -> None:
        """What this pass has written, in the order in which it was. fio counts these reads too."""
        rest, self._written = deque(self._written), []

        def take() -> NDArray[np.void]:
            found = rest.popleft() if rest else np.zeros(0, TRANSFER)
            found["direction"] = READ
            return found

        self._pump(take, 0, self.result.stats, number=self._number)

    def _pump(self, take: Callable[[], NDArray[np.void]], until_ns: int, stats: CloneStats | None, number: int | None = None) -> int:
        """Keep requests queued until nothing more is taken; returns the bytes moved. `number` is the pass that must have written what is read."""
        queued: deque[_Batch] = deque()
        start_ns, last_ns, moved = 0, 0, 0
        moving: set[int] = set()
        while True:
            over = self._stop.is_set() or (until_ns and time.monotonic_ns() >= until_ns)
            while len(queued) < _QUEUED and not over:
                transfers = take()
                over = not len(transfers)
                if not over:
                    queued.append(self._submit(transfers, until_ns))
            if not queued:
                break
            transfers, timings = self._finished(queued.popleft(), number)
            if not len(transfers):
                continue
            start_ns = start_ns or int(timings["begun_ns"][0])
            last_ns = max(last_ns, int(timings["done_ns"].max()))
            if stats is not None:
                stats.add(transfers, timings, start_ns=start_ns, is_async=self._is_async)
                moving |= set(np.unique(transfers["direction"]).tolist())
            moved += int(transfers["nbytes"].sum())
            for direction in self.result.moved:
                self.result.moved[direction] += int(transfers["nbytes"][transfers["direction"] == direction].sum())
            self.result.blocks += len(transfers)
        for direction in moving - {SYNC}:
            assert stats is not None
            stats.directions[direction].elapsed_ns += last_ns - start_ns
        return moved

    def _submit(self, transfers: NDArray[np.void], until_ns: int) -> _Batch:
        buffer_set = 0
        if self._set:
            buffer_set = self._sets.popleft()
            blocks = np.flatnonzero(transfers["direction"] != SYNC)
            transfers["buffer"][blocks] = buffer_set * self._set + np.arange(len(blocks))
            for row in transfers[blocks]:
                if row["direction"] == WRITE:
                    seal(self._block(row), int(row["offset"]), self._number, self._clone)
        timings = np.zeros(len(transfers), TIMING)
        place, stride = self._buffers.address, self._buffers.stride
        request = self._aio.scatter(self._fds, transfers, timings, place, stride, until_ns=until_ns, keep=self._buffers)
        return _Batch(transfers, timings, request, buffer_set)

    def _finished(self, batch: _Batch, number: int | None) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Waits; what was done of it."""
        code = batch.request.wait()
        if code < 0:
            raise self._failure(batch, -code)
        done = batch.timings["done_ns"] > 0
        transfers, timings = batch.transfers[done], batch.timings[done]
        if len(timings):
            took_s = max((int(timings["done_ns"].max()) - int(timings["begun_ns"][0])) / 1e9, 1e-6)
            self._count = int(np.clip(len(timings) * _REQUEST_S / took_s, max(2 * self.job.depth, 16), _MOST_COUNT))
        if self._set:
            self._check(transfers, number)
            self._sets.append(batch.buffer_set)
        return transfers, timings

    def _check(self, transfers: NDArray[np.void], number: int | None) -> None:
        reads_back = number is not None or not self.job.writes
        written = transfers[transfers["direction"] == WRITE]
        if number is None and len(written):
            self._written.append(written)
        for row in transfers if reads_back else ():
            if wrong := flaw(self._block(row), int(row["offset"]), number):
                path = self._places[int(row["file"])].target.path
                raise StorageError(errno.EBADMSG, str(path), int(row["offset"]), int(row["nbytes"]), f"verify: {wrong}")

    def _block(self, row: np.void) -> NDArray[np.uint8]:
        start = int(row["buffer"]) * self._buffers.stride
        return self._buffers.bytes[start : start + int(row["nbytes"])]

    def _failure(self, batch: _Batch, code: int) -> StorageError:
        failed = np.flatnonzero((batch.timings["begun_ns"] > 0) & (batch.timings["done_ns"] == 0))
        row = batch.transfers[failed[0] if len(failed) else 0]
        word = {READ: "read", WRITE: "write", SYNC: "fsync"}[int(row["direction"])]
        hint = f"job {self.job.name}: the {word} failed"
        if code == errno.EINVAL and self.job.direct:
            hint += ": its size may not fit direct I/O here. Try larger blocks, or direct=0"
        elif code == errno.EIO and word == "read":
            hint += ": the drive failed, or the file ends before it"
        elif code in (errno.ENOSPC, errno.EDQUOT):
            hint += ": the disk is full"
        return StorageError(code, str(self._places[int(row["file"])].target.path), int(row["offset"]), int(row["nbytes"]), hint)


def _engine(job: Job) -> Aio:
    """The engine that training uses, with the job's block size as its largest transfer. Raises StorageError."""
    largest = max(blocks.largest for blocks in job.blocks)
    if job.ioengine == "psync":
        return Aio(block_bytes=largest, queue_depth=1, backend="threads")
    backends: tuple[Backend, ...] = ("libaio", "kernel")  # the library, or the system calls that it wraps
    try:
        return Aio(block_bytes=largest, queue_depth=job.depth, backend=backends[0])
    except StorageError as error:
        if error.errno != errno.ENOENT:
            hint = f"job {job.name}: the kernel gives no context of iodepth={job.iodepth}. Raise fs.aio-max-nr, or lower iodepth or numjobs"
            raise StorageError(error.errno or errno.EAGAIN, "kernel AIO", hint=hint) from error
        return Aio(block_bytes=largest, queue_depth=job.depth, backend=backends[1])


def run_jobs(
    groups: Sequence[Sequence[JobText]],
    *,
    destroy_data: bool = False,
    say: Callable[[str], None] = lambda line: None,
    watch: Callable[[Progress], bool] = lambda progress: True,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[CloneResult]:
    """Run groups one after the other, the jobs of a group together, and settle the files. Results are in the order of the jobs.

    `say` gets lines for people; `watch` is called several times a second, and its False ends the run early, with results. When `is_wanted`
    turns False while files are laid out, KeyboardInterrupt is raised.
    Raises ConfigError before anything is touched, StorageError for I/O that fails; then the files that this run made are removed.
    """
    checked = [[(text, text.job()) for text in texts] for texts in groups]
    with Layout(destroy_data=destroy_data, say=say, is_wanted=is_wanted) as layout:
        plan = [
            [(text, job, clone, group, layout.add(job, clone)) for text, job in jobs for clone in range(job.numjobs)]
            for group, jobs in enumerate(checked)
        ]
        layout.prepare()
        results: list[CloneResult] = []
        for members in plan:
            done, goes_on = _run_group(members, watch)
            results += done
            if not goes_on:
                break
        layout.finish(_covered(results))
    return results


_Member = tuple[JobText, Job, int, int, tuple[Place, ...]]


def _run_group(members: Sequence[_Member], watch: Callable[[Progress], bool]) -> tuple[list[CloneResult], bool]:
    stop = threading.Event()
    clones: list[Clone] = []
    try:
        for text, job, index, group, places in members:
            clones.append(Clone(text, job, index, group, places, stop))
        goes_on = _run_threads(clones, stop, watch)
        return [clone.result for clone in clones], goes_on
    finally:
        stop.set()
        for clone in clones:
            clone.close()


def _run_threads(clones: Sequence[Clone], stop: threading.Event, watch: Callable[[Progress], bool]) -> bool:
    """False when whoever watches ended it."""
    failures: list[BaseException] = []
    gate = threading.Event()

    def work(clone: Clone) -> None:
        gate.wait()
        try:
            clone.run()
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(clone,), name=f"io-{clone.job.name}") for clone in clones]
    goes_on = True
    begin_s = time.monotonic()
    try:
        for thread in threads:
            thread.start()
        gate.set()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                if thread.is_alive():
                    thread.join(_POLL_S)
                    break
            if goes_on and not watch(_progress(clones, time.monotonic() - begin_s)):
                goes_on = False
                stop.set()
    finally:
        stop.set()
        gate.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
    return goes_on


def _progress(clones: Sequence[Clone], elapsed_s: float) -> Progress:
    total_s = max(clone.job.ramp_time + clone.job.runtime for clone in clones)
    wanted = sum(place.nbytes for clone in clones for place in clone.result.places)
    sums = {direction: sum(clone.result.moved[direction] for clone in clones) for direction in (READ, WRITE)}
    share = elapsed_s / total_s if total_s and any(clone.job.time_based for clone in clones) else sum(sums.values()) / max(wanted, 1)
    return Progress(
        jobs=len(clones),
        elapsed_s=elapsed_s,
        total_s=total_s,
        read_bytes=sums[READ],
        write_bytes=sums[WRITE],
        ios=sum(clone.result.blocks for clone in clones),
        share=min(share, 1.0),
    )


def _covered(results: Sequence[CloneResult]) -> list[Target]:
    """Targets that some job wrote from end to end."""
    return [
        place.target
        for result in results
        if result.is_covered and result.job.writes and not result.job.reads
        for place in result.places
        if place.nbytes >= max(place.target.nbytes, place.target.has_bytes)
    ]
