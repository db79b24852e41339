"""Python's collector waits for compute, and is found as it was."""

from __future__ import annotations

import gc
import weakref

import pytest

from infinity.runtime.collector import Collector


@pytest.fixture(autouse=True)
def as_it_was():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


class Cycle:
    """Only the collector can free it."""

    def __init__(self):
        self.itself = self


def test_it_is_off_in_between_and_on_again_after():
    gc.enable()
    collector = Collector()
    collector.pause()
    assert not gc.isenabled()
    collector.resume()
    assert gc.isenabled()


def test_whoever_turned_it_off_finds_it_off():
    gc.disable()
    collector = Collector()
    collector.pause()
    collector.resume()
    assert not gc.isenabled()
    gc.enable()
    collector.resume()
    assert gc.isenabled(), "nothing was paused: nothing to give back"


def test_forwards_without_a_backward_leave_no_garbage_behind():
    gc.enable()
    collector = Collector()
    collector.pause()
    garbage = [weakref.ref(Cycle()) for _ in range(3)]
    collector.pause()
    assert not gc.isenabled() and not any(ref() for ref in garbage)
    collector.resume()
    assert gc.isenabled()
