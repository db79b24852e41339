"""Chunks with known bytes, and how to put them into a store and take them out again."""

from __future__ import annotations

import zlib

import torch

from infinity.kinds import Group, Tier
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part
from infinity.storage.store import Store
from infinity.storage.tiers import Pools

UNITS = ("h.0", "h.1", "h.2")


def make_spec(unit: int, chunk: int, numel: int, tier: Tier, group: Group = Group.OPTIMIZER) -> ChunkSpec:
    """An optimizer chunk is three fp32 parts, a param or grad chunk one bf16 part."""
    if group is Group.OPTIMIZER:
        names, dtype = ("master", "exp_avg", "exp_avg_sq"), torch.float32
    else:
        names, dtype = (str(group),), torch.bfloat16
    parts = tuple(Part(f"h.{unit}|f0|c{chunk}|{name}", dtype, numel) for name in names)
    return ChunkSpec(ChunkKey(unit, 0, group, chunk), sum(part.nbytes for part in parts), tier, parts)


def pattern(spec: ChunkSpec, seed: int = 0) -> torch.Tensor:
    """uint8 [nbytes] that differs between chunks and seeds."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.key}|{seed}".encode()))
    return torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)


def fill(store: Store, specs: list[ChunkSpec], pools: Pools, seed: int = 0) -> None:
    """Write every chunk's pattern."""
    for spec in specs:
        buffer = pools.plain.take(spec.padded_nbytes)
        buffer[: spec.nbytes] = pattern(spec, seed)
        store.write_back(spec.key, buffer).wait()


def contents(store: Store, spec: ChunkSpec, pools: Pools) -> torch.Tensor:
    """uint8 [nbytes], fetched."""
    buffer = pools.plain.take(spec.padded_nbytes)
    store.fetch(spec.key, buffer).wait()
    return buffer[: spec.nbytes].clone()
