"""Chunks in shard files on one or several paths."""

from __future__ import annotations

import errno
import logging
import resource
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group, Lane
from infinity.native import Aio, Backend
from infinity.sizes import SECTOR_BYTES, MiB
from infinity.storage.chunks import ChunkKey, ChunkSpec, as_bytes
from infinity.storage.deal import FileDraft, Share, deal
from infinity.storage.probe import Rates, facts, rates
from infinity.storage.rundir import shard_name
from infinity.storage.shardfile import ShardFile, lay_out
from infinity.storage.work import AioWork, Work
from infinity.timeline import Timeline

SPARE_DESCRIPTORS = 128
"""What the rest of the process may open beside shard files."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmePath:
    """One directory to keep shard files below."""

    path: Path
    weight: float | None = None
    """Its share of the bytes relative to the other paths; None measures its rate."""
    max_bytes: int | None = None
    rates: Rates | None = None
    """As somebody measured them before; None measures them when they are asked for."""

    def known_rates(self) -> Rates:
        """May take some tenths of a second the first time. Raises StorageError when there is no room to measure."""
        return self.rates or rates(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class AioOptions:
    """How the native I/O engine works on each path."""

    block_bytes: int = MiB
    queue_depth: int = 32
    readers: int = 1
    writers: int = 1
    deadline_s: float = 120.0
    backend: Backend = "auto"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a chunk's bytes are: one aligned run of one file."""

    file: ShardFile
    directory: Path
    offset: int
    nbytes: int
    """With padding: what one request moves."""


