"""The pieces that the optimizer works on: one chunk of a trainable shard, its parameters, and the rule for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from infinity.kinds import Group
from infinity.native import AdamSegment
from infinity.sharding.layout import FlatLayout, Interval, UnitLayout
from infinity.sharding.share import ALONE, Share
from infinity.storage.chunks import ChunkKey

FlatKey = tuple[int, int]
"""(unit index, flat index): one flat buffer of the model."""


class Address(NamedTuple):
    """Where a parameter lives: slot `slot` of flat `flat` of unit `unit`."""

    name: str
    unit: int
    flat: int
    slot: int

    @property
    def flat_key(self) -> FlatKey:
        return self.unit, self.flat


class Rule(NamedTuple):
    """The numbers of one parameter's next AdamW update, in torch.optim.AdamW's names; `step` is 1 at the first update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


Rules = Mapping[FlatKey, Mapping[int, Rule]]
"""Per flat and slot index, the rule of each parameter that is updated in this step. A slot without a rule is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of a flat buffer that is read, updated and written in one go."""

    unit: int
    flat: int
    index: int
    interval: Interval
    """Where it lies in the full flat buffer."""
    shard: int
    """In which rank's part of it."""
    dtype: torch.dtype
    """Of the parameter, and of a gradient when it arrives."""
    grad_dtype: torch.dtype
    """Of a gradient at rest: `dtype`, or fp32 where micro-steps are added up."""
    pieces: tuple[tuple[int, Interval], ...] = field(compare=False)
    """(slot index, where it lies in this chunk) for each parameter that meets it. They follow from the interval: to compare them takes long."""

    def __hash__(self) -> int:
        return hash((self.unit, self.flat, self.index))  # each gradient that arrives asks for it

    @property
    def numel(self) -> int:
        return len(self.interval)

    @property
    def flat_key(self) -> FlatKey:
        return self.unit, self.flat

    def key(self, group: Group) -> ChunkKey:
        return ChunkKey(self.unit, self.flat, group, self.index)

    def of(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """This chunk's elements of a run of the flat buffer that begins at its element `start`."""
        return run[self.interval.start - start : self.interval.stop - start]

    def meets(self, slots: frozenset[int]) -> bool:
        """Whether a parameter of `slots` has elements here."""
        return any(slot in slots for slot, _ in self.pieces)


def trainable_chunks(
    units: Sequence[UnitLayout],
    chunk_numel: int,
    *,
    grad_dtype: torch.dtype | None = None,
    share: Share = ALONE,
    group: Group = Group.OPTIMIZER,
) -> tuple[Chunk, ...]:
    """Every chunk of which `share` keeps the states of `group`, in forward order: unit by unit, flat by flat.

    Gradients rest in `grad_dtype`, fp32 where micro-steps are added up; None is the flat's own dtype.
    """
    return tuple(
        _chunk(unit.index, flat_index, flat, index, interval, grad_dtype or flat.dtype)
        for unit in units
        for flat_index, flat in enumerate(unit.flats)
        if flat.trainable
        for index, interval in share.chunks(flat, group, chunk_numel)
    )


def _chunk(unit: int, flat_index: int, flat: FlatLayout, index: int, interval: Interval, grad_dtype: torch.dtype) -> Chunk:
    pieces = tuple(flat.pieces(interval))
    return Chunk(
        unit=unit,
        flat=flat_index,
        index=index,
        interval=interval,
        shard=interval.start // flat.shard_numel,
        dtype=flat.dtype,
        grad_dtype=grad_dtype,
        pieces=pieces,
    )


def segments(chunk: Chunk, rules: Mapping[int, Rule]) -> list[AdamSegment]:
    """The runs of `chunk` that have a rule, in order. Neighbours of equal rule become one run, across the padding between them.

    Padding is zero in the states and in the gradient, and AdamW maps zeros to zeros as long as eps > 0, so it stays zero.
    """
    runs: list[AdamSegment] = []
    start = stop = 0
    last: Rule | None = None
    for slot, interval in chunk.pieces:
        rule = rules.get(slot)
        if rule is not None and rule == last and rule.eps > 0:
            stop = interval.stop
            continue
        if last is not None:
            runs.append(AdamSegment(start, stop, *last))
        start, stop, last = interval.start, interval.stop, rule
    if last is not None:
        runs.append(AdamSegment(start, stop, *last))
    return runs
