"""Where a unit's parameters rest, and what bringing them to the compute device takes. Placements never change, so it is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.kinds import Group, Tier
from infinity.runtime.units import Unit
from infinity.sharding.layout import FlatLayout, Interval, UnitLayout
from infinity.sharding.share import Share
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import footprint
from infinity.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class RestingFlat:
    """The parameters of one flat buffer."""

    layout: FlatLayout
    kept: Interval
    """What rests here of the full flat buffer."""
    whole: Tensor | None
    """[len(kept)], where that rests as one tensor: it comes in one copy, or is used in place."""
    is_in_place: bool
    """The whole flat buffer rests on the compute device."""
    is_in_reach: bool
    """This rank's shard of it does, as one tensor: the ranks gather it from there."""
    chunks: Sequence[tuple[ChunkKey, Interval]]
    """Of what is kept, and where each lies in the full flat buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class RestingUnit:
    """All flat buffers of a unit."""

    layout: UnitLayout
    flats: Sequence[RestingFlat]
    visit_bytes: int
    """Of the buffers that a visit takes on the compute device: what is not used in place."""
    is_copied: bool
    """A flat buffer that is put together for each visit comes from HBM, all of it or some chunks."""
    is_in_memory: bool
    """Nothing of it rests on NVMe."""
    is_near: bool
    """Everything rests in HBM, or in pinned memory beside it: to start a visit is to queue copies."""

    @property
    def name(self) -> str:
        return self.layout.name


def resting_unit(unit: Unit, store: Store, device: torch.device, chunk_numel: int, share: Share) -> RestingUnit:
    """What the store, which has been built or reopened, holds of the unit."""
    flats = [_resting_flat(unit.layout.index, f, layout, store, device, chunk_numel, share) for f, layout in enumerate(unit.layout.flats)]
    away = [flat.layout for flat in flats if not flat.is_in_place]
    tiers = [store.tier(key) for flat in flats if not flat.is_in_place for key, _ in flat.chunks]
    return RestingUnit(
        layout=unit.layout,
        flats=flats,
        visit_bytes=sum(footprint(layout.nbytes, device) for layout in away),
        is_copied=Tier.HBM in tiers,
        is_in_memory=Tier.NVME not in tiers,
        is_near=device.type == "cuda" and Tier.NVME not in tiers,
    )


def _resting_flat(index: int, f: int, layout: FlatLayout, store: Store, device: torch.device, chunk_numel: int, share: Share) -> RestingFlat:
    whole = store.whole(index, f, Group.PARAM)
    is_here, is_sharded = whole is not None and whole.device == device, share.is_sharded(Group.PARAM)
    chunks = [(ChunkKey(unit=index, flat=f, group=Group.PARAM, chunk=c), run) for c, run in share.chunks(layout, Group.PARAM, chunk_numel)]
    return RestingFlat(
        layout=layout,
        kept=share.run(layout, Group.PARAM),
        whole=None if whole is None else whole.view(layout.dtype),
        is_in_place=is_here and not is_sharded,
        is_in_reach=is_here and is_sharded,
        chunks=chunks,
    )
