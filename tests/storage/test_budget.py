"""Bytes held in a tier never exceed its limit, and asking for too much says what would help."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import CapacityError, MoverError
from infinity.kinds import Tier
from infinity.storage.budget import Budget


def test_what_can_never_fit_is_refused_at_once():
    with pytest.raises(CapacityError, match=r"unit h\.3 needs .*101 bytes.*Set budgets\.hbm to 101"):
        Budget(Tier.HBM, 100).take(101, "unit h.3", 1e9)


@given(sizes=st.lists(st.integers(0, 100), max_size=30))
def test_the_peak_is_the_largest_sum_held_at_one_time(sizes):
    budget = Budget(Tier.CPU, 3000)
    for nbytes in sizes:
        budget.take(nbytes, "x", 1)
    assert budget.used_bytes == budget.peak_bytes == sum(sizes)
    for nbytes in sizes:
        budget.give(nbytes)
    assert (budget.used_bytes, budget.peak_bytes) == (0, sum(sizes))


def test_a_taker_waits_for_others_and_small_ones_overtake():
    budget = Budget(Tier.HBM, 10)
    budget.take(6, "held", 1)
    got = threading.Event()
    waiter = threading.Thread(target=lambda: (budget.take(8, "large", 30), got.set()))
    waiter.start()
    budget.take(4, "small", 1)
    assert not got.is_set()
    budget.give(4)
    budget.give(6)
    waiter.join(30)
    assert got.is_set() and budget.used_bytes == 8


def test_a_missed_deadline_says_who_wanted_what():
    budget = Budget(Tier.HBM, 10)
    budget.take(10, "held", 1)
    with pytest.raises(MoverError, match=r"unit h\.1 waited 0\.01 s for 5 B of the hbm tier: 10 B of 10 B"):
        budget.take(5, "unit h.1", 0.01)
    assert not budget.try_take(1)


def test_the_movers_exception_reaches_waiting_and_later_takers():
    budget = Budget(Tier.HBM, 10)
    budget.take(10, "held", 1)
    timer = threading.Timer(0.02, budget.fail, [OSError(5, "drive gone")])
    timer.start()
    for _ in range(2):
        with pytest.raises(MoverError, match="drive gone"):
            budget.take(1, "x", 30)
    timer.join()
