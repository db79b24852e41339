"""A run's states come back bit for bit, from any tier, in the next process, or are refused."""

from __future__ import annotations

import pytest
import torch
from storage.storage_rig import UNITS, contents, fill, make_spec, pattern

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group, Tier
from infinity.sizes import MiB
from infinity.storage import publish


def specs_on(*tiers: Tier):
    """Chunk i of each unit on tiers[i]."""
    return [make_spec(unit, chunk, 2048 * (1 + chunk), tier) for unit in range(len(UNITS)) for chunk, tier in enumerate(tiers)]


def test_every_tier_gives_back_what_was_written(open_store, disk, pools):
    store = open_store(disk)
    specs = specs_on(Tier.NVME, Tier.CPU, Tier.HBM)
    store.build(specs, UNITS)
    fill(store, specs, pools)
    for spec in specs:
        assert torch.equal(contents(store, spec, pools), pattern(spec))
        resident = store.resident(spec.key)
        assert (resident is None) == (spec.tier is Tier.NVME)
        assert resident is None or torch.equal(resident, pattern(spec))


@pytest.mark.parametrize("later", [(Tier.NVME, Tier.CPU), (Tier.CPU, Tier.NVME), (Tier.HBM, Tier.HBM), (Tier.NVME, Tier.NVME)])
def test_a_published_run_goes_on_wherever_its_chunks_live_next(open_store, disk, pools, later):
    store = open_store(disk)
    first = specs_on(Tier.NVME, Tier.CPU)
    assert store.reopen(first, UNITS) is None
    store.build(first, UNITS)
    fill(store, first, pools)
    store.publish(7, {"loss_scale": 2.0})
    store.close()

    again = open_store(disk)
    second = specs_on(*later)
    resumed = again.reopen(second, UNITS)
    assert (resumed.step, resumed.extra) == (7, {"loss_scale": 2.0})
    for spec in second:
        assert torch.equal(contents(again, spec, pools), pattern(spec))
    fill(again, second, pools, seed=1)
    again.publish(8, {})
    again.close()

    last = open_store(disk)
    assert last.reopen(first, UNITS).step == 8
    for spec in first:
        assert torch.equal(contents(last, spec, pools), pattern(spec, seed=1))


def test_what_lives_in_hbm_is_published_in_pieces_whatever_the_size_of_its_chunks(open_store, disk, pools, monkeypatch):
    monkeypatch.setattr(publish, "_PIECE_BYTES", 8192)
    specs = [make_spec(0, 0, 2 * MiB, Tier.HBM), make_spec(1, 0, 2048, Tier.HBM), make_spec(1, 1, 2048 * 3, Tier.CPU)]
    store = open_store(disk)
    store.build(specs, UNITS)
    fill(store, specs, pools)
    pools.plain.trim()
    before = pools.pinned.allocated_bytes
    store.publish(1, {})
    assert pools.pinned.peak_bytes - before <= 4 * 8192, "an HBM chunk of 24 MiB passes through four pieces"
    store.close()

    again = open_store(disk)
    again.reopen(specs, UNITS)
    assert all(torch.equal(contents(again, spec, pools), pattern(spec)) for spec in specs)
    again.close()

    file = next(path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 24 * MiB)
    with file.open("r+b") as damaged:
        damaged.seek(20 * MiB)
        damaged.write(b"damage")
    with pytest.raises(StorageError, match=r"checksum of chunk u0\|f0\|optimizer\|c0"):
        open_store(disk).reopen(specs, UNITS)


def test_what_lives_in_memory_is_one_piece_of_memory(open_store, disk, pools):
    store = open_store(disk)
    specs = specs_on(Tier.CPU, Tier.CPU, Tier.CPU)
    store.build(specs, UNITS)
    assert pools.plain.allocated_bytes == sum(spec.padded_nbytes for spec in specs)


def test_a_run_that_died_between_writes_is_refused_with_the_ways_out(open_store, disk, pools):
    store = open_store(disk)
    specs = specs_on(Tier.NVME)
    store.build(specs, UNITS)
    store.publish(3, {})
    fill(store, specs[:1], pools)
    store.close()
    with pytest.raises(ConfigError, match=r"mix of two steps.*step: 3|last published step: 3"):
        open_store(disk).reopen(specs, UNITS)


def test_a_published_run_is_never_built_over(open_store, disk):
    store = open_store(disk)
    store.build(specs_on(Tier.NVME), UNITS)
    store.publish(3, {})
    store.close()
    with pytest.raises(ConfigError, match="already holds step 3"):
        open_store(disk).build(specs_on(Tier.NVME), UNITS)
    open_store(disk, run="other").build(specs_on(Tier.NVME), UNITS)


def test_a_run_that_was_never_published_leaves_no_files(open_store, disk, pools):
    store = open_store(disk)
    specs = specs_on(Tier.NVME, Tier.CPU)
    store.build(specs, UNITS)
    fill(store, specs, pools)
    store.close()
    assert [path.name for path in (disk / "infinity" / "test").iterdir()] == ["lock"]


def test_gradients_are_scratch(open_store, disk, pools):
    grads = [make_spec(0, 0, 4096, Tier.NVME, Group.GRAD)]
    states = specs_on(Tier.NVME)
    store = open_store(disk)
    store.build(states + grads, UNITS)
    store.publish(1, {})
    fill(store, grads, pools)
    assert torch.equal(contents(store, grads[0], pools), pattern(grads[0]))
    store.close()
    again = open_store(disk)
    assert again.reopen(states, UNITS).step == 1, "writing gradients does not make a run dirty, and they may be absent next time"
