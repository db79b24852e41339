"""Copies of what lives in memory, in files: written at a publish, read when a run is reopened."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity import native
from infinity.errors import StorageError
from infinity.kinds import Group, Tier
from infinity.sizes import MiB
from infinity.storage.chunks import ChunkKey, ChunkSpec
from infinity.storage.manifest import ChunkEntry, FileEntry, Manifest, PathEntry
from infinity.storage.nvme import NvmeTier, Slot
from infinity.storage.rundir import PathMark
from infinity.storage.slabs import slab_bytes
from infinity.storage.tiers import MemoryTier, Pools
from infinity.storage.work import Window, Work

_UNDER_WAY = 8
"""Chunks in CPU memory on their way at one time: enough to keep the drive's queue full."""

_PIECES = 4
_PIECE_BYTES = 16 * MiB


def staging_bytes(largest: int) -> int:
    """CPU memory that publishing takes where the largest chunk in HBM has `largest` bytes."""
    return _PIECES * slab_bytes(min(_PIECE_BYTES, largest))


def save_resident(
    specs: Iterable[ChunkSpec], memory: Mapping[Tier, MemoryTier], nvme: NvmeTier, pools: Pools, crcs: MutableMapping[ChunkKey, int]
) -> None:
    """Write chunks from CPU memory and HBM into their slots, and keep the checksum of each. Returns when all are written."""
    near, far = _by_distance(specs)
    window = Window(_UNDER_WAY)
    for spec in near:
        source = memory[spec.tier].padded(spec.key)
        crcs[spec.key] = native.crc32c(source[: spec.nbytes])
        window.add(nvme.write_back(spec.key, source))
    window.drain()
    crcs.update(dict.fromkeys((spec.key for spec in far), 0))
    window = Window(_PIECES - 1)
    for piece in _pieces(far, pools):
        memory[piece.spec.tier].copy_out(piece.spec.key, piece.start, piece.buffer).wait()
        crcs[piece.spec.key] = native.crc32c(piece.contents, crcs[piece.spec.key])
        window.add(nvme.write(piece.spec.key, piece.slot(nvme), piece.buffer))
    window.drain()


def load_resident(specs: Iterable[ChunkSpec], memory: Mapping[Tier, MemoryTier], nvme: NvmeTier, pools: Pools, crcs: Mapping[ChunkKey, int]) -> None:
    """Read chunks from their slots into CPU memory and HBM. Raises StorageError when a checksum does not match."""
    near, far = _by_distance(specs)
    arrivals = _Arrivals(memory, nvme, crcs)
    window = Window(_UNDER_WAY)
    for spec in near:
        target = memory[spec.tier].padded(spec.key)
        window.add(arrivals.expect(_Piece(spec, 0, target), nvme.fetch(spec.key, target)))
    window.drain()
    window = Window(_PIECES - 1)
    for piece in _pieces(far, pools):
        window.add(arrivals.expect(piece, nvme.read(piece.spec.key, piece.slot(nvme), piece.buffer)))
    window.drain()


def _by_distance(specs: Iterable[ChunkSpec]) -> tuple[list[ChunkSpec], list[ChunkSpec]]:
    """Chunks that a drive can reach, and those that pass through staging buffers: those in HBM."""
    specs = list(specs)
    near = [spec for spec in specs if spec.tier is Tier.CPU]
    return near, [spec for spec in specs if spec.tier is not Tier.CPU]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a chunk, from `start` on, and the memory that they pass through."""

    spec: ChunkSpec
    start: int
    buffer: torch.Tensor
    """uint8, whole sectors."""

    @property
    def contents(self) -> torch.Tensor:
        """Without the padding at the chunk's end."""
        return self.buffer[: self.spec.nbytes - self.start]

    @property
    def is_last(self) -> bool:
        return self.start + self.buffer.numel() == self.spec.padded_nbytes

    def slot(self, nvme: NvmeTier) -> Slot:
        whole = nvme.slot(self.spec.key)
        return replace(whole, offset=whole.offset + self.start, nbytes=self.buffer.numel())


def _pieces(specs: Sequence[ChunkSpec], pools: Pools) -> Iterator[_Piece]:
    """Chunk after chunk in pieces, each in the buffer of the piece _PIECES before it."""
    largest = min(_PIECE_BYTES, max((spec.padded_nbytes for spec in specs), default=0))
    buffers = [pools.pinned.take(largest) for _ in range(_PIECES if specs else 0)]
    for spec in specs:
        for start in range(0, spec.padded_nbytes, _PIECE_BYTES):
            buffers.append(buffers.pop(0))
            yield _Piece(spec, start, buffers[-1][: spec.padded_nbytes - start])


class _Arrivals:
    """Reads whose bytes are checked when they are waited for, in order, and sent on to HBM if they belong there."""

    def __init__(self, memory: Mapping[Tier, MemoryTier], nvme: NvmeTier, crcs: Mapping[ChunkKey, int]) -> None:
        self._memory = memory
        self._nvme = nvme
        self._wanted = crcs
        self._found: dict[ChunkKey, int] = {}

    def expect(self, piece: _Piece, read: Work) -> Work:
        return _Arrival(self, piece, read)

    def settle(self, piece: _Piece) -> None:
        """The piece is in its buffer."""
        spec = piece.spec
        crc = self._found[spec.key] = native.crc32c(piece.contents, self._found.get(spec.key, 0))
        if piece.is_last and self._wanted.get(spec.key, crc) != crc:
            slot = self._nvme.slot(spec.key)
            hint = f"The checksum of chunk {spec.key} does not match the manifest: the file was changed or damaged. Load a checkpoint"
            raise StorageError(errno.EIO, str(slot.file.path), slot.offset, spec.nbytes, hint)
        if spec.tier is not Tier.CPU:
            self._memory[spec.tier].copy_in(spec.key, piece.start, piece.buffer).wait()


class _Arrival(Work):
    """One read of `_Arrivals`. Waited for once."""

    def __init__(self, arrivals: _Arrivals, piece: _Piece, read: Work) -> None:
        self._arrivals = arrivals
        self._piece = piece
        self._read = read

    def wait(self, timeout_s: float | None = None) -> None:
        self._read.wait(timeout_s)
        self._arrivals.settle(self._piece)

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
