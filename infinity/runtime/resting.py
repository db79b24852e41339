"""Where a unit's parameters rest, and what bringing them to the compute device takes. Placements never change, so it is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.kinds import Group, Tier
from infinity.runtime.units import Unit
from infinity.sharding.layout import FlatLayout, Interval
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import footprint
from infinity.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class RestingFlat:
    """The parameters of one flat buffer."""

    layout: FlatLayout
    whole: Tensor | None
    """[numel], where they rest as one tensor: on the compute device they are used in place, from elsewhere they come in one copy."""
    chunks: Sequence[tuple[ChunkKey, Interval]]


@dataclass(frozen=True, slots=True, eq=False)
class RestingUnit:
    """All flat buffers of a unit."""

    name: str
    flats: Sequence[RestingFlat]
    visit_bytes: int
    """Of the buffers that a visit takes on the compute device: what is not used in place."""
    is_split: bool
    """A flat buffer that is put together for each visit has chunks at rest in HBM."""
    is_near: bool
    """Everything rests in HBM, or in pinned memory beside it: to start a visit is to queue copies."""


def resting_unit(unit: Unit, store: Store, device: torch.device, chunk_numel: int) -> RestingUnit:
    """What the store, which has been built or reopened, holds of the unit."""
    flats = [_resting_flat(unit.layout.index, f, layout, store, chunk_numel) for f, layout in enumerate(unit.layout.flats)]
    away = [flat.layout for flat in flats if flat.whole is None or flat.whole.device != device]
    cut = [store.tier(key) for flat in flats if flat.whole is None for key, _ in flat.chunks]
    return RestingUnit(
        name=unit.name,
        flats=flats,
        visit_bytes=sum(footprint(layout.nbytes, device) for layout in away),
        is_split=Tier.HBM in cut,
        is_near=device.type == "cuda" and Tier.NVME not in cut,
    )


def _resting_flat(index: int, f: int, layout: FlatLayout, store: Store, chunk_numel: int) -> RestingFlat:
    whole = store.whole(index, f, Group.PARAM)
    keys = [ChunkKey(unit=index, flat=f, group=Group.PARAM, chunk=c) for c in range(len(layout.chunks(chunk_numel)))]
    return RestingFlat(layout, None if whole is None else whole.view(layout.dtype), list(zip(keys, layout.chunks(chunk_numel), strict=True)))
