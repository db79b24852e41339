"""Room for gradients on their way where no other thread lands them: those that a GPU sends down whole."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from infinity.optim.grads import _Countdown
from infinity.runtime.descent import Descent

NBYTES = 1 << 18
UNIT = SimpleNamespace(name="a unit", layout=SimpleNamespace(index=0, flats=[SimpleNamespace(slots=[0])], flat_name=str))


class SlowCopy:
    """A download that takes its time."""

    def __init__(self, seconds):
        self.over_at = time.monotonic() + seconds

    def is_completed(self):
        return time.monotonic() >= self.over_at

    def wait(self, timeout_s=None):
        time.sleep(max(0.0, self.over_at - time.monotonic()))


class Resting:
    """Gradients at rest in pinned memory: the thread that asks for room lands them, and nobody else."""

    def __init__(self):
        self._coming, self._lock = deque(), threading.Lock()

    def arrive(self, unit, flat, grad, present, on_release, start=0):
        count = _Countdown(on_release)
        count.start(1)
        with self._lock:
            self._coming.append((SlowCopy(0.05), count))

    def let_go(self):
        with self._lock:
            while self._coming and self._coming[0][0].is_completed():
                self._coming.popleft()[1].down()

    def land_oldest(self):
        with self._lock:
            if not self._coming:
                return False
            copy, count = self._coming.popleft()
            copy.wait()
            count.down()
            return True


class SlowRanks:
    """Collectives that begin a while after they were asked for, in a thread of their own."""

    def reduce(self, grad, present, count, name, then):
        over = threading.Event()

        def run():
            time.sleep(0.02)
            then(grad, present)
            over.set()

        threading.Thread(target=run).start()
        return SimpleNamespace(wait=over.wait, is_completed=over.is_set)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_gradient_finds_room_once_the_ranks_and_the_copy_are_done_with_an_earlier_one(room):
    share = SimpleNamespace(is_sharded=lambda group: True, run=lambda layout, group: SimpleNamespace(start=0))
    clock = SimpleNamespace(waiting=lambda lane, name: nullcontext())
    store = SimpleNamespace(holds=lambda tier, group: False)
    budget_bytes = room * NBYTES + NBYTES // 2
    descent = Descent(Resting(), SlowRanks(), share, store, None, clock, torch.device("cpu"), budget_bytes=budget_bytes, deadline_s=5.0)
    for _ in range(6):
        descent.reduce(UNIT, 0, torch.empty(NBYTES, dtype=torch.uint8), frozenset({0}))
