"""Which tier each chunk rests in: value per byte, HBM first, then CPU, and only what does not fit on NVMe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.kinds import OPTIMIZER_STATES, Group, Tier
from infinity.sharding.layout import FlatLayout, Interval, UnitLayout
from infinity.sharding.share import ALONE, Share
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part

STATE_BYTES = 4
"""Masters and moments are fp32."""

Placement = Mapping[ChunkKey, Tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the configuration says about memory. A limit of None is "auto"; a tier of None is "auto"."""

    hbm_limit: int | None
    cpu_limit: int | None
    activation_bytes: int | None = None
    """Of the HBM limit, what nothing rests in."""
    param: Tier | None = None
    grad: Tier | None = None
    optimizer: Tier | None = None
    chunk_numel: int
    """Elements of a chunk at most; fewer are taken where the cpu budget is small."""
    is_cut: bool = False
    """There are files with chunks of exactly this many elements."""
    prefetch_units: int | None
    """None is "auto"."""
    accumulates: bool
    """Gradients rest in fp32 and are added up over micro-steps."""

    def tier(self, group: Group) -> Tier | None:
        """Where the configuration pins a group."""
        return {Group.PARAM: self.param, Group.GRAD: self.grad, Group.OPTIMIZER: self.optimizer}[group]


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk before it has a place."""

    key: ChunkKey
    layout: UnitLayout
    flat: FlatLayout
    interval: Interval
    nbytes: int

    @property
    def numel(self) -> int:
        return len(self.interval)

    def head(self, numel: int) -> Piece:
        """The first chunk of at most `numel` elements, where this is a whole shard."""
        interval = Interval(self.interval.start, min(self.interval.start + self.flat.chunk_step(numel), self.interval.stop))
        return Piece(self.key, self.layout, self.flat, interval, self.nbytes // self.numel * len(interval))


def pieces(layouts: Sequence[UnitLayout], chunk_numel: int, accumulates: bool, share: Share = ALONE) -> list[Piece]:
    """Every chunk of the share, group by group in order of value: parameters are read twice a step, gradients come before 12 bytes of states."""
    return [piece for group in (Group.PARAM, Group.GRAD, Group.OPTIMIZER) for piece in _of_group(layouts, group, chunk_numel, accumulates, share)]


def _of_group(layouts: Sequence[UnitLayout], group: Group, chunk_numel: int, accumulates: bool, share: Share) -> Iterator[Piece]:
    for layout in layouts:
        for f, flat in enumerate(layout.flats):
            if group is Group.PARAM or flat.trainable:
                for c, interval in share.chunks(flat, group, chunk_numel):
                    key = ChunkKey(unit=layout.index, flat=f, group=group, chunk=c)
                    yield Piece(key, layout, flat, interval, len(interval) * element_bytes(flat, group, accumulates))


def element_bytes(flat: FlatLayout, group: Group, accumulates: bool) -> int:
    """What one element of a flat buffer takes at rest."""
    if group is Group.OPTIMIZER:
        return len(OPTIMIZER_STATES) * STATE_BYTES
    return grad_dtype(flat, accumulates).itemsize if group is Group.GRAD else flat.dtype.itemsize


def grad_dtype(flat: FlatLayout, accumulates: bool) -> torch.dtype:
    """The dtype in which gradients rest: their own, or fp32 where micro-steps are added up."""
    return torch.float32 if accumulates else flat.dtype


class Rooms:
    """Bytes left in the memory tiers, while chunks are given places."""

    def __init__(self, room: Mapping[Tier, int]) -> None:
        self._room = dict(room)

    def claim(self, tier: Tier, nbytes: int) -> bool:
        """Take `nbytes`, if they are there."""
        if tier is not Tier.NVME:
            if self._room[tier] < nbytes:
                return False
            self._room[tier] -= nbytes
        return True


def place(chunks: Sequence[Piece], wish: Wish, room: Mapping[Tier, int]) -> dict[ChunkKey, Tier]:
    """A tier for every chunk. What is pinned comes first and rests where it is pinned, whether that fits or not."""
    rooms = Rooms({tier: nbytes - _pinned_bytes(chunks, wish, tier) for tier, nbytes in room.items()})
    placed: dict[ChunkKey, Tier] = {}
    of_group = {group: [piece for piece in chunks if piece.key.group is group] for group in Group}
    _fill(placed, of_group[Group.PARAM], wish, (Tier.HBM, Tier.CPU), rooms)
    _fill_hbm(placed, of_group, wish, rooms)
    _fill(placed, of_group[Group.GRAD], wish, (Tier.CPU,), rooms)
    _fill(placed, of_group[Group.OPTIMIZER], wish, (Tier.CPU,), rooms)
    return placed


def _pinned_bytes(chunks: Sequence[Piece], wish: Wish, tier: Tier) -> int:
    return sum(piece.nbytes for piece in chunks if wish.tier(piece.key.group) is tier)


def _fill(placed: dict[ChunkKey, Tier], chunks: Sequence[Piece], wish: Wish, tiers: Sequence[Tier], rooms: Rooms) -> None:
    for piece in chunks:
        if piece.key not in placed:
            pinned = wish.tier(piece.key.group)
            placed[piece.key] = pinned or next((tier for tier in tiers if rooms.claim(tier, piece.nbytes)), Tier.NVME)


def _fill_hbm(placed: dict[ChunkKey, Tier], of_group: Mapping[Group, Sequence[Piece]], wish: Wish, rooms: Rooms) -> None:
    """Chunks whose states and gradients rest in HBM together: a gradient alone there would only have to come down at the step."""
    if not {wish.grad, wish.optimizer} <= {None, Tier.HBM}:
        return
    states_of = {(piece.key.unit, piece.key.flat, piece.key.chunk): piece for piece in of_group[Group.OPTIMIZER]}
    for grad in of_group[Group.GRAD]:
        states = states_of.get((grad.key.unit, grad.key.flat, grad.key.chunk))  # None where another rank keeps them
        both = [grad] if states is None else [grad, states]
        if rooms.claim(Tier.HBM, sum(piece.nbytes for piece in both if wish.tier(piece.key.group) is None)):
            placed.update((piece.key, Tier.HBM) for piece in both)


def specs_of(chunks: Sequence[Piece], placement: Placement, accumulates: bool) -> tuple[ChunkSpec, ...]:
    """The chunks as the store takes them."""
    return tuple(_spec(piece, placement[piece.key], accumulates) for piece in chunks)


def _spec(piece: Piece, tier: Tier, accumulates: bool) -> ChunkSpec:
    """The named tensors of one chunk, end to end."""
    key, numel, stem = piece.key, piece.numel, f"{piece.layout.name}|{piece.key.flat}|{piece.interval.start}"
    if key.group is Group.OPTIMIZER:
        parts = tuple(Part(name=f"{stem}|{state.value}", dtype=torch.float32, numel=numel) for state in OPTIMIZER_STATES)
    else:
        dtype = grad_dtype(piece.flat, accumulates) if key.group is Group.GRAD else piece.flat.dtype
        parts = (Part(name=f"{stem}|{key.group.value}", dtype=dtype, numel=numel),)
    return ChunkSpec(key=key, nbytes=piece.nbytes, tier=tier, parts=parts)
