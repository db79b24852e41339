"""A run follows its files: paths in another order, moved, added, dropped; chunks of any shape on any tier."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.storage_rig import UNITS, contents, fill, make_spec, pattern

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group, Tier
from infinity.sizes import MiB
from infinity.storage.copies import Copies
from infinity.storage.nvme import NvmePath
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.tiers import Pools
from infinity.timeline import Timeline

SPECS = [make_spec(unit, chunk, 4096, Tier.NVME if chunk < 6 else Tier.CPU) for unit in range(2) for chunk in range(8)]


def files_below(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("infinity/test/*.safetensors"))


@pytest.fixture
def published(open_store, disk, pools):
    """A run on paths a and b."""
    store = open_store(disk / "a", disk / "b")
    store.build(SPECS, UNITS)
    fill(store, SPECS, pools)
    store.publish(4, {"note": "first"})
    store.close()
    assert files_below(disk / "a") and files_below(disk / "b")
    return disk


def check_goes_on(open_store, pools, *paths: Path) -> None:
    """Reopen, read everything, write everything, publish, and again."""
    store = open_store(*paths)
    step = store.reopen(SPECS, UNITS).step
    assert all(torch.equal(contents(store, spec, pools), pattern(spec, step - 4)) for spec in SPECS)
    fill(store, SPECS, pools, seed=step + 1 - 4)
    store.publish(step + 1, {})
    store.close()


def test_paths_in_another_order(published, open_store, pools):
    check_goes_on(open_store, pools, published / "b", published / "a")
    check_goes_on(open_store, pools, published / "a", published / "b")


def test_paths_that_were_moved(published, open_store, pools):
    shutil.move(published / "a", published / "elsewhere")
    check_goes_on(open_store, pools, published / "b", published / "elsewhere")


def test_an_added_path(published, open_store, pools):
    check_goes_on(open_store, pools, published / "c", published / "a", published / "b")
    check_goes_on(open_store, pools, published / "b", published / "c", published / "a")


def test_a_dropped_path_is_left_empty_once_its_chunks_are_published_elsewhere(published, open_store, pools):
    store = open_store(published / "b", published / "c")
    assert store.reopen(SPECS, UNITS).extra == {"note": "first"}
    assert all(torch.equal(contents(store, spec, pools), pattern(spec)) for spec in SPECS)
    assert files_below(published / "a"), "until the next publish the old files are what the manifest names"
    store.close()
    check_goes_on(open_store, pools, published / "b", published / "c")
    assert not files_below(published / "a")
    shutil.rmtree(published / "a")
    check_goes_on(open_store, pools, published / "c", published / "b")


def test_a_dropped_path_that_is_gone_is_named(published, open_store):
    shutil.rmtree(published / "a")
    with pytest.raises(StorageError, match="mount or add that path") as caught:
        open_store(published / "b").reopen(SPECS, UNITS)
    assert str(published / "a") in caught.value.filename


def test_a_copied_path_beside_its_original_is_refused(published, open_store):
    shutil.copytree(published / "a", published / "copy")
    (published / "copy" / "infinity" / "test" / "lock").unlink()
    with pytest.raises(ConfigError, match="copies of the same part"):
        open_store(published / "a", published / "b", published / "copy").reopen(SPECS, UNITS)


def test_one_path_twice_is_refused(open_store, disk):
    (disk / "link").symlink_to(disk)
    with pytest.raises(ConfigError, match="named twice"):
        open_store(disk, disk / "link")


def test_weights_are_for_all_paths_or_for_none(open_store, disk):
    with pytest.raises(ConfigError, match="every path a weight, or none"):
        open_store(NvmePath(path=disk / "a", weight=1.0), NvmePath(path=disk / "b"))


def test_unweighted_paths_share_by_measured_rates(open_store, disk, pools):
    store = open_store(NvmePath(path=disk / "a"), NvmePath(path=disk / "b"))
    store.build(SPECS, UNITS)
    assert all((disk / name / "infinity" / "rates.json").exists() for name in "ab")
    assert files_below(disk / "a") and files_below(disk / "b")


def test_max_bytes_holds_for_states_published_from_memory_too(open_store, disk, pools):
    paths = NvmePath(path=disk / "a", weight=1.0, max_bytes=MiB), NvmePath(path=disk / "b", weight=1.0, max_bytes=8 * MiB)
    store = open_store(*paths)
    store.build(SPECS, UNITS)
    fill(store, SPECS, pools)
    store.publish(1, {})
    used = sum(file.stat().st_size for file in (disk / "a").glob("infinity/test/*.safetensors"))
    assert 0 < used <= MiB


def test_too_little_space_is_told_before_any_file_exists(open_store, disk):
    store = open_store(NvmePath(path=disk, max_bytes=MiB - 1))
    with pytest.raises(StorageError, match=f"{MiB - 1} of its max_bytes left"):
        store.build(SPECS, UNITS)
    assert not files_below(disk)


@pytest.mark.parametrize(
    ("specs", "identity", "message"),
    [
        (SPECS[:-1], {"optimizer": "adamw", "weights": "12"}, "another layout"),
        ([*SPECS[:-1], make_spec(1, 7, 2048, Tier.CPU)], {"optimizer": "adamw", "weights": "12"}, "another layout"),
        (SPECS, {"optimizer": "adamw", "weights": "13"}, "weights was '12', is now '13'"),
        (SPECS, {"optimizer": "adamw"}, "weights was '12', is now None"),
    ],
)
def test_another_model_is_refused_by_name_and_nothing_is_touched(open_store, disk, specs, identity, message):
    store = open_store(disk, identity={"optimizer": "adamw", "weights": "12"})
    store.build(SPECS, UNITS)
    store.publish(4, {})
    store.close()
    before = {file: (file.read_bytes(), file.stat().st_ino) for file in (disk / "infinity" / "test").iterdir() if file.name != "lock"}
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(disk, identity=identity).reopen(specs, UNITS)
    assert all(way in str(caught.value) for way in ("Load a checkpoint", "another run", "infinity clean"))
    assert before == {file: (file.read_bytes(), file.stat().st_ino) for file in (disk / "infinity" / "test").iterdir() if file.name != "lock"}


def test_without_paths_everything_but_publishing_works(open_store, pools):
    specs = [make_spec(0, 0, 2048, Tier.CPU)]
    store = open_store()
    assert store.reopen(specs, UNITS) is None
    store.build(specs, UNITS)
    fill(store, specs, pools)
    with pytest.raises(ConfigError, match="nvme.paths is empty"):
        store.publish(1, {})
    with pytest.raises(ConfigError, match="nvme.paths is empty"):
        open_store().build([make_spec(0, 0, 2048, Tier.NVME)], UNITS)


def test_descriptors_beyond_the_limit_are_told_before_any_file_exists(open_store, disk, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 129))
    with pytest.raises(StorageError, match="needs 130 open files, the limit is 129"):
        open_store(disk).build(SPECS, UNITS)
    assert not files_below(disk)


@st.composite
def layouts(draw):
    """Chunks of odd sizes in several units and groups, with two placements."""
    specs, later = [], []
    for unit in range(draw(st.integers(1, 2))):
        for group in draw(st.sets(st.sampled_from([Group.PARAM, Group.OPTIMIZER]), min_size=1)):
            for chunk in range(draw(st.integers(1, 3))):
                numel = draw(st.integers(1, 5000))
                specs.append(make_spec(unit, chunk, numel, draw(st.sampled_from(Tier)), group))
                later.append(make_spec(unit, chunk, numel, draw(st.sampled_from(Tier)), group))
    return specs, later


@settings(max_examples=20)
@given(layout=layouts(), path_counts=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_any_layout_survives_any_change_of_placement_and_paths(layout, path_counts):
    logging.disable(logging.WARNING)
    base = Path(tempfile.mkdtemp(prefix="infinity-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    pools = Pools(pinned=SlabPool(pin=False, threads=1), plain=SlabPool(pin=False, threads=1))

    def opened(count: int) -> Store:
        paths = [NvmePath(path=base / name, weight=1.0) for name in "abc"[:count]]
        for path in paths:
            path.path.mkdir(exist_ok=True)
        return Store(paths=paths, run="r", pools=pools, copies=Copies(torch.device("cpu"), Timeline()), timeline=Timeline())

    try:
        for life, (specs, count) in enumerate(zip(layout, path_counts, strict=True)):
            store = opened(count)
            resumed = store.reopen(specs, UNITS)
            if resumed is None:
                store.build(specs, UNITS)
            else:
                assert all(torch.equal(contents(store, spec, pools), pattern(spec)) for spec in specs)
            fill(store, specs, pools)
            store.publish(life, {})
            store.close()
        store = opened(path_counts[1])
        assert store.reopen(layout[0], UNITS).step == 1
        assert all(torch.equal(contents(store, spec, pools), pattern(spec)) for spec in layout[0])
        store.close()
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(base)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_disturb_io_under_way(open_store, disk, pools):
    """What a DataLoader does: workers fork while reads and writes are under way, and exit."""
    store = open_store(disk)
    specs = [make_spec(0, chunk, MiB // 4, Tier.NVME) for chunk in range(3)]
    store.build(specs, UNITS)
    fill(store, specs, pools)
    buffers = [pools.plain.take(spec.padded_nbytes) for spec in specs]
    children = []
    for _ in range(3):
        works = [store.fetch(spec.key, buffer) for spec, buffer in zip(specs, buffers, strict=True)]
        pid = os.fork()
        if not pid:
            os._exit(0)
        children.append(pid)
        for spec, buffer, work in zip(specs, buffers, works, strict=True):
            work.wait()
            assert torch.equal(buffer, pattern(spec))
            buffer.zero_()
    assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
