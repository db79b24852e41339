"""Gradients on their way to the drives while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from infinity.device import tier_of
from infinity.kinds import Group, Tier
from infinity.optim.grad_mover import LOOKAHEAD, ring_count
from infinity.optim.ring import Ring
from infinity.planner.plan import Plan
from infinity.planner.working import ON_THEIR_WAY
from infinity.replay.noise import noisy
from infinity.runtime.units import Unit
from infinity.storage.chunks import ChunkSpec
from infinity.storage.slabs import SlabPool, footprint
from infinity.storage.store import Store


class Gradients:
    """Writes of the gradients that rest on NVMe, begun by one thread, as many at a time as training's ring of sums lets be under way.

    A unit's gradients count as on their way until the last of their writes has begun; with more of them than the plan has room for,
    backward waits.
    """

    def __init__(self, units: Sequence[Unit], plan: Plan, store: Store, slabs: SlabPool) -> None:
        self._store = store
        self._chunks: dict[Unit, list[ChunkSpec]] = {unit: [] for unit in units}
        of_index = {unit.index: unit for unit in units}
        for spec in plan.specs:
            if spec.tier is Tier.NVME and spec.key.group is Group.GRAD:
                self._chunks[of_index[spec.key.unit]].append(spec)
        self._sizes = {unit: _footprint(unit, chunks, plan) for unit, chunks in self._chunks.items()}
        self._room_bytes = plan.working_bytes(tier_of(plan.device), ON_THEIR_WAY)
        self._coming: deque[tuple[Future[None], int]] = deque()
        # Of the ring's buffers LOOKAHEAD are with gradients that land; the last of them to land is being written already.
        count = ring_count(plan.busy_paths) - (LOOKAHEAD - 1)
        largest = max((spec.padded_nbytes for chunks in self._chunks.values() for spec in chunks), default=0)
        self._ring = Ring(noisy(slabs), count=count, nbytes=largest)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="infinity-grads")

    def nbytes(self, unit: Unit) -> int:
        """What is written of the unit."""
        return sum(spec.nbytes for spec in self._chunks[unit])

    def hand_down(self, unit: Unit) -> None:
        """A unit's gradients are whole. Waits only while too many others are on their way. Raises StorageError."""
        if not self._chunks[unit]:
            return
        size = self._sizes[unit]
        while self._coming and sum(nbytes for _, nbytes in self._coming) + size > self._room_bytes:
            self._coming.popleft()[0].result()
        self._coming.append((self._thread.submit(self._write, self._chunks[unit]), size))

    def drain(self) -> None:
        """Wait until all of them are at rest."""
        while self._coming:
            self._coming.popleft()[0].result()
        self._ring.drain()

    def close(self) -> None:
        """End the thread. What has begun goes on; whoever closes the store waits for that."""
        self._thread.shutdown(cancel_futures=True)
        self._ring.close()

    def _write(self, chunks: Sequence[ChunkSpec]) -> None:
        """Gradients' thread."""
        for spec in chunks:
            buffer = self._ring.take()
            self._ring.give_back(buffer, self._store.write_back(spec.key, buffer))


def _footprint(unit: Unit, chunks: Sequence[ChunkSpec], plan: Plan) -> int:
    """What the unit's flat gradients hold on the compute device until they are down."""
    return sum(footprint(unit.layout.flats[f].nbytes, plan.device) for f in {spec.key.flat for spec in chunks})
