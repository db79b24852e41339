"""Moves blocks through an engine: scattered requests queued so that it never runs dry, and a stage for what happens to blocks beside the drive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infinity.native import SYNC, TIMING, TRANSFER, Aio, Request
from infinity.sizes import MiB
from infinity.storage.work import COMPLETED, Work
from infinity.workload.job import Job
from infinity.workload.memory import Buffers

QUEUED = 2
"""Scattered requests at the drive: while one is counted the other keeps the queue full."""

_REQUEST_S = 0.2
"""How long one of them should take: short enough for a live rate, and long enough that counting, which takes a core, meets few blocks."""

_FIRST_COUNT, _LEAST_COUNT, _MOST_COUNT = 64, 16, 16384

LARGE_BYTES = 8 * MiB
"""Of a set: more is only held where a job's own depth asks for it."""

Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """Buffers that a stage needs for itself: a set is one request's."""

    blocks: int
    queued: int = QUEUED
    """Sets at the drive: enough blocks that its queue stays full over the end of one of them."""
    lead: int = 0
    """Sets that get ready meanwhile."""
    lag: int = 0
    """Sets that are still on their way after the drive is done with them."""

    @property
    def count(self) -> int:
        return self.queued + self.lead + self.lag


class Stage(Protocol):
    """What happens to a set of blocks before it is written and after it was read."""

    def before(self, transfers: Rows) -> Work:
        """Blocks that will be written get their contents: they are there once the work is over."""
        ...

    def after(self, transfers: Rows) -> Work:
        """The drive is done with these blocks; the set is free once the work is over."""
        ...


@dataclass(slots=True)
class _Batch:
    transfers: Rows
    timings: Rows
    begun_ns: int
    ready: Work
    buffer_set: int
    request: Request | None = None


class Failure(Exception):
    """The drive refused a block. `row` is the transfer, `code` the errno."""

    def __init__(self, row: np.void, code: int) -> None:
        super().__init__(code)
        self.row, self.code = row, code


class Pump:
    """The blocks of one clone of a job, through its engine. Without a stage blocks share the engine's own few buffers."""

    def __init__(
        self, job: Job, aio: Aio, fds: Sequence[int], buffers: Buffers, stop: threading.Event, stage: Stage | None = None, sets: Sets | None = None
    ) -> None:
        """`sets` are those of `buffers` that `stage` needs."""
        self._job, self._aio, self._fds, self._buffers, self._stop = job, aio, fds, buffers, stop
        self._stage, self._sets = stage, sets
        self._free = deque(range(sets.count if sets is not None else 0))
        self._leaving: deque[tuple[int, Work]] = deque()
        self._count = min(_FIRST_COUNT, 4 * job.depth)
        self.started_ns = 0
        """Of the last run: when its first block began, on CLOCK_MONOTONIC."""
        self.stopped_ns = 0
        """When its last block was where it belongs."""

    def run(self, take: Callable[[int], Rows], until_ns: int) -> Iterator[tuple[Rows, Rows]]:
        """What has been done, request by request: (TRANSFER rows, TIMING rows). Nothing more begins after `until_ns` (0: no limit).

        `take(n)` gives the next transfers, about n, none at the end. Raises Failure.
        """
        coming: deque[_Batch] = deque()
        queued: deque[_Batch] = deque()
        done: list[tuple[Rows, Rows]] = []
        limit, lead = (self._sets.queued, self._sets.lead) if self._sets is not None else (QUEUED, 0)
        self.started_ns = self.stopped_ns = 0
        is_over = False
        while True:
            is_over = is_over or self._stop.is_set() or bool(until_ns and time.monotonic_ns() >= until_ns)
            while not is_over and len(coming) + len(queued) < limit + lead:
                transfers = take(self._sets.blocks if self._sets is not None else self._count)
                is_over = not len(transfers)
                if not is_over:
                    coming.append(self._prepare(transfers))
            while coming and len(queued) < limit:
                queued.append(self._submit(coming.popleft(), until_ns))
            if not queued:
                break
            done.append(self._finish(queued.popleft()))
            if self._sets is None or sum(len(transfers) for transfers, _ in done) >= self._count:
                yield _merged(done)
        yield _merged(done)
        while self._leaving:
            self._let_go_oldest()
            self.stopped_ns = time.monotonic_ns()

    def _prepare(self, transfers: Rows) -> _Batch:
        begun_ns, buffer_set = time.monotonic_ns(), 0
        ready: Work = COMPLETED
        if self._stage is not None and self._sets is not None:
            buffer_set = self._free_set()
            blocks = np.flatnonzero(transfers["direction"] != SYNC)
            blocks = blocks[np.argsort(transfers["direction"][blocks], kind="stable")]  # reads side by side, and writes
            transfers["buffer"][blocks] = buffer_set * self._sets.blocks + np.arange(len(blocks))
            ready = self._stage.before(transfers)
        return _Batch(transfers, np.zeros(len(transfers), TIMING), begun_ns, ready, buffer_set)

    def _submit(self, batch: _Batch, until_ns: int) -> _Batch:
        batch.ready.wait()
        place, stride = self._buffers.address, self._buffers.stride
        batch.request = self._aio.scatter(self._fds, batch.transfers, batch.timings, place, stride, until_ns=until_ns, keep=self._buffers)
        return batch

    def _finish(self, batch: _Batch) -> tuple[Rows, Rows]:
        """Waits; what was done of it."""
        assert batch.request is not None
        code = batch.request.wait()
        if code < 0:
            failed = np.flatnonzero((batch.timings["begun_ns"] > 0) & (batch.timings["done_ns"] == 0))
            raise Failure(batch.transfers[failed[0] if len(failed) else 0], -code)
        done = batch.timings["done_ns"] > 0
        transfers, timings = batch.transfers[done], batch.timings[done]
        if len(timings):
            self._clock(batch, timings)
        if self._stage is not None:
            self._leaving.append((batch.buffer_set, self._stage.after(transfers)))
        return transfers, timings

    def _clock(self, batch: _Batch, timings: Rows) -> None:
        first_ns, last_ns = int(timings["begun_ns"][0]), int(timings["done_ns"].max())
        self.started_ns = self.started_ns or (batch.begun_ns if batch.ready is not COMPLETED else first_ns)
        self.stopped_ns = max(self.stopped_ns, last_ns)
        took_s = max((last_ns - first_ns) / 1e9, 1e-6)
        self._count = int(np.clip(len(timings) * _REQUEST_S / took_s, max(2 * self._job.depth, _LEAST_COUNT), _MOST_COUNT))

    def _free_set(self) -> int:
        while not self._free or (self._leaving and self._leaving[0][1].is_completed()):
            self._let_go_oldest()
        return self._free.popleft()

    def _let_go_oldest(self) -> None:
        buffer_set, work = self._leaving.popleft()
        work.wait()
        self._free.append(buffer_set)


def _merged(done: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    """All of it as one, and `done` is empty: small requests cost less when they are counted together."""
    transfers, timings = ([pair[side] for pair in done] for side in (0, 1))
    done.clear()
    return np.concatenate(transfers or [np.zeros(0, TRANSFER)]), np.concatenate(timings or [np.zeros(0, TIMING)])


def count_blocks(job: Job, files: int, stride: int) -> int:
    """Blocks that keep the drive's queue full from the end of one request into the next; where that is few, as many as cost little memory."""
    return max(2 * job.depth, files, min(_LEAST_COUNT, LARGE_BYTES // stride))
