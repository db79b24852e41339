"""Which chunk goes to which path, so that bytes follow bandwidth: no RAID needed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infinity.errors import StorageError
from infinity.kinds import Group
from infinity.sizes import format_bytes
from infinity.storage.chunks import ChunkSpec
from infinity.storage.shardfile import file_bytes, header_entry_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one path may get: its part of the bytes and its room, in bytes."""

    directory: Path
    weight: float
    """Any unit, the same for all paths; usually the measured rate."""
    free_bytes: int
    max_bytes: int | None = None

    @property
    def room(self) -> int:
        return self.free_bytes if self.max_bytes is None else min(self.free_bytes, self.max_bytes)


@dataclass(slots=True)
class FileDraft:
    """The chunks of one (path, unit, group), before their file exists."""

    path: int
    unit: int
    group: Group
    metadata: Mapping[str, str]
    specs: list[ChunkSpec] = field(default_factory=list)
    entry_bytes: int = 0
    data_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return file_bytes(self.entry_bytes, self.data_bytes, self.metadata) if self.specs else 0

    def growth(self, spec: ChunkSpec) -> int:
        """How many bytes the file grows by when it takes this chunk."""
        grown = file_bytes(self.entry_bytes + header_entry_bytes(spec), self.data_bytes + spec.padded_nbytes, self.metadata)
        return grown - self.nbytes

    def add(self, spec: ChunkSpec) -> None:
        self.specs.append(spec)
        self.entry_bytes += header_entry_bytes(spec)
        self.data_bytes += spec.padded_nbytes


def deal(specs: Iterable[ChunkSpec], shares: Sequence[Share], metadata: Mapping[Group, Mapping[str, str]]) -> list[FileDraft]:
    """Give each chunk to the path that is furthest behind its share and has room for it.

    So after every chunk each path holds its share to within one chunk, and one unit's chunks are spread over all paths.
    `metadata` is what the headers of a group's files say beside the unit. Raises StorageError (ENOSPC) naming every path's
    needed and free bytes.
    """
    specs = list(specs)
    drafts = _deal(specs, shares, metadata, [share.room for share in shares])
    if drafts is None or not _devices_fit(drafts, shares):
        wanted = _deal(specs, shares, metadata, [1 << 62] * len(shares))
        assert wanted is not None
        raise _no_space(_per_path(wanted, len(shares)), shares)
    return drafts


def _deal(
    specs: Sequence[ChunkSpec], shares: Sequence[Share], metadata: Mapping[Group, Mapping[str, str]], rooms: list[int]
) -> list[FileDraft] | None:
    """None when a chunk fits nowhere. `rooms` is used up."""
    total_weight = sum(share.weight for share in shares)
    drafts: dict[tuple[int, int, Group], FileDraft] = {}
    dealt = [0] * len(shares)
    for spec in specs:
        target = sum(dealt) + spec.padded_nbytes
        behind = sorted(range(len(shares)), key=lambda path: dealt[path] - target * shares[path].weight / total_weight)
        for path in behind:
            at = (path, spec.key.unit, spec.key.group)
            draft = drafts.get(at) or FileDraft(path, spec.key.unit, spec.key.group, metadata[spec.key.group])
            growth = draft.growth(spec)
            if growth <= rooms[path]:
                break
        else:
            return None
        draft.add(spec)
        drafts[at] = draft
        rooms[path] -= growth
        dealt[path] += spec.padded_nbytes
    return list(drafts.values())


def _devices_fit(drafts: Sequence[FileDraft], shares: Sequence[Share]) -> bool:
    """Two paths on one device share its free bytes."""
    needed: dict[int, int] = {}
    for draft in drafts:
        device = os.stat(shares[draft.path].directory).st_dev
        needed[device] = needed.get(device, 0) + draft.nbytes
    return all(needed.get(os.stat(share.directory).st_dev, 0) <= share.free_bytes for share in shares)


def _per_path(drafts: Iterable[FileDraft], count: int) -> list[int]:
    needed = [0] * count
    for draft in drafts:
        needed[draft.path] += draft.nbytes
    return needed


def _no_space(needed: Sequence[int], shares: Sequence[Share]) -> StorageError:
    lines = []
    for nbytes, share in zip(needed, shares, strict=True):
        limit = "" if share.max_bytes is None else f", {share.max_bytes} of its max_bytes left"
        needs, free = f"{nbytes} bytes ({format_bytes(nbytes)})", f"{share.free_bytes} are free ({format_bytes(share.free_bytes)})"
        lines.append(f"{share.directory} needs {needs}, {free}{limit}")
    hint = "; ".join(lines) + ". Add a path, raise max_bytes, or raise budgets.cpu so that less lives on NVMe"
    return StorageError(errno.ENOSPC, str(shares[0].directory), 0, sum(needed), hint)
