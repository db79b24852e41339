"""The tiered store: chunks in HBM, CPU memory and shard files; published as a whole, found again by the next process."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group, Tier
from infinity.storage.chunks import ChunkKey, ChunkSpec, FlatGroup, Part, flat_group_of
from infinity.storage.copies import Copies
from infinity.storage.lock import RunLock
from infinity.storage.manifest import Manifest, manifest_name, sync_directory
from infinity.storage.nvme import AioOptions, NvmePath, NvmeTier
from infinity.storage.probe import HOME, check_path
from infinity.storage.publish import load_resident, make_manifest, save_resident
from infinity.storage.rundir import PathMark, find_manifest, run_directory, shard_files
from infinity.storage.tiers import ChunkTier, MemoryTier, Pools
from infinity.storage.work import Work
from infinity.timeline import Timeline

__all__ = ["AioOptions", "ChunkKey", "ChunkSpec", "NvmePath", "Part", "Pools", "Resumed", "Store"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What the last published step left for the layers above."""

    step: int
    extra: Mapping[str, Any]


class Store:
    """One rank's chunks of one run.

    A life: `reopen`, or `build` where that found nothing; fetches and write-backs; `publish` as often as one likes; `close`.
    Files are written in place: from the first write after a publish until the next one the run is *dirty*, and a process that
    dies then leaves states of two steps, which `reopen` refuses to mix.
    """

    def __init__(
        self,
        *,
        paths: Sequence[NvmePath],
        run: str,
        pools: Pools,
        copies: Copies,
        timeline: Timeline,
        aio: AioOptions | None = None,
        rank: int = 0,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """`identity`: what else must be equal to go on with a run (optimizer, precision, checksum of the initial weights), by name.

        Without `paths` everything lives in memory and nothing can be published. Raises ConfigError for paths that cannot work.
        """
        self._paths = tuple(paths)
        self._run = run
        self._rank = rank
        self._identity = dict(identity or {})
        self._pools = pools
        self._copies = copies
        self._directories = tuple(run_directory(path.path, run) for path in paths)
        self._nvme = NvmeTier(self._paths, self._directories, aio or AioOptions(), timeline, rank=rank, run=run)
        self._memory = {tier: MemoryTier(tier, pools, copies) for tier in (Tier.HBM, Tier.CPU)}
        self._locks: dict[Path, RunLock] = {}
        self._specs: dict[ChunkKey, ChunkSpec] = {}
        self._num_chunks: Counter[FlatGroup] = Counter()
        self._units: tuple[str, ...] = ()
        self._manifest: Manifest | None = None
        """The last published one, as it is on disk."""
        self._manifest_place: Path | None = None
        self._crcs: dict[ChunkKey, int] = {}
        self._writing: dict[ChunkKey, Work] = {}
        self._damage: StorageError | None = None
        """The first write that failed."""
        self._lock = threading.Lock()
        _check_paths(self._paths)

    def reopen(self, specs: Iterable[ChunkSpec], unit_names: Sequence[str]) -> Resumed | None:
        """Go on with this run's last published step; None when the run has never been published.

        Chunks may have moved since: each is read from where the manifest says, into wherever its spec wants it.
        Raises LockError, StorageError for files that are not what they were, ConfigError for a run that cannot be resumed.
        """
        self._acquire_locks()
        found = find_manifest(self._directories, self._rank)
        if found is None:
            return None
        self._manifest, self._manifest_place = found
        specs = list(specs)
        self._refuse_unless_resumable(self._manifest, specs)
        self._remember(specs, unit_names)
        self._open_published(self._manifest)
        self._remove_leftovers()
        self._allocate_memory()
        self._move_from_dropped_paths()
        load_resident(self._resident_specs(), self._memory, self._nvme, self._pools, self._crcs)
        self._allocate_scratch()
        return Resumed(step=self._manifest.step, extra=self._manifest.extra)

    def build(self, specs: Iterable[ChunkSpec], unit_names: Sequence[str]) -> None:
        """Make room for a new run's chunks; their contents are undefined until the first `write_back`.

        Free space is checked before anything is created. Raises ConfigError when the run has been published before.
        """
        self._acquire_locks()
        found = find_manifest(self._directories, self._rank)
        if found is not None:
            raise ConfigError(
                f"run {self._run!r} at {found[1]} already holds step {found[0].step} and is not overwritten. "
                'Go on with it (store.resume = "auto"), choose another store.run, or remove it with `infinity clean`'
            )
        self._remember(specs, unit_names)
        self._remove_leftovers()
        self._nvme.allocate(spec for spec in self._specs.values() if spec.tier is Tier.NVME)
        self._allocate_memory()

    def tier(self, key: ChunkKey) -> Tier:
        return self._specs[key].tier

    def holds(self, tier: Tier, group: Group) -> bool:
        """Whether any chunk of `group` lives on `tier`."""
        return any(spec.tier is tier and spec.key.group is group for spec in self._specs.values())

    def spec(self, key: ChunkKey) -> ChunkSpec:
        return self._specs[key]

    def path(self, key: ChunkKey) -> Path:
        """Where the file of a chunk on NVMe is: one of the paths, or the run's directory on a path that is no longer named."""
        directory = self._nvme.slot(key).directory
        return next((path.path for path, mine in zip(self._paths, self._directories, strict=True) if mine == directory), directory)

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        """uint8 [nbytes] in CPU memory or HBM, the bytes themselves; None when the chunk is on NVMe."""
        return self._tier_of(key).resident(key)

    def whole(self, unit: int, flat: int, group: Group) -> torch.Tensor | None:
        """uint8: all of a flat buffer's chunks end to end, the bytes themselves; None unless all of them live in CPU memory, or all in HBM."""
        num_chunks = self._num_chunks.get((unit, flat, group), 0)
        found = (memory.whole((unit, flat, group), num_chunks) for memory in self._memory.values())
        return next((memory for memory in found if memory is not None), None)

    def fetch(self, key: ChunkKey, into: torch.Tensor) -> Work:
        """Start reading the chunk into the head of `into`: for NVMe aligned CPU memory of at least the padded size.

        A write of the same chunk that is still under way is waited for first: the device may reorder them.
        """
        self._settle(key)
        return self._tier_of(key).fetch(key, into)

    def write_back(self, key: ChunkKey, source: torch.Tensor) -> Work:
        """Start writing the head of `source` into the chunk; `source` stays unchanged until the work is over.

        Failures of earlier writes that nobody waited for are raised here too.
        """
        if self._specs[key].tier is not Tier.NVME:
            return self._tier_of(key).write_back(key, source)
        self._settle(key)
        self._settle_completed()
        if key.group is not Group.GRAD:
            self._mark_dirty()
        work = self._nvme.write_back(key, source)
        with self._lock:
            self._crcs.pop(key, None)
            self._writing[key] = work
        return work

    def wait_for_writes(self) -> None:
        """Every write started so far is over. Raises the first failure, gradients' apart: nobody reads those again."""
        with self._lock:
            keys = list(self._writing)
        failure: Exception | None = None
        for key in keys:
            try:
                self._settle(key)
            except StorageError as error:
                failure = failure or (error if key.group is not Group.GRAD else None)
        if failure is not None:
            raise failure

    def publish(self, step: int, extra: Mapping[str, Any]) -> None:
        """Make the present contents the step that the next process resumes from; `extra` is JSON for the layers above.

        Waits for the writes, copies what lives in memory into files (made at the first publish, space checked), syncs the
        files written, then replaces the manifest. Nobody may write chunks meanwhile. Once a write has failed every publish raises
        its StorageError: what the chunk holds is not known.
        """
        if not self._paths:
            raise ConfigError("nvme.paths is empty: a run without a path cannot be published. Name a directory, or save a checkpoint")
        extra = json.loads(json.dumps(extra))
        self.wait_for_writes()
        if self._damage is not None:
            raise self._damage
        resident = self._resident_specs()
        self._nvme.allocate((spec for spec in resident if not self._nvme.holds(spec.key)), label="resident")
        if resident:
            self._mark_dirty()
        save_resident(resident, self._memory, self._nvme, self._pools, self._crcs)
        self._nvme.sync()
        self._commit(step, extra)

    def close(self) -> None:
        """Wait for the writes, free memory, close files, let the next job in. What was not published is lost.

        A run that was never published leaves no files.
        """
        self._nvme.quiesce()
        try:
            self._nvme.remove([key for key in self._specs if self._manifest is None or key.group is Group.GRAD])
        finally:
            self._nvme.close()
            for memory in self._memory.values():
                memory.close()
            for lock in self._locks.values():
                lock.close()
            self._locks.clear()

    def _remember(self, specs: Iterable[ChunkSpec], unit_names: Sequence[str]) -> None:
        self._specs = {spec.key: spec for spec in sorted(specs, key=lambda spec: spec.key)}
        self._num_chunks = Counter(flat_group_of(key) for key in self._specs)
        self._units = tuple(unit_names)

    def _acquire_locks(self) -> None:
        for directory in self._directories:
            directory.mkdir(parents=True, exist_ok=True)
            self._acquire_lock(directory)

    def _acquire_lock(self, directory: Path) -> None:
        if directory not in self._locks:
            self._locks[directory] = RunLock(directory, self._rank)

    def _refuse_unless_resumable(self, manifest: Manifest, specs: Sequence[ChunkSpec]) -> None:
        ways_out = 'Load a checkpoint, start another run (store.resume = "never" and a new store.run), or remove this one with `infinity clean`'
        if not manifest.is_clean:
            raise ConfigError(
                f"run {self._run!r} was stopped while its files were being overwritten (last published step: {manifest.step}): "
                f"they hold a mix of two steps and cannot be resumed. {ways_out}"
            )
        theirs, ours = manifest.identity, self._identity
        differ = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if differ:
            told = "; ".join(f"{name} was {theirs.get(name)!r}, is now {ours.get(name)!r}" for name in differ)
            raise ConfigError(f"run {self._run!r} (step {manifest.step}) does not match this model and configuration: {told}. {ways_out}")
        if manifest.fingerprint != fingerprint(specs):
            raise ConfigError(
                f"run {self._run!r} (step {manifest.step}) has another layout: parameters, shapes, units or the chunk size changed. {ways_out}"
            )

    def _open_published(self, manifest: Manifest) -> None:
        """Open the manifest's files where their paths are now: a path is known by its mark, not by its name."""
        marks = [(PathMark.load(directory, self._rank), directory) for directory in self._directories]
        known = {mark.id: directory for mark, directory in marks if mark is not None}
        if len(known) < sum(mark is not None for mark, _ in marks):
            raise ConfigError(f"nvme.paths: two of the paths hold copies of the same part of run {self._run!r}. Name only one of them")
        homes = [known.get(path.id, Path(path.directory)) for path in manifest.paths]
        chunks: dict[int, list[tuple[ChunkSpec, int]]] = {index: [] for index in range(len(manifest.files))}
        for chunk in manifest.chunks:
            chunks[chunk.file].append((self._specs[chunk.key], chunk.offset))
            if chunk.crc32c is not None:
                self._crcs[chunk.key] = chunk.crc32c
        for index, file in enumerate(manifest.files):
            home = homes[file.path]
            if home.is_dir():
                self._acquire_lock(home)
            self._nvme.adopt(home / file.name, file.nbytes, chunks[index])

    def _remove_leftovers(self) -> None:
        """Shard files here that no manifest names: of a process that died before it published them."""
        named = {slot.file.path for _, slot in self._nvme.slots()}
        for directory in self._directories:
            for path in shard_files(directory, self._rank):
                if path not in named:
                    _logger.warning("removing %s: left by a process that never published it", path)
                    path.unlink()

    def _allocate_memory(self) -> None:
        for tier, memory in self._memory.items():
            memory.allocate(spec for spec in self._specs.values() if spec.tier is tier)

    def _allocate_scratch(self) -> None:
        """Gradients do not outlive the process: their files are new each time."""
        self._nvme.allocate(spec for spec in self._specs.values() if spec.tier is Tier.NVME and spec.key.group is Group.GRAD)

    def _move_from_dropped_paths(self) -> None:
        """Chunks in directories that the configuration no longer names get a place in those that it does.

        The old files stay, and stay named by the manifest on disk, until the next publish.
        """
        moving = [key for key, slot in self._nvme.slots() if slot.directory not in self._directories]
        if not moving:
            return
        _logger.info("moving %d chunks of run %r to the paths now configured", len(moving), self._run)
        buffer = self._pools.plain.take(max(self._specs[key].padded_nbytes for key in moving))
        old = {key: self._nvme.slot(key) for key in moving}
        self._nvme.allocate((self._specs[key] for key in moving), label="moved")
        for key in moving:
            self._nvme.read(key, old[key], buffer).wait()
            self._nvme.write_back(key, buffer).wait()

    def _resident_specs(self) -> list[ChunkSpec]:
        return [spec for spec in self._specs.values() if spec.tier is not Tier.NVME and spec.key.group is not Group.GRAD]

    def _tier_of(self, key: ChunkKey) -> ChunkTier:
        tier = self._specs[key].tier
        return self._nvme if tier is Tier.NVME else self._memory[tier]

    def _settle(self, key: ChunkKey) -> None:
        with self._lock:
            work = self._writing.pop(key, None)
        if work is None:
            return
        try:
            work.wait()
        except StorageError as error:
            if key.group is not Group.GRAD:
                self._damage = self._damage or error
            raise

    def _settle_completed(self) -> None:
        """Forget the writes that are over, oldest first; raise if one failed."""
        while True:
            with self._lock:
                key = next(iter(self._writing), None)
                if key is None or not self._writing[key].is_completed():
                    return
            self._settle(key)

    def _mark_dirty(self) -> None:
        """Before the first in-place write after a publish: from here on the files are no step's."""
        with self._lock:
            if self._manifest is not None and self._manifest.is_clean:
                assert self._manifest_place is not None
                dirty = self._manifest.dirty()
                dirty.save(self._manifest_place)
                self._manifest = dirty

    def _commit(self, step: int, extra: Mapping[str, Any]) -> None:
        """The manifest goes to the first path; then the marks point to it; then what it does not name is removed."""
        place = self._directories[0]
        for directory in self._directories:
            sync_directory(directory)
        marks = {directory: PathMark.renew(directory, self._rank, place) for directory in self._directories}
        manifest = make_manifest(
            run=self._run,
            rank=self._rank,
            serial=self._manifest.serial + 1 if self._manifest else 1,
            step=step,
            extra=extra,
            fingerprint=fingerprint(self._specs.values()),
            identity=self._identity,
            units=self._units,
            marks=marks,
            nvme=self._nvme,
            specs=self._specs,
            crcs=self._crcs,
        )
        manifest.save(place)
        for directory, mark in marks.items():
            mark.save(directory, self._rank)
        if self._manifest_place not in (None, place):
            assert self._manifest_place is not None
            (self._manifest_place / manifest_name(self._rank)).unlink(missing_ok=True)
        self._manifest, self._manifest_place = manifest, place
        self._nvme.remove_unused()
        for dropped in self._locks.keys() - set(self._directories):
            PathMark.remove(dropped, self._rank)


def fingerprint(specs: Iterable[ChunkSpec]) -> str:
    """sha256 of every chunk's key, bytes and parts: equal when two stores cut the same states the same way, wherever they live.

    Gradients are left out: they do not outlive the process.
    """
    digest = hashlib.sha256()
    for spec in sorted(specs, key=lambda spec: spec.key):
        if spec.key.group is not Group.GRAD:
            parts = [[part.name, str(part.dtype), part.numel] for part in spec.parts]
            digest.update(json.dumps([str(spec.key), spec.nbytes, parts]).encode())
    return digest.hexdigest()


def _check_paths(paths: Sequence[NvmePath]) -> None:
    for path in paths:
        warning = check_path(path.path).warning
        if warning:
            _logger.warning("%s", warning)
    places = [path.path.resolve() for path in paths]
    if len(set(places)) < len(places):
        raise ConfigError(f"nvme.paths: {max(places, key=places.count)} is named twice")
    for path in paths:
        if (path.path / HOME).exists() and not (path.path / HOME).is_dir():
            raise ConfigError(f"nvme.paths: {path.path / HOME} is a file, a directory of that name is needed there")
