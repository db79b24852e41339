"""A path is what the system says, and its rate is measured once."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from infinity.errors import ConfigError
from infinity.storage import probe
from infinity.storage.probe import HOME, check_path, facts, rates


def test_a_missing_path_a_file_and_a_read_only_path_are_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nope does not exist"):
        check_path(tmp_path / "nope")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a directory"):
        check_path(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="not writable"):
        check_path(tmp_path)


def test_facts_agree_with_statvfs(tmp_path):
    found, space = facts(tmp_path), os.statvfs(tmp_path)
    assert abs(found.free_bytes - space.f_bavail * space.f_frsize) < 1 << 30
    assert found.is_writable and list(tmp_path.iterdir()) == []
    device = os.stat(tmp_path).st_dev
    assert found.device == f"{os.major(device)}:{os.minor(device)}"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_memory_is_not_taken_for_a_disk(disk):
    found = facts(disk)
    assert found.file_system == "tmpfs" and found.is_memory and not found.is_network
    assert "memory, not a disk" in found.warning


def test_rates_are_measured_once_and_kept_for_the_device(disk, monkeypatch):
    first = rates(disk)
    assert first.read > 0 and first.write > 0
    assert min(first.read, first.write) <= first.weight <= max(first.read, first.write)
    assert [path.name for path in disk.iterdir()] == [HOME], "the measured file is gone"
    kept = disk / HOME / "rates.json"
    monkeypatch.setattr(probe, "measure", lambda path: pytest.fail("measured again"))
    assert rates(disk) == first

    calls = []
    monkeypatch.setattr(probe, "measure", lambda path: calls.append(path) or first)
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"device": "9:9"}))
    rates(disk)
    kept.write_text("{")
    rates(disk)
    rates(disk, refresh=True)
    assert calls == [disk] * 3


def test_too_little_room_to_measure_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_REQUEST_BYTES", 1 << 60)
    with pytest.raises(OSError, match="bytes are free, measuring the path takes"):
        probe.measure(tmp_path)


def test_a_small_disk_is_measured_with_a_small_file(tmp_path, monkeypatch):
    full, sizes = probe.facts(tmp_path), []
    monkeypatch.setattr(probe, "facts", lambda path: dataclasses.replace(full, free_bytes=3 * probe._REQUEST_BYTES))
    monkeypatch.setattr(probe._Passes, "run", lambda self, lane, seconds: sizes.append(self._nbytes) or 1.0)
    probe.measure(tmp_path)
    assert set(sizes) == {probe._REQUEST_BYTES}
