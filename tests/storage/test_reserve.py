"""A full reserve makes the borrower wait; a dead mover wakes it."""

from __future__ import annotations

import threading

import pytest

from infinity.errors import MoverError
from infinity.sizes import MiB
from infinity.storage.reserve import Reserve
from infinity.storage.slabs import SlabPool


@pytest.fixture
def reserve():
    pool = SlabPool(pin=False, threads=1)
    made = Reserve(pool, 2 * MiB, 2, "params")
    yield made
    made.close()
    pool.close()


def test_memory_is_taken_once(reserve):
    first, second = reserve.borrow(1), reserve.borrow(1)
    assert first.data_ptr() != second.data_ptr()
    reserve.give(first)
    assert reserve.borrow(1).data_ptr() == first.data_ptr()


def test_an_empty_reserve_is_named_at_the_deadline(reserve):
    _held = reserve.borrow(1), reserve.borrow(1)
    with pytest.raises(MoverError, match="reserve params: none of its 2 buffers"):
        reserve.borrow(0.01)


def test_a_waiting_borrower_gets_what_comes_back(reserve):
    first, _second = reserve.borrow(1), reserve.borrow(1)
    timer = threading.Timer(0.02, reserve.give, [first])
    timer.start()
    assert reserve.borrow(30).data_ptr() == first.data_ptr()
    timer.join()


def test_the_movers_exception_reaches_waiting_and_later_borrowers(reserve):
    _held = reserve.borrow(1), reserve.borrow(1)
    failure = OSError(5, "drive gone")
    timer = threading.Timer(0.02, reserve.fail, [failure])
    timer.start()
    for _ in range(2):
        with pytest.raises(MoverError, match="drive gone") as caught:
            reserve.borrow(30)
        assert caught.value.__cause__ is failure
    timer.join()
