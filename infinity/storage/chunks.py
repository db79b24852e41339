"""What the store keeps, as values: chunks, and the named tensors end to end inside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.kinds import Group, Tier
from infinity.sizes import SECTOR_BYTES, align_up


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """Which chunk: the unit's index, the flat buffer inside the unit, the group of states, the chunk inside the flat buffer."""

    unit: int
    flat: int
    group: Group
    chunk: int

    def __str__(self) -> str:
        return f"u{self.unit}|f{self.flat}|{self.group}|c{self.chunk}"


@dataclass(frozen=True, slots=True)
class Part:
    """One named 1-D tensor inside a chunk, e.g. `h.0|f0|c3|master`. Names are unique in a store."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A chunk's bytes (the sum of its parts, end to end) and the tier where it lives."""

    key: ChunkKey
    nbytes: int
    tier: Tier
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        total = sum(part.nbytes for part in self.parts)
        if total != self.nbytes or not total:
            raise ValueError(f"chunk {self.key}: its parts hold {total} bytes, the chunk says {self.nbytes}")

    @property
    def padded_nbytes(self) -> int:
        """What one direct read or write of this chunk moves."""
        return align_up(self.nbytes, SECTOR_BYTES)


FlatGroup = tuple[int, int, Group]
"""One group of states of one flat buffer: (unit, flat, group)."""


def flat_group_of(key: ChunkKey) -> FlatGroup:
    """What the chunk is a piece of."""
    return key.unit, key.flat, key.group


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as uint8 [nbytes], the same memory."""
    assert tensor.is_contiguous(), "only contiguous tensors are moved"
    return tensor.view(-1).view(torch.uint8)
