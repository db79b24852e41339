"""What a tier does for the store, and the tiers in memory. The tier on NVMe is in nvme.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from infinity.errors import CapacityError
from infinity.kinds import Group, Tier
from infinity.sizes import format_bytes
from infinity.storage.chunks import ChunkKey, ChunkSpec, FlatGroup, as_bytes, flat_group_of
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.work import COMPLETED, Work


class ChunkTier(Protocol):
    """A place where chunks live."""

    def allocate(self, specs: Iterable[ChunkSpec]) -> None:
        """Make room for chunks that are not here yet; their contents are undefined until written."""

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        """uint8 [nbytes], the bytes themselves; None where they have to be fetched."""

    def fetch(self, key: ChunkKey, into: torch.Tensor) -> Work:
        """Start copying the chunk into the head of `into`."""

    def write_back(self, key: ChunkKey, source: torch.Tensor) -> Work:
        """Start copying the head of `source` into the chunk; `source` stays as it is until the work is over."""

    def close(self) -> None:
        """Wait for what is under way, then let go of everything."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Host memory for chunks: pinned where copies to the device start or end, plain for what only the CPU touches."""

    pinned: SlabPool
    plain: SlabPool

    def of(self, group: Group) -> SlabPool:
        """Optimizer states never meet the device, so pinning them would only cost."""
        return self.plain if group is Group.OPTIMIZER else self.pinned


class MemoryTier:
    """Chunks in CPU memory or in HBM.

    Copies inside one memory are over when the call returns on the CPU, and ordered on the current stream in HBM; between the
    two they are uploads and downloads.
    """

    def __init__(self, tier: Tier, pools: Pools, copies: Copies) -> None:
        assert tier is not Tier.NVME
        self.tier = tier
        self._pools = pools
        self._copies = copies
        self._chunks: dict[ChunkKey, torch.Tensor] = {}
        self._nbytes: dict[ChunkKey, int] = {}
        self._runs: dict[FlatGroup, tuple[torch.Tensor, int]] = {}

    @property
    def device(self) -> torch.device:
        return self._copies.device if self.tier is Tier.HBM else torch.device("cpu")

    def allocate(self, specs: Iterable[ChunkSpec]) -> None:
        """All chunks of a pool in one piece, those of one flat buffer end to end. Raises CapacityError when the memory is not there."""
        pieces: dict[SlabPool, list[list[ChunkSpec]]] = {}
        for (_, _, group), run in groupby(specs, key=lambda spec: flat_group_of(spec.key)):
            pieces.setdefault(self._pools.of(group), []).append(list(run))
        for pool, runs in pieces.items():
            memory = self._take(pool, sum(spec.padded_nbytes for chunks in runs for spec in chunks))
            for chunks in runs:
                memory = memory[self._settle(chunks, memory) :]

    def _settle(self, run: list[ChunkSpec], memory: torch.Tensor) -> int:
        """Put the chunks of one flat buffer at the head of `memory`. Returns the bytes they take there."""
        at = 0
        for spec in run:
            self._chunks[spec.key] = memory[at : at + spec.padded_nbytes]
            self._nbytes[spec.key] = spec.nbytes
            at += spec.padded_nbytes
        self._runs[flat_group_of(run[0].key)] = memory[: at - run[-1].padded_nbytes + run[-1].nbytes], len(run)
        return at

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        return self._chunks[key][: self._nbytes[key]]

    def whole(self, flat_group: FlatGroup, num_chunks: int) -> torch.Tensor | None:
        """uint8: all `num_chunks` chunks of a flat buffer as one tensor; None when some of them are elsewhere."""
        memory, count = self._runs.get(flat_group, (None, 0))
        return memory if count == num_chunks else None

    def padded(self, key: ChunkKey) -> torch.Tensor:
        """uint8 [padded_nbytes]: the chunk with the room that makes it whole sectors, for direct I/O."""
        return self._chunks[key]

    def fetch(self, key: ChunkKey, into: torch.Tensor) -> Work:
        nbytes = self._nbytes[key]
        return self._copy(self._chunks[key][:nbytes], as_bytes(into)[:nbytes], str(key))

    def write_back(self, key: ChunkKey, source: torch.Tensor) -> Work:
        nbytes = self._nbytes[key]
        return self._copy(as_bytes(source)[:nbytes], self._chunks[key][:nbytes], str(key))

    def copy_out(self, key: ChunkKey, start: int, into: torch.Tensor) -> Work:
        """Start copying the chunk's bytes from `start` on into `into`, as many as it holds."""
        return self._copy(self._chunks[key][start : start + into.numel()], into, str(key))

    def copy_in(self, key: ChunkKey, start: int, source: torch.Tensor) -> Work:
        """Start copying `source` into the chunk, at byte `start`; it stays as it is until the work is over."""
        return self._copy(source, self._chunks[key][start : start + source.numel()], str(key))

    def close(self) -> None:
        self._chunks.clear()
        self._nbytes.clear()
        self._runs.clear()

    def _take(self, pool: SlabPool, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return pool.take(nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"HBM has no {format_bytes(nbytes)} left for the states that rest there. Lower budgets.hbm: {error}") from error

    def _copy(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Work:
        if source.device == target.device:
            target.copy_(source)
            return COMPLETED
        move = self._copies.upload if source.device.type == "cpu" else self._copies.download
        return move(source, target, name)
