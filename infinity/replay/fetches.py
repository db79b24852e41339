"""Parameters on their way from the drives, unit after unit, as far ahead as training fetches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from infinity.kinds import Group, Tier
from infinity.optim.ring import Ring
from infinity.planner.plan import Plan
from infinity.planner.working import upload_buffers
from infinity.runtime.units import Unit
from infinity.sharding.layout import Interval
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import Work, join


@dataclass(frozen=True, slots=True)
class _Flat:
    """A flat buffer with parameters at rest on NVMe."""

    nbytes: int
    chunks: tuple[tuple[ChunkKey, Interval], ...]
    """Those chunks, and their bytes in the buffer."""


class Fetches:
    """Reads of the unit in use and of the plan's `prefetch_units` after it, begun by one mover thread in their order.

    On a CPU device they land in flat buffers of the unit, with a GPU in as many buffers of one chunk as upload staging has.
    """

    def __init__(self, units: Sequence[Unit], plan: Plan, store: Store, slabs: SlabPool) -> None:
        tiers = {spec.key: spec.tier for spec in plan.specs}
        self._flats = {unit: _flats_on_nvme(unit, plan.chunk_numel, tiers) for unit in units}
        self._ahead = plan.prefetch_units
        self._store, self._slabs = store, slabs
        sizes = [spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME and spec.key.group is Group.PARAM]
        self._staging: Ring | None = None
        if plan.device.type == "cuda":
            self._staging = Ring(slabs.take, count=upload_buffers(plan.busy_paths), nbytes=max(sizes, default=0))
        self._mover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="infinity-mover")

    def nbytes(self, unit: Unit) -> int:
        """What a visit of the unit reads."""
        return sum(len(interval) for flat in self._flats[unit] for _, interval in flat.chunks)

    def visit(self, order: Sequence[Unit]) -> Iterator[Unit]:
        """Each unit once its parameters are there, the next ones on their way. Raises StorageError."""
        left = deque(order)
        under_way: deque[tuple[Unit, Future[Work]]] = deque()
        while left or under_way:
            while left and len(under_way) <= self._ahead:
                under_way.append((left[0], self._mover.submit(self._begin, left.popleft())))
            unit, begun = under_way.popleft()
            begun.result().wait()
            del begun  # the unit's buffers serve the next one that is as large
            yield unit

    def close(self) -> None:
        """End the thread. What has begun goes on; whoever closes the store waits for that."""
        self._mover.shutdown(cancel_futures=True)
        if self._staging is not None:
            self._staging.close()

    def _begin(self, unit: Unit) -> Work:
        """Mover thread: all reads of a unit. With staging, waits for the oldest read where no buffer is free."""
        reads = []
        for flat in self._flats[unit]:
            target = self._slabs.take(flat.nbytes) if self._staging is None else None
            for key, interval in flat.chunks:
                if self._staging is None:
                    assert target is not None
                    reads.append(self._store.fetch(key, target[interval.start : interval.stop]))
                else:
                    buffer = self._staging.take()
                    reads.append(read := self._store.fetch(key, buffer))
                    self._staging.give_back(buffer, read)
        return join(reads)


def _flats_on_nvme(unit: Unit, chunk_numel: int, tiers: dict[ChunkKey, Tier]) -> tuple[_Flat, ...]:
    found = []
    for f, layout in enumerate(unit.layout.flats):
        chunks = []
        for c, interval in enumerate(layout.chunks(chunk_numel)):
            key = ChunkKey(unit=unit.index, flat=f, group=Group.PARAM, chunk=c)
            if tiers[key] is Tier.NVME:
                size = layout.dtype.itemsize
                chunks.append((key, Interval(interval.start * size, interval.stop * size)))
        if chunks:
            found.append(_Flat(layout.nbytes, tuple(chunks)))
    return tuple(found)
