"""Chunks with known bytes, and how to put them into a store and take them out again."""

from __future__ import annotations

import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from infinity.kinds import Group, Tier
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part
from infinity.storage.copies import Copies
from infinity.storage.nvme import NvmePath
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.tiers import Pools
from infinity.timeline import Timeline

UNITS = ("h.0", "h.1", "h.2")


def make_spec(unit: int, chunk: int, numel: int, tier: Tier, group: Group = Group.OPTIMIZER) -> ChunkSpec:
    """An optimizer chunk is three fp32 parts, a param or grad chunk one bf16 part."""
    if group is Group.OPTIMIZER:
        names, dtype = ("master", "exp_avg", "exp_avg_sq"), torch.float32
    else:
        names, dtype = (str(group),), torch.bfloat16
    parts = tuple(Part(f"h.{unit}|f0|c{chunk}|{name}", dtype, numel) for name in names)
    return ChunkSpec(ChunkKey(unit, 0, group, chunk), sum(part.nbytes for part in parts), tier, parts)


def pattern(spec: ChunkSpec, seed: int = 0) -> torch.Tensor:
    """uint8 [nbytes] that differs between chunks and seeds."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.key}|{seed}".encode()))
    return torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)


def fill(store: Store, specs: list[ChunkSpec], pools: Pools, seed: int = 0) -> None:
    """Write every chunk's pattern."""
    for spec in specs:
        buffer = pools.plain.take(spec.padded_nbytes)
        buffer[: spec.nbytes] = pattern(spec, seed)
        store.write_back(spec.key, buffer).wait()


def contents(store: Store, spec: ChunkSpec, pools: Pools) -> torch.Tensor:
    """uint8 [nbytes], fetched."""
    buffer = pools.plain.take(spec.padded_nbytes)
    store.fetch(spec.key, buffer).wait()
    return buffer[: spec.nbytes].clone()


SPECS = [make_spec(unit, chunk, 4096, tier) for unit in range(2) for chunk, tier in enumerate((Tier.NVME, Tier.NVME, Tier.CPU))]


def live_until(disk: Path, instant: str, ready: Any = None) -> None:
    """The life of a process that trains run "test" and is killed at `instant`."""
    pools = Pools(pinned=SlabPool(pin=False, threads=1), plain=SlabPool(pin=False, threads=1))
    store = Store(paths=[NvmePath(path=disk)], run="test", pools=pools, copies=Copies(torch.device("cpu"), Timeline()), timeline=Timeline())

    def die(*_rest: object, **_more: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if store.reopen(SPECS, UNITS) is None:
        store.build(SPECS, UNITS)
    if instant == "built":
        die()
    if instant == "reading":
        store.fetch(SPECS[0].key, pools.plain.take(SPECS[0].padded_nbytes)).wait()
        die()
    fill(store, SPECS, pools, seed=1)
    if instant == "written":
        die()
    if instant == "waiting":
        ready.set()
        time.sleep(60)
    if instant == "before sync":
        store._nvme.sync = die  # type: ignore[method-assign]
    if instant == "before manifest":
        store._commit = die  # type: ignore[method-assign]
    store.publish(9, {})
    die()


def move_and_publish(disk: Path, calls: int) -> None:
    """Go on with a run of paths a and b on b and c, write, publish, close; killed before the `calls`-th call that changes a file system."""
    pools = Pools(pinned=SlabPool(pin=False, threads=1), plain=SlabPool(pin=False, threads=1))
    left = iter(range(calls))

    def mortal(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for owner, name in ((os, "fsync"), (os, "fdatasync"), (os, "open"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "pwrite")):
        setattr(owner, name, mortal(getattr(owner, name)))
    paths = [NvmePath(path=disk / name, weight=1.0) for name in "bc"]
    store = Store(paths=paths, run="test", pools=pools, copies=Copies(torch.device("cpu"), Timeline()), timeline=Timeline())
    store.reopen(SPECS, UNITS)
    fill(store, SPECS, pools, seed=1)
    store.publish(5, {})
    store.close()
