"""Damage is told with its path and place; a process killed at any instant leaves a run that is whole or refused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from storage.storage_rig import SPECS, UNITS, contents, fill, live_until, move_and_publish, pattern

from infinity.errors import ConfigError, LockError, StorageError
from infinity.storage.manifest import Manifest
from infinity.storage.rundir import discard


def published(open_store, pools, *paths):
    store = open_store(*paths)
    store.build(SPECS, UNITS)
    fill(store, SPECS, pools)
    store.publish(4, {})
    return store


def shard_of(disk: Path, text: str) -> Path:
    (found,) = [path for path in (disk / "infinity" / "test").iterdir() if text in path.name]
    return found


def test_a_file_truncated_while_open_fails_at_the_read(open_store, disk, pools):
    store = published(open_store, pools, disk)
    path = shard_of(disk, "u00000-optimizer-r0-g0.safetensors")
    os.truncate(path, 8192)
    failures = []
    for spec in SPECS[:2]:
        with pytest.raises(StorageError) as caught:
            contents(store, spec, pools)
        failures.append(caught.value)
    assert [failure.errno for failure in failures] == [errno.EIO] * 2
    assert all(failure.filename == str(path) and failure.offset >= 8192 and "load a checkpoint" in str(failure) for failure in failures)
    assert torch.equal(contents(store, SPECS[3], pools), pattern(SPECS[3])), "the other files are fine"


@pytest.mark.parametrize("loss", ["truncated", "removed"])
def test_a_file_damaged_between_runs_is_named(open_store, disk, pools, loss):
    published(open_store, pools, disk).close()
    path = shard_of(disk, "u00001-optimizer-r0-g0.safetensors")
    os.truncate(path, 8192) if loss == "truncated" else path.unlink()
    with pytest.raises(StorageError) as caught:
        open_store(disk).reopen(SPECS, UNITS)
    assert caught.value.filename == str(path)
    assert caught.value.errno == (errno.EIO if loss == "truncated" else errno.ENOENT)


@pytest.mark.parametrize("loss", ["truncated", "removed"])
def test_a_damaged_file_is_not_published(open_store, disk, pools, loss):
    store = published(open_store, pools, disk)
    path = shard_of(disk, "u00000-optimizer-r0-g0.safetensors")
    fill(store, SPECS[:1], pools, seed=1)
    os.truncate(path, 8192) if loss == "truncated" else path.unlink()
    with pytest.raises(StorageError):
        store.publish(5, {})
    assert not Manifest.load(disk / "infinity" / "test" / "manifest.r0.json").is_clean


def test_a_flipped_bit_in_a_published_resident_chunk_is_found(open_store, disk, pools):
    published(open_store, pools, disk).close()
    path = shard_of(disk, "u00001-optimizer-r0-g0.resident")
    with path.open("r+b") as raw:
        raw.seek(4096 + 100)
        byte = raw.read(1)
        raw.seek(4096 + 100)
        raw.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match=r"checksum of chunk u1\|f0\|optimizer\|c2") as caught:
        open_store(disk).reopen(SPECS, UNITS)
    assert caught.value.filename == str(path)


def test_a_failed_write_reaches_its_waiter_and_the_next_caller(open_store, disk, pools, monkeypatch):
    store = published(open_store, pools, disk)
    real = store._nvme.write_back

    class Failed:
        def wait(self, timeout_s=None):
            raise StorageError(errno.EIO, "/mnt/x", 4096, 100)

        def is_completed(self):
            return True

    monkeypatch.setattr(store._nvme, "write_back", lambda key, source: Failed())
    buffer = pools.plain.take(SPECS[0].padded_nbytes)
    with pytest.raises(StorageError):
        store.write_back(SPECS[0].key, buffer).wait()
    monkeypatch.setattr(store._nvme, "write_back", real)
    with pytest.raises(StorageError):
        store.write_back(SPECS[1].key, buffer)
    monkeypatch.setattr(store._nvme, "write_back", lambda key, source: Failed())
    store.write_back(SPECS[0].key, buffer)
    with pytest.raises(StorageError):
        store.fetch(SPECS[0].key, buffer)
    store.write_back(SPECS[0].key, buffer)
    with pytest.raises(StorageError):
        store.publish(5, {})


@pytest.fixture(scope="module")
def processes():
    """Fresh processes, forked from one that has imported torch and started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "infinity.storage.store"])
    return context


