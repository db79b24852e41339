"""Copies of what lives in memory, in files: written at a publish, read when a run is reopened."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity import native
from infinity.errors import StorageError
from infinity.kinds import Group, Tier
from infinity.storage.chunks import ChunkKey, ChunkSpec
from infinity.storage.manifest import ChunkEntry, FileEntry, Manifest, PathEntry
from infinity.storage.nvme import NvmeTier
from infinity.storage.rundir import PathMark
from infinity.storage.tiers import MemoryTier, Pools
from infinity.storage.work import Window, Work

_UNDER_WAY = 8
"""Chunks on their way at one time: enough to keep the drive's queue full."""


def save_resident(
    specs: Iterable[ChunkSpec], memory: Mapping[Tier, MemoryTier], nvme: NvmeTier, pools: Pools, crcs: MutableMapping[ChunkKey, int]
) -> None:
    """Write chunks from CPU memory and HBM into their slots, and keep the checksum of each. Returns when all are written."""
    window = Window(_UNDER_WAY)
    for spec in specs:
        source = memory[spec.tier].padded(spec.key)
        if source.device.type != "cpu":
            staged = pools.pinned.take(spec.padded_nbytes)
            memory[spec.tier].fetch(spec.key, staged).wait()
            source = staged
        crcs[spec.key] = native.crc32c(source[: spec.nbytes])
        window.add(nvme.write_back(spec.key, source))
    window.drain()


def load_resident(specs: Iterable[ChunkSpec], memory: Mapping[Tier, MemoryTier], nvme: NvmeTier, pools: Pools, crcs: Mapping[ChunkKey, int]) -> None:
    """Read chunks from their slots into CPU memory and HBM. Raises StorageError when a checksum does not match."""
    window = Window(_UNDER_WAY)
    for spec in specs:
        target = memory[spec.tier].padded(spec.key)
        staged = target if target.device.type == "cpu" else pools.pinned.take(spec.padded_nbytes)
        window.add(_Landing(spec, nvme.fetch(spec.key, staged), staged, memory[spec.tier], nvme, crcs))
    window.drain()


class _Landing(Work):
    """A read whose bytes are checked, and sent on to HBM if they belong there, when it is waited for."""

    def __init__(self, spec: ChunkSpec, read: Work, staged: torch.Tensor, memory: MemoryTier, nvme: NvmeTier, crcs: Mapping[ChunkKey, int]) -> None:
        self._spec = spec
        self._read = read
        self._staged = staged
        self._memory = memory
        self._slot = nvme.slot(spec.key)
        self._crc = crcs.get(spec.key)

    def wait(self, timeout_s: float | None = None) -> None:
        self._read.wait(timeout_s)
        if self._crc is not None and native.crc32c(self._staged[: self._spec.nbytes]) != self._crc:
            hint = f"The checksum of chunk {self._spec.key} does not match the manifest: the file was changed or damaged. Load a checkpoint"
            raise StorageError(errno.EIO, str(self._slot.file.path), self._slot.offset, self._spec.nbytes, hint)
        if self._staged.device != self._memory.device:
            self._memory.write_back(self._spec.key, self._staged).wait()

    def is_completed(self) -> bool:
        return self._read.is_completed()


def make_manifest(
    *,
    run: str,
    rank: int,
    serial: int,
    step: int,
    extra: Mapping[str, Any],
    fingerprint: str,
    identity: Mapping[str, str],
    units: Sequence[str],
    marks: Mapping[Path, PathMark],
    nvme: NvmeTier,
    specs: Mapping[ChunkKey, ChunkSpec],
    crcs: Mapping[ChunkKey, int],
) -> Manifest:
    """A clean manifest of everything that has a slot, except gradients."""
    slots = [(key, slot) for key, slot in nvme.slots() if key.group is not Group.GRAD]
    files = {file: index for index, file in enumerate(dict.fromkeys(slot.file for _, slot in slots))}
    directories = {directory: index for index, directory in enumerate(marks)}
    return Manifest(
        run=run,
        rank=rank,
        serial=serial,
        generation=0,
        step=step,
        is_clean=True,
        fingerprint=fingerprint,
        identity=identity,
        units=units,
        paths=[PathEntry(id=mark.id, directory=str(directory)) for directory, mark in marks.items()],
        files=[FileEntry(name=file.path.name, path=directories[file.path.parent], nbytes=file.nbytes) for file in files],
        chunks=[
            ChunkEntry(key=key, file=files[slot.file], offset=slot.offset, nbytes=specs[key].nbytes, crc32c=crcs.get(key)) for key, slot in slots
        ],
        extra=extra,
    )
