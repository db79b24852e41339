"""What the pump promises a stage, with one whose works take their time."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from infinity.native import READ, TRANSFER, WRITE, Aio
from infinity.workload.jobfile import JobText, Setting
from infinity.workload.memory import Buffers
from infinity.workload.pump import Pump, Sets

BLOCK, BLOCKS, SETS = 4096, 64, Sets(blocks=4, queued=2, lead=1, lag=2)


class Slow:
    """A work that is over some time after it began, or when somebody waits for it."""

    def __init__(self, seconds, on_end):
        self._over_at, self._on_end, self._lock = time.monotonic() + seconds, on_end, threading.Lock()
        self.ended_ns = 0

    def wait(self, timeout_s=None):
        time.sleep(max(0.0, self._over_at - time.monotonic()))
        self._end()

    def is_completed(self):
        if time.monotonic() >= self._over_at:
            self._end()
        return bool(self.ended_ns)

    def _end(self):
        with self._lock:
            if not self.ended_ns:
                self.ended_ns = time.monotonic_ns()
                self._on_end()


class Stage:
    """Takes 3 ms before and 5 ms after; fills buffers that will be written as its first work ends."""

    def __init__(self, buffers):
        self.buffers, self.held, self.works = buffers, set(), []

    def before(self, transfers):
        mine = set(transfers["buffer"].tolist())
        assert not mine & self.held, "a set is in two hands"
        self.held |= mine
        return self._work(0.003, lambda: self._fill(transfers))

    def after(self, transfers):
        return self._work(0.005, lambda: self.held.difference_update(transfers["buffer"].tolist()))

    def _work(self, seconds, on_end):
        self.works.append(Slow(seconds, on_end))
        return self.works[-1]

    def _fill(self, transfers):
        for row in transfers[transfers["direction"] == WRITE]:
            start = int(row["buffer"]) * BLOCK
            self.buffers.bytes[start : start + BLOCK] = int(row["offset"]) // BLOCK + 1


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_a_set_has_one_holder_and_the_run_ends_with_its_last_work(tmp_path, direction):
    job = JobText("a", "", (), (Setting("iodepth", "4", ""), Setting("ioengine", "libaio", ""))).job()
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK * BLOCKS))
    buffers = Buffers("malloc", BLOCK, SETS.blocks * SETS.count, seed=0)
    stage, left = Stage(buffers), list(range(BLOCKS))

    def take(count):
        found = np.zeros(min(count, len(left)), TRANSFER)
        found["offset"], found["nbytes"], found["direction"] = np.array(left[:count]) * BLOCK, BLOCK, direction
        del left[:count]
        return found

    fd = os.open(path, os.O_RDWR)
    try:
        with Aio(block_bytes=BLOCK, queue_depth=4, backend="threads") as aio:
            pump = Pump(job, aio, [fd], buffers, threading.Event(), stage, SETS)
            done = sum(len(transfers) for transfers, _ in pump.run(take, 0))
    finally:
        os.close(fd)
    assert done == BLOCKS and not stage.held
    assert pump.stopped_ns >= max(work.ended_ns for work in stage.works)
    assert pump.started_ns <= min(work.ended_ns for work in stage.works)
    if direction == WRITE:
        assert path.read_bytes() == b"".join(bytes([number + 1]) * BLOCK for number in range(BLOCKS)), "each block went out after it was filled"
