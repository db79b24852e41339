"""The room for visits: what is counted and what is idle stay within the budget, but for the spare bytes, which go back afterwards."""

from __future__ import annotations

import pytest
import torch

from infinity.runtime.fetches import Fetch
from infinity.runtime.room import Room
from infinity.sizes import MiB
from infinity.storage.condition import Condition
from infinity.storage.slabs import SlabPool


@pytest.fixture
def slabs():
    pool = SlabPool(pin=False, threads=1)
    yield pool
    pool.close()


@pytest.fixture
def room(slabs):
    room = Room(torch.device("cpu"), slabs, None, budget_bytes=8 * MiB, spare_bytes=4 * MiB)
    yield room
    room.close()


class Use:
    """An event that the compute stream has not come to yet."""

    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over


def visit(room, nbytes):
    fetch = Fetch(0, "unit", nbytes, Condition(), 1.0, lambda: True)
    room.count(fetch)
    fetch.borrowed.append(room.take(nbytes // 4, torch.float32))
    return fetch


def leave(room, fetch):
    room.reuse(fetch)
    room.uncount(fetch)
    fetch.borrowed.clear()


def in_use(slabs):
    slabs.trim()
    return slabs.allocated_bytes


def test_a_visit_takes_room_once_and_gives_it_back_once(room):
    first, second = visit(room, 2 * MiB), visit(room, 4 * MiB)
    assert room.fits(2 * MiB) and not room.fits(2 * MiB + 1)
    for _ in range(2):
        room.uncount(first)
        assert (room.used_bytes, room.peak_bytes) == (4 * MiB, 6 * MiB)
    room.uncount(second)
    assert room.used_bytes == 0


def test_what_was_left_serves_the_next_of_its_size_and_makes_way_for_another(room, slabs):
    leave(room, visit(room, 6 * MiB))
    assert in_use(slabs) == 6 * MiB
    again = visit(room, 6 * MiB)
    assert in_use(slabs) == 6 * MiB
    leave(room, again)
    fetch = visit(room, 8 * MiB)
    assert in_use(slabs) == fetch.nbytes, "nothing of another size stays beside a full budget"


def test_buffers_of_which_views_are_left_count_until_the_stream_has_passed(room):
    fetch = visit(room, 8 * MiB)
    fetch.last_use = use = Use()
    room.retire(fetch)
    room.reap()
    assert room.waits_for_a_stream and not room.fits(1)
    use.is_over = True
    room.reap()
    assert not room.waits_for_a_stream and room.used_bytes == 0
    room.uncount(fetch)
    assert room.used_bytes == 0


def test_what_a_stream_may_still_read_is_handed_on_with_the_end_of_that(room, monkeypatch):
    given = []
    monkeypatch.setattr(room._buffers, "give", lambda flat, last_use: given.append(last_use))
    fetch = visit(room, MiB)
    fetch.last_use = Use()
    room.reuse(fetch)
    assert given == [fetch.last_use]


def test_spare_bytes_are_taken_on_top_and_go_back_to_the_system(room, slabs):
    small = visit(room, 4 * MiB)
    assert not room.fits(8 * MiB) and not room.overdraw(8 * MiB + 1)
    assert room.overdraw(8 * MiB)
    large = visit(room, 8 * MiB)
    room.repay(lambda: True)
    leave(room, large)
    assert slabs.allocated_bytes == 12 * MiB, "as long as the budget is exceeded nothing is given back, and then it is idle"
    room.repay(lambda: False)
    assert slabs.allocated_bytes == 4 * MiB, "without a word from others"
    idle = visit(room, 4 * MiB)
    leave(room, idle)
    room.repay(lambda: True)
    assert slabs.allocated_bytes == 8 * MiB, "idle memory within the budget stays"
    leave(room, small)
