"""Stores on temporary paths."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from infinity.storage.copies import Copies
from infinity.storage.nvme import NvmePath
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.tiers import Pools
from infinity.timeline import Timeline


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory in memory: fast, and it takes O_DIRECT. Falls back to the default temporary directory."""
    base = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="infinity-test-", dir=base if base.is_dir() else None))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools(pinned=SlabPool(pin=False, threads=1), plain=SlabPool(pin=False, threads=1))
    yield made
    made.pinned.close()
    made.plain.close()


OpenStore = Callable[..., Store]


@pytest.fixture
def open_store(pools: Pools) -> Iterator[OpenStore]:
    """A store on the given paths; closed at the end of the test if it is not yet."""
    opened: list[Store] = []

    def make(*paths: Path | NvmePath, run: str = "test", **more: object) -> Store:
        timeline = Timeline()
        named = [path if isinstance(path, NvmePath) else NvmePath(path=path, weight=1.0) for path in paths]
        for path in named:
            path.path.mkdir(exist_ok=True)
        store = Store(paths=named, run=run, pools=pools, copies=Copies(torch.device("cpu"), timeline), timeline=timeline, **more)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
