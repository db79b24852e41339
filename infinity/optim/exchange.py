"""What ranks do together around an update: average before it the gradients that each keeps whole, gather after it the parameters.

Where both are sharded there is nothing to do here: backward has reduced, and forward gathers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinity.errors import InfinityError, TraceError
from infinity.kinds import Group, Lane, Tier
from infinity.optim.chunks import Chunk, FlatKey, Rule, Rules
from infinity.optim.grads import Grads, GradSet
from infinity.optim.promise import Promise
from infinity.optim.ring import Ring
from infinity.sharding.groups import first_difference
from infinity.sharding.layout import FlatLayout, Interval, UnitLayout
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.storage.chunks import ChunkKey
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.stream_work import stream_work
from infinity.storage.work import Work, join
from infinity.timeline import Timeline

Place = tuple[FlatKey, int]
"""A parameter's flat buffer and its slot there."""

BUFFERS = 2
"""Full flat buffers for what the ranks do not reach where it rests: one that is filled or emptied while another is with them."""


def is_in_one_piece(tiers: Collection[Tier]) -> bool:
    """Whether a flat buffer whose chunks rest in these tiers rests as one tensor in memory, as `Store.whole` gives it."""
    return len(tiers) == 1 and Tier.NVME not in tiers


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
    loan: _Loan | None
    work: Work


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    """A buffer, and the ring that it goes back to."""

    buffer: Tensor
    ring: Ring

    def end(self, after: Work) -> None:
        self.ring.give_back(self.buffer, after)


