"""Trials on real files: what is measured, in which order, and what is left."""

from __future__ import annotations

import errno
import os

import pytest

from infinity.errors import ConfigError, StorageError
from infinity.sizes import KiB, MiB
from infinity.tune import Mode, Setting, sweep
from infinity.tune.ground import LEAST_BYTES, REQUEST_BYTES, Ground, requests_ahead
from infinity.tune.setting import MOST_IN_FLIGHT

SETTINGS = (Setting(256 * KiB, 4, 1), Setting(1 * MiB, 8, 2))


def test_every_setting_is_tried_in_every_mode_and_round(tmp_path):
    seen = []
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()

    def watch(done, total, what):
        seen.append((done, total, what))
        return True

    first, second = sweep(paths, SETTINGS, nbytes=LEAST_BYTES, seconds=0.01, rounds=2, watch=watch)
    for measured, path in ((first, paths[0]), (second, paths[1])):
        assert measured.path == path and list(measured.settings()) == sorted(SETTINGS)
        assert {len(rates) for rates in measured.rates.values()} == {2} and len(measured.rates) == len(SETTINGS) * len(Mode)
        assert all(rate > 0 for rates in measured.rates.values() for rate in rates)
        assert not list(path.iterdir()), "nothing is left"
    trials = [what for done, total, what in seen if not what.startswith("laying out")]
    assert [done for done, _, what in seen if not what.startswith("laying out")] == list(range(24)) and {total for _, total, _ in seen} == {24}
    rounds = [trials[at : at + 6] for at in range(0, 24, 6)]
    assert sorted(rounds[0]) == sorted(rounds[1]) and rounds[0] != rounds[1], "drawn anew for each round"


def test_what_is_moved_is_what_is_counted(tmp_path, monkeypatch):
    """Bytes of both directions at once, over the time until the last of them is over."""
    moved = []
    real = Ground.start

    def start(self, aio, lane, at, buffer):
        moved.append(lane)
        return real(self, aio, lane, at, buffer)

    with Ground(tmp_path, LEAST_BYTES) as ground:
        monkeypatch.setattr(Ground, "start", start)
        clock = iter([100.0, 100.0, 100.0, 200.0, 104.0])
        monkeypatch.setattr("infinity.tune.ground.time.monotonic", lambda: next(clock))
        rate = ground.rate(SETTINGS[1], Mode.MIX.lanes, seconds=1.0)
        monkeypatch.undo()
    assert rate == len(moved) * REQUEST_BYTES / 4.0
    reads, writes = (moved.count(lane) for lane in Mode.MIX.lanes)
    assert reads == writes == requests_ahead(SETTINGS[1].in_flight) + 2


def test_buffers_are_enough_for_the_widest_setting():
    assert requests_ahead(MOST_IN_FLIGHT) * REQUEST_BYTES > MOST_IN_FLIGHT


def test_an_interrupt_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        sweep([tmp_path], SETTINGS, nbytes=LEAST_BYTES, seconds=0.01, rounds=2, watch=lambda done, total, what: done < 3)
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_work(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="does not exist"):
        sweep([tmp_path, tmp_path / "missing"], SETTINGS, nbytes=LEAST_BYTES, seconds=0.01, rounds=2)
    with pytest.raises(StorageError) as full:
        sweep([tmp_path], SETTINGS, nbytes=1 << 50, seconds=0.01, rounds=2)
    assert full.value.errno == errno.ENOSPC and "--size" in str(full.value)
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before