def run_child(processes, disk: Path, instant: str) -> None:
    child = processes.Process(target=live_until, args=(disk, instant))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("instant", ["written", "before sync", "before manifest"])
def test_killed_between_the_first_write_and_the_manifest_a_run_is_refused(open_store, disk, pools, processes, instant):
    published(open_store, pools, disk).close()
    run_child(processes, disk, instant)
    with pytest.raises(ConfigError, match="last published step: 4"):
        open_store(disk).reopen(SPECS, UNITS)


@pytest.mark.parametrize(("instant", "step", "seed"), [("built", 4, 0), ("reading", 4, 0), ("published", 9, 1)])
def test_killed_at_any_other_instant_a_run_goes_on(open_store, disk, pools, processes, instant, step, seed):
    published(open_store, pools, disk).close()
    run_child(processes, disk, instant)
    store = open_store(disk)
    assert store.reopen(SPECS, UNITS).step == step
    for spec in SPECS:
        assert torch.equal(contents(store, spec, pools), pattern(spec, seed))


@pytest.mark.parametrize("instant", ["built", "written", "before sync", "before manifest"])
def test_killed_before_the_first_publish_a_run_starts_over(open_store, disk, pools, processes, instant):
    run_child(processes, disk, instant)
    store = open_store(disk)
    assert store.reopen(SPECS, UNITS) is None
    store.build(SPECS, UNITS)
    fill(store, SPECS, pools)
    store.publish(1, {})
    assert len(list((disk / "infinity" / "test").glob("*.safetensors"))) == 4, "the dead process's files are gone"


def test_two_jobs_cannot_use_one_run(open_store, disk, processes):
    ready = processes.Event()
    child = processes.Process(target=live_until, args=(disk, "waiting", ready))
    child.start()
    assert ready.wait(120)
    with pytest.raises(LockError, match=f"pid {child.pid}"):
        open_store(disk).reopen(SPECS, UNITS)
    child.kill()
    child.join()
    assert open_store(disk).reopen(SPECS, UNITS) is None


def kill_at_call(processes, disk: Path, calls: int) -> bool:
    """True when the process lived to the end."""
    (disk / "c").mkdir(exist_ok=True)
    child = processes.Process(target=move_and_publish, args=(disk, calls))
    child.start()
    child.join(120)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0


def check_whole_or_refused(open_store, disk: Path, pools) -> None:
    """What any instant may leave: step 4, step 5, or a dirty run."""
    store = open_store(disk / "b", disk / "c")
    try:
        step = store.reopen(SPECS, UNITS).step
    except ConfigError as error:
        assert "last published step: 4" in str(error)
    else:
        assert all(torch.equal(contents(store, spec, pools), pattern(spec, step - 4)) for spec in SPECS)
        store.publish(6, {})
        manifest = Manifest.load(disk / "b" / "infinity" / "test" / "manifest.r0.json")
        found = sorted(path.name for name in "bc" for path in (disk / name).glob("infinity/test/*.safetensors"))
        assert found == sorted(file.name for file in manifest.files), "nothing is left over on the paths in use"
    store.close()


@pytest.mark.parametrize("first", [pytest.param(first, marks=[pytest.mark.slow] * (first > 0)) for first in range(7)])
def test_killed_at_any_change_of_a_file_a_moving_run_is_whole_or_refused(open_store, disk, pools, processes, first):
    """Every seventh call, from `first` on: together every call."""
    for calls in range(first, 1000, 7):
        published(open_store, pools, disk / "a", disk / "b").close()
        lived = kill_at_call(processes, disk, calls)
        check_whole_or_refused(open_store, disk, pools)
        discard([disk / name for name in "abc"], "test")
        if lived:
            return
    pytest.fail("the process never lived to its end")
