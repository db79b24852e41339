"""Python's collector waits for a forward, and is found as it was."""

from __future__ import annotations

import gc

import pytest

from infinity.runtime.collector import Collector


@pytest.fixture(autouse=True)
def as_it_was():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_it_is_off_in_between_and_on_again_after():
    collector = Collector()
    collector.pause()
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


def test_of_two_engines_the_last_gives_it_back():
    teacher, student = Collector(), Collector()
    teacher.pause()
    student.pause()
    teacher.resume()
    assert not gc.isenabled()
    student.resume()
    assert gc.isenabled()


def test_an_engine_that_is_dropped_keeps_nothing_back():
    collector = Collector()
    collector.pause()
    del collector
    assert gc.isenabled()