class NvmeTier:
    """Files of one rank of one run. Requests go straight between aligned buffers and the drive."""

    def __init__(self, paths: Sequence[NvmePath], directories: Sequence[Path], aio: AioOptions, timeline: Timeline, *, rank: int, run: str) -> None:
        """`directories` are the run's directories below `paths`, existing and locked by the caller."""
        weighted = sum(path.weight is not None for path in paths)
        if weighted not in (0, len(paths)):
            raise ConfigError("nvme.paths: give every path a weight, or none so that their rates are measured")
        self._paths = tuple(paths)
        self.directories = tuple(directories)
        self._options = aio
        self._timeline = timeline
        self._rank = rank
        self._run = run
        self._aios: dict[Path, Aio] = {}
        self._slots: dict[ChunkKey, Slot] = {}
        self._files: dict[Path, ShardFile] = {}
        self._under_way: deque[AioWork] = deque()
        self._lock = threading.Lock()

    def allocate(self, specs: Iterable[ChunkSpec], *, generation: int = 0, label: str = "") -> None:
        """Deal chunks to the paths, check the space, then create and preallocate their files.

        Raises StorageError (ENOSPC) before anything is created, or after removing what this call created.
        """
        specs = sorted(specs, key=lambda spec: spec.key)
        if not specs:
            return
        groups = {spec.key.group for spec in specs}
        drafts = deal(specs, self._shares(), {group: self._metadata(group, generation) for group in groups})
        self._check_descriptors(len(drafts))
        created: list[tuple[ShardFile, FileDraft, tuple[int, ...]]] = []
        try:
            for draft in drafts:
                created.append(self._create(draft, generation, label))
        except BaseException:
            for file, _, _ in created:
                self._remove(file)
            raise
        for file, draft, offsets in created:
            for spec, offset in zip(draft.specs, offsets, strict=True):
                self._slots[spec.key] = Slot(file, file.path.parent, offset, spec.padded_nbytes)

    def adopt(self, path: Path, nbytes: int, chunks: Iterable[tuple[ChunkSpec, int]]) -> None:
        """Open an existing file whose chunks start at the given offsets. Raises StorageError when it is not what it was."""
        self._check_descriptors(1)
        file = self._files[path] = ShardFile.open(path, nbytes)
        for spec, offset in chunks:
            self._slots[spec.key] = Slot(file, path.parent, offset, spec.padded_nbytes)

    def holds(self, key: ChunkKey) -> bool:
        return key in self._slots

    def slot(self, key: ChunkKey) -> Slot:
        return self._slots[key]

    def slots(self) -> Iterator[tuple[ChunkKey, Slot]]:
        return iter(sorted(self._slots.items()))

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        return None

    def fetch(self, key: ChunkKey, into: torch.Tensor) -> Work:
        """`into`: CPU, contiguous, on a 4096-byte boundary, at least the padded chunk; its padding bytes are overwritten too."""
        return self.read(key, self._slots[key], into)

    def read(self, key: ChunkKey, slot: Slot, into: torch.Tensor) -> Work:
        """As `fetch`, from a place where the chunk was before, or from a part of its place."""
        return self._start(Lane.NVME_READ, key, slot, into)

    def write_back(self, key: ChunkKey, source: torch.Tensor) -> Work:
        """`source`: as `into` of `fetch`; unchanged until the work is over."""
        return self.write(key, self._slots[key], source)

    def write(self, key: ChunkKey, slot: Slot, source: torch.Tensor) -> Work:
        """As `write_back`, to a part of the chunk's place."""
        slot.file.is_written = True
        return self._start(Lane.NVME_WRITE, key, slot, source)

    def sync(self) -> None:
        """Everything written by finished works is on the devices when this returns, gradients apart. Raises StorageError."""
        scratch = {slot.file for key, slot in self._slots.items() if key.group is Group.GRAD}
        written = [file for file in self._files.values() if file.is_written and file not in scratch]
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(ShardFile.sync, written))

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Forget chunks, and remove the files that held nothing else."""
        dropped = {self._slots.pop(key).file for key in keys if key in self._slots}
        self._remove_unused(dropped)

    def remove_unused(self) -> None:
        """Remove files that hold no chunk any more. Only after a publish: before it the manifest on disk may name them."""
        self._remove_unused(set(self._files.values()))

    def _remove_unused(self, files: set[ShardFile]) -> None:
        for file in files - {slot.file for slot in self._slots.values()}:
            self._remove(file)

    def quiesce(self) -> None:
        """No request is under way when this returns, except what missed its deadline."""
        with self._lock:
            works, self._under_way = self._under_way, deque()
        for work in works:
            work.abandon()

    def close(self) -> None:
        """Wait for requests under way, stop the I/O threads, close the files. Failures were raised by the works themselves."""
        self.quiesce()
        for aio in self._aios.values():
            aio.close()
        for file in self._files.values():
            file.close()
        self._aios.clear()
        self._files.clear()
        self._slots.clear()

    def _start(self, lane: Lane, key: ChunkKey, slot: Slot, buffer: torch.Tensor) -> Work:
        data = as_bytes(buffer)
        if data.device.type != "cpu" or data.numel() < slot.nbytes or data.data_ptr() % SECTOR_BYTES:
            got = f"{data.numel()} bytes at {data.data_ptr():#x}, {data.device}"
            raise ValueError(f"chunk {key} moves {slot.nbytes} bytes to or from CPU memory on a 4096-byte boundary, got {got}")
        aio = self._aio(slot.directory)
        move = aio.read if lane is Lane.NVME_READ else aio.write
        request = move(slot.file.fd, slot.offset, data.data_ptr(), slot.nbytes, buffer)
        work = AioWork(request, lane, str(key), str(slot.file.path), slot.offset, slot.nbytes, self._timeline)
        with self._lock:  # oldest first: also the works that their callers dropped give their buffers back, and leave their spans
            while self._under_way and self._under_way[0].is_completed():
                self._under_way.popleft()
            self._under_way.append(work)
        return work

    def _aio(self, directory: Path) -> Aio:
        with self._lock:
            if directory not in self._aios:
                options = self._options
                aio = Aio(
                    block_bytes=options.block_bytes,
                    queue_depth=options.queue_depth,
                    readers=options.readers,
                    writers=options.writers,
                    deadline_s=options.deadline_s,
                    backend=options.backend,
                )
                self._aios[directory] = aio
            return self._aios[directory]

    def _shares(self) -> list[Share]:
        """Each path's part of the bytes, and the room left on it."""
        if not self._paths:
            raise ConfigError('nvme.paths is empty, but states are to live in files. Name a directory: nvme.paths = ["/mnt/nvme0"]')
        shares = []
        for path, directory in zip(self._paths, self.directories, strict=True):
            held = sum(file.nbytes for place, file in self._files.items() if place.parent == directory)
            left = None if path.max_bytes is None else max(0, path.max_bytes - held)
            shares.append(Share(directory=directory, weight=self._weight(path), free_bytes=facts(directory).free_bytes, max_bytes=left))
        return shares

    def _weight(self, path: NvmePath) -> float:
        if len(self._paths) == 1:
            return 1.0
        return path.known_rates().weight if path.weight is None else path.weight

    def _metadata(self, group: Group, generation: int) -> Mapping[str, str]:
        who = {"run": self._run, "rank": str(self._rank), "group": str(group), "generation": str(generation)}
        return {"format": "infinity-shard", "version": "1", **who}

    def _create(self, draft: FileDraft, generation: int, label: str) -> tuple[ShardFile, FileDraft, tuple[int, ...]]:
        layout = lay_out(draft.specs, draft.metadata)
        file = ShardFile.create(self._new_name(draft, generation, label), layout)
        self._files[file.path] = file
        return file, draft, layout.offsets

    def _new_name(self, draft: FileDraft, generation: int, label: str) -> Path:
        """A run that changed its paths may need a second file of one kind in a directory."""
        directory, count = self.directories[draft.path], 1
        while True:
            numbered = label if count == 1 else f"{label}{count}"
            path = directory / shard_name(draft.unit, draft.group, self._rank, generation, numbered)
            if path not in self._files:
                return path
            count += 1

    def _remove(self, file: ShardFile) -> None:
        file.close()
        file.path.unlink(missing_ok=True)
        del self._files[file.path]

    def _check_descriptors(self, count: int) -> None:
        """Each file stays open. Raise the soft limit as far as the system lets us, or say what is missing."""
        needed = len(self._files) + count + SPARE_DESCRIPTORS
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or needed <= soft:
            return
        if hard != resource.RLIM_INFINITY and needed > hard:
            hint = f"The store needs {needed} open files, the limit is {hard} (ulimit -n). Raise it, or use larger units"
            raise StorageError(errno.EMFILE, str(self.directories[0]), hint=hint)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        _logger.info("raised the limit of open files from %d to %d", soft, needed)
