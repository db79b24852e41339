"""What ranks do together around an update: average before it the gradients that each keeps whole, gather after it the parameters.

Where both are sharded there is nothing to do here: backward has reduced, and forward gathers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import InfinityError
from infinity.kinds import Group, Lane
from infinity.optim.chunks import Chunk, FlatKey
from infinity.optim.grads import Grads, GradSet
from infinity.optim.promise import Promise
from infinity.optim.ring import Ring
from infinity.sharding.layout import FlatLayout, Interval, UnitLayout
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.stream_work import stream_work
from infinity.storage.work import Work, join
from infinity.timeline import Timeline

BUFFERS = 2
"""Full flat buffers for what does not rest in one piece: one that is filled or emptied while another is with the ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """A trained flat buffer."""

    key: FlatKey
    name: str
    layout: FlatLayout
    params: Sequence[tuple[ChunkKey, Interval]]
    """The chunks of its parameters that rest here, and where they lie in it."""
    grads: Sequence[Chunk]
    """Those of its gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Full:
    """A full flat buffer that the ranks work on."""

    flat: _Flat
    values: Tensor
    """[numel]: where it rests, or a buffer."""
    loan: Tensor | None
    work: Work


class Exchange:
    """Used by the thread that steps. Every rank takes the same flat buffers in the same order."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        grad_chunks: Sequence[Chunk],
        *,
        share: Share,
        chunk_numel: int,
        store: Store,
        ranks: Ranks,
        slabs: SlabPool,
        timeline: Timeline,
        deadline_s: float,
    ) -> None:
        """`grad_chunks`: those whose gradients the share keeps."""
        self._share, self._store, self._ranks, self._timeline, self._deadline_s = share, store, ranks, timeline, deadline_s
        self._averages = not share.is_alone and not share.is_sharded(Group.GRAD)
        self._gathers = share.is_sharded(Group.OPTIMIZER) and not share.is_sharded(Group.PARAM)
        of_flat: dict[FlatKey, list[Chunk]] = {}
        for chunk in grad_chunks:
            of_flat.setdefault(chunk.flat_key, []).append(chunk)
        self._flats = [
            _Flat(
                (unit.index, f),
                unit.flat_name(f),
                flat,
                [(ChunkKey(unit.index, f, Group.PARAM, c), run) for c, run in share.chunks(flat, Group.PARAM, chunk_numel)],
                of_flat[unit.index, f],
            )
            for unit in (layouts if self._averages or self._gathers else ())
            for f, flat in enumerate(unit.flats)
            if flat.trainable
        ]
        self._ring = Ring(slabs.take, count=BUFFERS, nbytes=max((self._buffer_bytes(flat) for flat in self._flats), default=0))
        self._coming: deque[_Flat] = deque()
        """Parameters to gather that are not updated yet, in forward order."""
        self._under_way: deque[_Full] = deque()

    def _buffer_bytes(self, flat: _Flat) -> int:
        needed = [0]
        if self._averages and self._rest(flat, Group.GRAD) is None:
            needed.append(flat.layout.numel * flat.grads[0].grad_dtype.itemsize)
        if self._gathers and self._rest(flat, Group.PARAM) is None:
            needed.append(flat.layout.nbytes)
        return max(needed)

    # -- before the update -------------------------------------------------------------------------------------------

    def average(self, grads: Grads) -> None:
        """The gradients at rest, which every rank has added up from its own batches, become their mean over all ranks. Waits."""
        if not self._averages:
            return
        everybodys = self._ranks.everybodys(dict(grads.all_present()), "which parameters have gradients")
        present = {flat.key: frozenset[int]().union(*(their.get(flat.key, ()) for their in everybodys)) for flat in self._flats}
        taken = grads.take()
        try:
            under_way: deque[_Full] = deque()
            for flat in (flat for flat in self._flats if present[flat.key]):
                while under_way and not self._can_open(flat, Group.GRAD):
                    self._land(under_way.popleft(), grads, taken, present)
                under_way.append(self._begin_average(flat, taken))
            for full in under_way:
                self._land(full, grads, taken, present)
        except BaseException as error:
            taken.fail(error)
            raise
        taken.drop()

    def _begin_average(self, flat: _Flat, taken: GradSet) -> _Full:
        values, loan = self._open(flat, Group.GRAD, flat.grads[0].grad_dtype)
        reads = []
        for chunk in flat.grads:
            part = chunk.of(values, 0)
            if not taken.holds(chunk):
                part.zero_()
            elif loan is not None:
                reads.append(self._store.fetch(chunk.key(Group.GRAD), part.view(torch.uint8)))
        work = self._ranks.average(values, flat.name, after=reads)
        if not self._share.is_sharded(Group.OPTIMIZER):
            work = join((work, self._ranks.gather(values, f"the mean of {flat.name}")))
        return _Full(flat, values, loan, work)

    def _land(self, full: _Full, grads: Grads, taken: GradSet, present: dict[FlatKey, frozenset[int]]) -> None:
        """What this rank updates goes to rest as a gradient that has just arrived."""
        self._wait_for_ranks(full)
        flat, run = full.flat, self._share.run(full.flat.layout, Group.OPTIMIZER)
        for chunk in filter(taken.holds, flat.grads):
            taken.done(chunk)
        landed = Promise(f"the mean of {flat.name}", self._deadline_s)
        if full.loan is not None:
            self._ring.give_back(full.loan, landed)
        grads.arrive(*flat.key, full.values[run.start : run.stop], present[flat.key], landed.keep, start=run.start)

    # -- after the update --------------------------------------------------------------------------------------------

    def begin_gather(self, updated: Collection[FlatKey]) -> None:
        """These flat buffers are about to be updated, each rank's part by itself."""
        if self._gathers:
            self._coming = deque(flat for flat in self._flats if flat.key in updated)

    def gather_updated(self, is_updated: Callable[[int], bool]) -> None:
        """Start on those whose unit has been updated here, as far as that needs no waiting."""
        while self._under_way and self._under_way[0].work.is_completed():
            self._settle(self._under_way.popleft())
        while self._coming and is_updated(self._coming[0].key[0]) and self._can_open(self._coming[0], Group.PARAM):
            self._under_way.append(self._begin_gather(self._coming.popleft()))

    def finish_gather(self) -> None:
        """All of them, until everybody's new parameters rest here."""
        while self._coming:
            while self._under_way and not self._can_open(self._coming[0], Group.PARAM):
                self._settle(self._under_way.popleft())
            self._under_way.append(self._begin_gather(self._coming.popleft()))
        while self._under_way:
            self._settle(self._under_way.popleft())
        self._ring.drain()

    def gather_all(self) -> None:
        """Each rank has new parameters in its own part of every trained flat buffer: bring the others'."""
        self.begin_gather({flat.key for flat in self._flats})
        self.finish_gather()

    def _begin_gather(self, flat: _Flat) -> _Full:
        values, loan = self._open(flat, Group.PARAM, flat.layout.dtype)
        own = [] if loan is None else [(key, run) for key, run in flat.params if self._is_own(flat, run)]
        reads = [self._store.fetch(key, values[run.start : run.stop].view(torch.uint8)) for key, run in own]
        after = [stream_work(values.device), *reads]
        return _Full(flat, values, loan, self._ranks.gather(values, f"the new {flat.name}", after=after))

    def _settle(self, full: _Full) -> None:
        """The others' parts go to rest."""
        self._wait_for_ranks(full)
        if full.loan is not None:
            others = [(key, run) for key, run in full.flat.params if not self._is_own(full.flat, run)]
            writes = [self._store.write_back(key, full.values[run.start : run.stop].view(torch.uint8)) for key, run in others]
            self._ring.give_back(full.loan, join(writes))

    def _is_own(self, flat: _Flat, run: Interval) -> bool:
        return len(run.overlap(self._share.run(flat.layout, Group.OPTIMIZER))) > 0

    def give_up(self, error: BaseException) -> None:
        """The update has failed on this rank: the others hear of it at once."""
        if isinstance(error, InfinityError):
            self._ranks.give_up(error)

    # -- both --------------------------------------------------------------------------------------------------------

    def _wait_for_ranks(self, full: _Full) -> None:
        if full.work.is_completed():
            full.work.wait(self._deadline_s)
        else:
            with self._timeline.stall(Lane.COMM, full.flat.name):
                full.work.wait(self._deadline_s)

    def _rest(self, flat: _Flat, group: Group) -> Tensor | None:
        """uint8: the flat buffer itself, where it rests in one piece."""
        return self._store.whole(*flat.key, group)

    def _can_open(self, flat: _Flat, group: Group) -> bool:
        """Whether that needs no waiting for a buffer."""
        return self._rest(flat, group) is not None or self._ring.has_free()

    def _open(self, flat: _Flat, group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """A full flat buffer to work on, and the loan if it is not where it rests."""
        rest = self._rest(flat, group)
        if rest is not None:
            return rest.view(dtype), None
        loan = self._ring.take()
        return loan[: flat.layout.numel * dtype.itemsize].view(dtype), loan

    def close(self) -> None:
        """Let go of the buffers."""
        self._coming.clear()
        self._under_way.clear()
        self._ring.close()
