"""The trace learns the order of units and is only ever a hint."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from infinity.runtime.trace import LIMIT, Trace

ORDERS = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def distinct_ahead(order, position, n, skip=None):
    """The plain definition of a hint: walk the order in a circle once, first meetings alone."""
    circle = [order[(position + k) % len(order)] for k in range(len(order))]
    return [unit for unit in dict.fromkeys(circle) if unit != skip][:n]


def taught(order, passes=1):
    trace = Trace()
    for _ in range(passes):
        for unit in order:
            trace.visit(unit, 0)
        trace.restart()
    return trace


def test_a_new_trace_has_no_hints():
    trace = Trace()
    assert trace.visit(3, 2) == [] and trace.first(2) == [] and trace.order == ()


@given(ORDERS, st.integers(0, 4))
def test_after_one_pass_every_visit_is_foreseen(order, n):
    trace = taught(order)
    assert trace.order == tuple(order)
    assert trace.first(n) == distinct_ahead(order, 0, n)
    for position, unit in enumerate(order):
        assert trace.position == position
        assert trace.visit(unit, n) == distinct_ahead(order, position + 1, n, skip=unit)
    trace.restart()
    assert trace.mismatches == 0 and trace.order == tuple(order)


@given(ORDERS, st.integers(1, 5))
def test_repeats_without_restart_are_the_same_order(order, repeats):
    """Micro-steps of one step: the order starts over by itself."""
    trace = taught(order)
    for _ in range(repeats):
        for unit in order:
            trace.visit(unit, 1)
    assert trace.mismatches == 0 and trace.position == 0
    trace.restart()
    assert trace.order == tuple(order)


@given(ORDERS, st.data())
def test_a_shorter_pass_keeps_the_order(order, data):
    """A forward alone between training steps."""
    trace = taught(order)
    for unit in order[: data.draw(st.integers(0, len(order)))]:
        trace.visit(unit, 1)
    trace.restart()
    assert trace.order == tuple(order) and trace.position == 0


def test_a_skipped_unit_moves_the_position_ahead():
    trace = taught([0, 1, 2, 3])
    trace.visit(0, 1)
    assert trace.visit(2, 2) == [3, 0]
    assert trace.mismatches == 1
    trace.visit(3, 1)
    assert trace.mismatches == 1, "one skip is one mismatch"


def test_an_unknown_unit_leaves_the_position():
    trace = taught([0, 1, 2])
    trace.visit(0, 1)
    assert trace.visit(9, 1) == [1]
    assert trace.visit(1, 1) == [2]
    assert trace.mismatches == 1


def test_a_changed_order_is_learned_from_the_next_pass():
    trace = taught([0, 1, 2])
    for unit in (2, 1, 0):
        trace.visit(unit, 1)
    trace.restart()
    assert trace.order == (2, 1, 0)


def test_a_loop_without_restarts_is_learned_after_two_rounds():
    """Generation: an encoder once, then the decoder token after token."""
    trace = Trace()
    for unit in [7, 8, 9, *([0, 1, 2] * 2)]:
        trace.visit(unit, 1)
    assert trace.order == (0, 1, 2)
    assert trace.visit(0, 2) == [1, 2]
    assert trace.mismatches == 0


@given(st.lists(ORDERS, max_size=6), st.integers(0, 3))
def test_any_visits_give_hints_from_the_order(passes, n):
    trace = Trace()
    for order in passes:
        for unit in order:
            hints = trace.visit(unit, n)
            assert len(hints) <= n and unit not in hints and len(set(hints)) == len(hints)
            assert set(hints) <= set(trace.order)
        trace.restart()


@given(ORDERS, st.integers(0, 30), st.integers(0, 5))
def test_next_after_walks_the_order_in_a_circle(order, position, n):
    assert taught(order).next_after(position, n) == distinct_ahead(order, position, n)


def test_a_step_like_the_one_before_works_nothing_out_again(monkeypatch):
    trace, order = taught([0, 1, 2, 1, 0]), [0, 1, 2, 1, 0]
    search, searched = Trace._search, []
    monkeypatch.setattr(Trace, "_search", lambda self, *key: searched.append(key) or search(self, *key))
    for step in range(3):
        searched.clear()
        for unit in order:
            trace.visit(unit, 2)
        trace.restart()
        assert bool(searched) == (step == 0)


def test_memory_is_bounded():
    trace = Trace()
    for step in range(2 * LIMIT + 10):
        trace.visit(step * step % 1009, 0)
    assert 0 < len(trace.order) <= LIMIT and len(trace._pass) <= LIMIT


def test_orders_that_keep_changing_warn_once(caplog):
    trace = Trace()
    with caplog.at_level(logging.WARNING, "infinity"):
        for order in ([0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 0, 2], [0, 1, 2]):
            for unit in order:
                trace.visit(unit, 1)
            trace.restart()
    assert len(caplog.records) == 1


def test_a_steady_order_never_warns(caplog):
    with caplog.at_level(logging.WARNING, "infinity"):
        taught([0, 1, 2, 1, 0], passes=5)
    assert not caplog.records