class Exchange:
    """Used by the thread that steps. Every rank takes the same flat buffers in the same order.

    The ranks work on a flat buffer where it rests in one piece on the compute device. One that rests in one piece in CPU memory beside a GPU passes
    through HBM, so that all of them have the GPUs' links between them; one in several places, or on NVMe, through CPU memory.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        grad_chunks: Sequence[Chunk],
        *,
        share: Share,
        chunk_numel: int,
        store: Store,
        copies: Copies,
        ranks: Ranks,
        slabs: SlabPool,
        timeline: Timeline,
        deadline_s: float,
    ) -> None:
        """`grad_chunks`: those whose gradients the share keeps. `copies`: to and from the compute device."""
        self._share, self._store, self._copies, self._ranks = share, store, copies, ranks
        self._timeline, self._deadline_s = timeline, deadline_s
        self._averages, self._gathers = share.is_exchanged(Group.GRAD), share.is_exchanged(Group.PARAM)
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
        wanted = {Tier.CPU: 0, Tier.HBM: 0}
        for flat in self._flats:
            for group, nbytes in self._exchanged(flat):
                if (tier := self._passes_through(flat, group)) is not None:
                    wanted[tier] = max(wanted[tier], nbytes)
        take_hbm = partial(torch.empty, dtype=torch.uint8, device=copies.device)
        self._rings = {
            Tier.CPU: Ring(slabs.take, count=BUFFERS, nbytes=wanted[Tier.CPU]),
            Tier.HBM: Ring(take_hbm, count=BUFFERS, nbytes=wanted[Tier.HBM]),
        }
        self._coming: deque[_Flat] = deque()
        """Parameters to gather that are not updated yet, in forward order."""
        self._under_way: deque[_Full] = deque()

    def _exchanged(self, flat: _Flat) -> Iterator[tuple[Group, int]]:
        """What passes between ranks, and its bytes."""
        if self._averages:
            yield Group.GRAD, flat.layout.numel * flat.grads[0].grad_dtype.itemsize
        if self._gathers:
            yield Group.PARAM, flat.layout.nbytes

    # -- before the update -------------------------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """Each rank has whole gradients, of its own batches, until a step is near."""
        return self._averages

    def average(self, grads: Grads) -> None:
        """The gradients at rest, which every rank has added up from its own batches, become their mean over all ranks. Waits."""
        everybodys = self._ranks.everybodys(dict(grads.all_present()), "which parameters have gradients")
        present = {flat.key: frozenset[int]().union(*(their.get(flat.key, ()) for their in everybodys)) for flat in self._flats}
        taken = grads.take()
        try:
            under_way: deque[_Full] = deque()
            for flat in (flat for flat in self._flats if present[flat.key]):
                while not self._can_open(flat, Group.GRAD):
                    if under_way:
                        self._land(under_way.popleft(), grads, taken, present)
                    elif not grads.land_oldest():
                        break  # the mover's thread lands the next one
                under_way.append(self._begin_average(flat, taken))
            for full in under_way:
                self._land(full, grads, taken, present)
        except BaseException as error:
            taken.fail(error)
            raise
        taken.drop()

    def compare_update(self, rules: Rules, scale: float, max_norms: Sequence[float], names: Callable[[], Mapping[Place, str]]) -> Callable[[], None]:
        """Ask whether all ranks are about to update by the same numbers, each its own part of what is one model. What is returned waits for the
        answer, and raises TraceError on all ranks where they are not.

        `scale`, `max_norms`: what the gradients are multiplied by and clipped to. `names`: of all parameters, asked for where ranks differ.
        """
        if self._ranks.world_size == 1:
            return lambda: None
        mine = {(flat, slot): rule for flat, of_slot in rules.items() for slot, rule in of_slot.items()}
        digest = hash((frozenset(mine.items()), scale, *max_norms))  # of numbers: in every process the same, but for NaN
        is_same = self._ranks.compare(digest, "the numbers of the update")

        def check() -> None:
            if not is_same():
                name_of = names()
                words = {name_of[place]: _in_words(rule) for place, rule in mine.items()}
                words["the gradients"] = f"scaled by {scale:g} and clipped to {list(max_norms)}"
                self._find_other(words)

        return check

    def _find_other(self, words: Mapping[str, str]) -> None:
        """Raise TraceError with the first thing that the ranks would do differently."""
        found = first_difference(self._ranks.everybodys(words, "the numbers of the update"), "left alone")
        if found is not None:
            raise TraceError(
                f"nothing is updated, ranks would do it differently: {found.name} would be {found.mine} on rank 0 and {found.other} on rank "
                f"{found.rank}. Give every rank the same parameter groups, and its schedulers and clipping the same numbers"
            )

    def _begin_average(self, flat: _Flat, taken: GradSet) -> _Full:
        values, loan = self._open(flat, Group.GRAD, flat.grads[0].grad_dtype)
        reads = []
        for chunk in flat.grads:
            part = chunk.of(values, 0)
            if not taken.holds(chunk):
                part.zero_()
            elif loan is not None:
                reads.append(self._bring(chunk.key(Group.GRAD), part))
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
            full.loan.end(landed)
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
        for ring in self._rings.values():
            ring.drain()

    def gather_all(self) -> None:
        """Each rank has new parameters in its own part of every trained flat buffer: bring the others'."""
        self.begin_gather({flat.key for flat in self._flats})
        self.finish_gather()

    def _begin_gather(self, flat: _Flat) -> _Full:
        values, loan = self._open(flat, Group.PARAM, flat.layout.dtype)
        own = [] if loan is None else [(key, run) for key, run in flat.params if self._is_own(flat, run)]
        reads = [self._bring(key, values[run.start : run.stop]) for key, run in own]
        after = [stream_work(values.device), *reads]
        return _Full(flat, values, loan, self._ranks.gather(values, f"the new {flat.name}", after=after))

    def _settle(self, full: _Full) -> None:
        """The others' parts go to rest."""
        self._wait_for_ranks(full)
        if full.loan is not None:
            others = [(key, run) for key, run in full.flat.params if not self._is_own(full.flat, run)]
            full.loan.end(join(self._bring_home(key, full.values[run.start : run.stop]) for key, run in others))

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

    def _passes_through(self, flat: _Flat, group: Group) -> Tier | None:
        """Where it needs a buffer to be with the ranks; None where it rests within their reach."""
        rest = self._rest(flat, group)
        if rest is None:
            return Tier.CPU
        return None if rest.device.type == self._copies.device.type else Tier.HBM

    def _can_open(self, flat: _Flat, group: Group) -> bool:
        """Whether that needs no waiting for a buffer."""
        tier = self._passes_through(flat, group)
        return tier is None or self._rings[tier].has_free()

    def _open(self, flat: _Flat, group: Group, dtype: torch.dtype) -> tuple[Tensor, _Loan | None]:
        """A full flat buffer to work on, and the loan if it is not where it rests."""
        tier = self._passes_through(flat, group)
        if tier is None:
            rest = self._rest(flat, group)
            assert rest is not None
            return rest.view(dtype), None
        loan = _Loan(self._rings[tier].take(), self._rings[tier])
        return loan.buffer[: flat.layout.numel * dtype.itemsize].view(dtype), loan

    def _bring(self, key: ChunkKey, part: Tensor) -> Work:
        """A chunk at rest into its part of a buffer."""
        resident = self._store.resident(key)
        if resident is None or part.device.type == "cpu":
            return self._store.fetch(key, part.view(torch.uint8))
        queued = torch.cuda.current_stream(part.device).record_event()  # which may still sum up what the buffer held before
        return self._copies.upload(resident, part.view(torch.uint8), str(key), after=queued)

    def _bring_home(self, key: ChunkKey, part: Tensor) -> Work:
        resident = self._store.resident(key)
        if resident is None or part.device.type == "cpu":
            return self._store.write_back(key, part.view(torch.uint8))
        return self._copies.download(part.view(torch.uint8), resident, str(key))

    def close(self) -> None:
        """Let go of the buffers."""
        self._coming.clear()
        self._under_way.clear()
        for ring in self._rings.values():
            ring.close()


def _in_words(rule: Rule) -> str:
    return "updated with " + ", ".join(f"{name} {value}" for name, value in rule._asdict().items())
