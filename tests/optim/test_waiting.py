"""Rings and promises: who waits, for what, and what they are told."""

from __future__ import annotations

import threading

import pytest
import torch
from optim.fakes import ClockWork, FailedWork, FakeClock

from infinity.errors import MoverError, StorageError
from infinity.optim.promise import Promise
from infinity.optim.ring import Ring
from infinity.storage.work import COMPLETED

ERROR = StorageError(5, "/nvme/file", 0, 4096)


def make(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_ring_lends_until_the_work_of_a_return_is_over():
    clock = FakeClock()
    ring = Ring(make, count=2, nbytes=64)
    first, second = ring.take(), ring.take()
    assert not ring.has_free() and ring.nbytes == 128
    ring.give_back(first, ClockWork(clock, 3))
    ring.give_back(second, ClockWork(clock, 5))
    assert not ring.has_free()
    assert ring.take() is first and clock.now == 3
    ring.drain()
    assert clock.now == 5 and ring.take() is second


def test_a_failed_return_is_told_once_and_its_buffer_is_not_lent_again():
    ring = Ring(make, count=3, nbytes=64)
    broken, fine, third = ring.take(), ring.take(), ring.take()
    ring.give_back(broken, FailedWork(ERROR))
    ring.give_back(fine, COMPLETED)
    with pytest.raises(StorageError):
        ring.take()
    assert ring.take() is fine
    ring.give_back(third, FailedWork(ERROR))
    ring.give_back(fine, COMPLETED)
    with pytest.raises(StorageError):
        ring.drain()
    assert ring.take() is fine and not ring.has_free()


def test_a_ring_that_nobody_needs_holds_nothing():
    assert Ring(make, count=3, nbytes=0).nbytes == 0


def test_a_promise_is_over_when_what_it_was_kept_with_is():
    clock = FakeClock()
    promise = Promise("the update of unit 3", 10)
    assert not promise.is_completed()
    promise.keep(ClockWork(clock, 4))
    promise.fail(ERROR)  # too late
    assert not promise.is_completed()
    promise.wait()
    assert clock.now == 4 and promise.is_completed()


def test_a_broken_promise_tells_every_waiter():
    promise = Promise("the update of unit 3", 10)
    told: list[Exception] = []

    def wait() -> None:
        try:
            promise.wait()
        except StorageError as error:
            told.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    promise.fail(ERROR)
    for waiter in waiters:
        waiter.join(10)
    assert told == [ERROR] * 3 and promise.is_completed()


def test_a_promise_that_nobody_keeps_ends_at_the_deadline_by_name():
    with pytest.raises(MoverError, match="the update of unit 3 did not finish within 0.01 s"):
        Promise("the update of unit 3", 0.01).wait()
