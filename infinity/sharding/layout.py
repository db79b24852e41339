"""Who owns which elements: units, flat buffers, shards and chunks, as intervals. Pure values, no storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.sizes import SECTOR_BYTES, align_up

SLOT_ALIGN_BYTES = 256
"""Each parameter of a flat buffer starts on this boundary: what CUDA kernels expect of a fresh allocation."""

CHUNK_GRANULE = 2048
"""Chunks are multiples of this many elements, so that 2-byte and 4-byte chunks are whole sectors."""


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """A run of elements: [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Interval) -> Interval:
        """What both cover; empty when they do not meet."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shifted(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter's place in a flat buffer, in elements of the flat's dtype. A complex parameter counts its real pairs."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    is_complex: bool = False

    @property
    def interval(self) -> Interval:
        return Interval(self.start, self.start + self.numel)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter as a view of its full flat buffer."""
        run = flat[self.start : self.start + self.numel]
        return torch.view_as_complex(run.view(*self.shape, 2)) if self.is_complex else run.view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """A unit's parameters of one (dtype, trainable), end to end, split evenly over `world_size` ranks."""

    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    numel: int
    """Elements with padding: a multiple of `world_size` times the chunk granule."""
    world_size: int = 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    def shard(self, rank: int) -> Interval:
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def chunks(self, chunk_numel: int) -> tuple[Interval, ...]:
        """Every shard cut into pieces of at most `chunk_numel` elements, shard after shard."""
        step = self.chunk_step(chunk_numel)
        shards = [self.shard(rank) for rank in range(self.world_size)]
        return tuple(Interval(start, min(start + step, shard.stop)) for shard in shards for start in range(shard.start, shard.stop, step))

    def chunk_step(self, chunk_numel: int) -> int:
        """Elements of every chunk but the last of a shard, which may be smaller."""
        granule = max(CHUNK_GRANULE, SECTOR_BYTES // self.dtype.itemsize)
        return max(granule, chunk_numel // granule * granule)

    def pieces(self, interval: Interval) -> Iterator[tuple[int, Interval]]:
        """(slot index, where that slot lies inside `interval`, relative to its start) for each slot that meets it."""
        for index, slot in enumerate(self.slots):
            common = slot.interval.overlap(interval)
            if len(common):
                yield index, common.shifted(-interval.start)

    def gaps(self, present: Iterable[int]) -> Iterator[Interval]:
        """The runs of the full flat buffer that no slot in `present` covers: padding, and parameters left out."""
        at = 0
        for index in sorted(present):
            slot = self.slots[index]
            if slot.start > at:
                yield Interval(at, slot.start)
            at = slot.interval.stop
        if at < self.numel:
            yield Interval(at, self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The flat buffers of one unit: what is gathered, used and released together."""

    index: int
    name: str
    flats: tuple[FlatLayout, ...]

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def flat_name(self, flat: int) -> str:
        """What ranks compare: flat buffers of one unit may be equally large."""
        return f"{self.name}, flat {flat}" if flat else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """What layout needs to know of a parameter: its name, shape, dtype in the engine, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


def layout_unit(index: int, name: str, params: Sequence[ParamSpec], world_size: int = 1) -> UnitLayout:
    """Put a unit's parameters into flat buffers, one per (dtype, trainable), in order of first appearance."""
    kinds: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.trainable), []).append(param)
    flats = tuple(_layout_flat(dtype, trainable, group, world_size) for (dtype, trainable), group in kinds.items())
    return UnitLayout(index=index, name=name, flats=flats)


def _layout_flat(dtype: torch.dtype, trainable: bool, params: Sequence[ParamSpec], world_size: int) -> FlatLayout:
    real = dtype.to_real() if dtype.is_complex else dtype
    align = max(1, SLOT_ALIGN_BYTES // real.itemsize)
    slots, at = [], 0
    for param in params:
        numel = torch.Size(param.shape).numel() * (2 if dtype.is_complex else 1)
        slots.append(Slot(name=param.name, shape=param.shape, start=at, numel=numel, is_complex=dtype.is_complex))
        at = align_up(at + numel, align)
    granule = max(CHUNK_GRANULE, SECTOR_BYTES // real.itemsize)
    return FlatLayout(
        dtype=real,
        trainable=trainable,
        slots=tuple(slots),
        numel=max(align_up(at, granule * world_size), granule * world_size),
        world_size=world_size,
    )
