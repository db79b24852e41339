"""Bytes held in a tier never exceed its limit, and asking for too much says what would help."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import CapacityError, MoverError
from infinity.kinds import Tier
from infinity.storage.budget import Budget, Held


def test_what_can_never_fit_is_refused_at_once():
    with pytest.raises(CapacityError, match=r"unit h\.3 needs .*101 bytes.*Set budgets\.hbm to 101"):
        Budget(Tier.HBM, 100).take(Held(101), "unit h.3", 1e9)


@given(sizes=st.lists(st.integers(0, 100), max_size=30))
def test_the_peak_is_the_largest_sum_held_at_one_time_and_bytes_are_given_back_once(sizes):
    budget, taken = Budget(Tier.CPU, 3000), [Held(nbytes) for nbytes in sizes]
    for held in taken:
        budget.take(held, "x", 1)
    assert budget.used_bytes == budget.peak_bytes == sum(sizes)
    for held in [*taken, *taken]:
        budget.give(held)
    assert (budget.used_bytes, budget.peak_bytes) == (0, sum(sizes))


def test_a_taker_waits_for_others_and_small_ones_overtake():
    budget = Budget(Tier.HBM, 10)
    large, small = Held(6), Held(4)
    budget.take(large, "held", 1)
    got = threading.Event()
    waiter = threading.Thread(target=lambda: (budget.take(Held(8), "late", 30), got.set()))
    waiter.start()
    budget.take(small, "small", 1)
    assert not got.is_set()
    budget.give(small)
    budget.give(large)
    waiter.join(30)
    assert got.is_set() and budget.used_bytes == 8


def test_a_missed_deadline_says_who_wanted_what():
    budget = Budget(Tier.HBM, 10)
    budget.take(Held(10), "held", 1)
    with pytest.raises(MoverError, match=r"unit h\.1 waited 0\.01 s for 5 B of the hbm tier: 10 B of 10 B"):
        budget.take(Held(5), "unit h.1", 0.01)
    assert not budget.try_take(Held(1))


def test_the_movers_exception_reaches_waiting_and_later_takers():
    budget = Budget(Tier.HBM, 10)
    budget.take(Held(10), "held", 1)
    timer = threading.Timer(0.02, budget.fail, [OSError(5, "drive gone")])
    timer.start()
    for _ in range(2):
        with pytest.raises(MoverError, match="drive gone"):
            budget.take(Held(1), "x", 30)
    timer.join()
