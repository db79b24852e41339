"""The room for visits: what is counted and what is idle stay within the budget, but for what a visit alone may take beyond it."""

from __future__ import annotations

import threading

import pytest
import torch

from infinity.runtime.fetches import Fetch
from infinity.runtime.room import Room
from infinity.sizes import MiB
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


def visit(room, nbytes):
    fetch = Fetch(0, "unit", nbytes, threading.Condition(), 1.0, lambda: True)
    room.count(fetch)
    fetch.borrowed.append(room.take(nbytes // 4, torch.float32))
    return fetch


def leave(room, fetch):
    room.reuse(fetch)
    room.release(fetch)


def mapped(slabs):
    slabs.trim()
    return slabs.allocated_bytes


def test_what_is_counted_takes_room_until_it_is_released_and_its_memory_serves_again(room):
    first, second = visit(room, 2 * MiB), visit(room, 4 * MiB)
    address = first.borrowed[0].data_ptr()
    assert room.has(2 * MiB) and not room.has(2 * MiB + 1)
    leave(room, first)
    assert (room.used_bytes, room.peak_bytes) == (4 * MiB, 6 * MiB)
    assert visit(room, 2 * MiB).borrowed[0].data_ptr() == address
    leave(room, second)
    assert room.used_bytes == 2 * MiB


def test_idle_memory_makes_way_for_what_is_counted(room, slabs):
    leave(room, visit(room, 6 * MiB))
    assert mapped(slabs) == 6 * MiB
    fetch = visit(room, 8 * MiB)
    assert mapped(slabs) == fetch.nbytes, "nothing of another size stays beside a full budget"


def test_one_visit_alone_may_take_the_spare_bytes_and_they_go_back_to_the_system(room, slabs):
    assert not room.has(12 * MiB) and not room.overdraw(12 * MiB + 1) and not room.is_overdrawn
    assert room.overdraw(12 * MiB)
    fetch = visit(room, 12 * MiB)
    leave(room, fetch)
    del fetch
    assert mapped(slabs) == 12 * MiB and room.is_overdrawn
    room.repay(is_last=True)
    assert mapped(slabs) == 0 and not room.is_overdrawn
