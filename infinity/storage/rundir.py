"""PATH/infinity/RUN: which files there are ours, which path is which, where the manifest is, and how a run is removed."""

from __future__ import annotations

import errno
import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group
from infinity.storage.lock import LOCK_NAME, RunLock
from infinity.storage.manifest import Manifest, manifest_name, save_text
from infinity.storage.probe import HOME

_SHARD = re.compile(r"u\d+-(?:param|grad|optimizer)-r(?P<rank>\d+)-g\d+[a-z0-9.]*\.safetensors")
_STATE = re.compile(r"(?:manifest|path)\.r(?P<rank>\d+)\.json(?:\.tmp)?")


def run_directory(path: Path, run: str) -> Path:
    """Where the files of `run` live below a path. Raises ConfigError for a run name that is no plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run):
        raise ConfigError(f"store.run: {run!r} must be letters, digits, '.', '_' and '-', starting with a letter or digit")
    return path / HOME / run


def shard_name(unit: int, group: Group, rank: int, generation: int, label: str) -> str:
    """`label` tells files of one (unit, group, generation) apart: "" for the first set, "resident" for states published from memory."""
    return f"u{unit:05d}-{group}-r{rank}-g{generation}{'.' + label if label else ''}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMark:
    """`path.rRANK.json` in each directory of a run: which of the run's paths this is, and where the manifest is."""

    id: str
    manifest_directory: str

    @classmethod
    def load(cls, directory: Path, rank: int) -> PathMark | None:
        try:
            table = json.loads((directory / f"path.r{rank}.json").read_text())
            return cls(id=str(table["id"]), manifest_directory=str(table["manifest_directory"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(errno.EINVAL, str(directory / f"path.r{rank}.json"), hint=f"Not a path mark of a run: {error!r}") from error

    @classmethod
    def renew(cls, directory: Path, rank: int, manifest_directory: Path) -> PathMark:
        """The directory's mark, its id unchanged, pointing to `manifest_directory`; not saved."""
        known = cls.load(directory, rank)
        return cls(id=known.id if known else uuid.uuid4().hex, manifest_directory=str(manifest_directory))

    def save(self, directory: Path, rank: int) -> None:
        if self != self.load(directory, rank):
            save_text(directory / f"path.r{rank}.json", json.dumps({"id": self.id, "manifest_directory": self.manifest_directory}))

    @staticmethod
    def remove(directory: Path, rank: int) -> None:
        (directory / f"path.r{rank}.json").unlink(missing_ok=True)


def find_manifest(directories: Iterable[Path], rank: int) -> tuple[Manifest, Path] | None:
    """The newest manifest in the directories, else the newest that they point to, and where it is; None when nothing was ever published.

    A pointer is followed only where no manifest is at hand: a copied directory points to the run that it was copied from.
    Raises StorageError when a directory belongs to a run whose manifest cannot be reached.
    """
    directories = list(directories)
    marks = {directory: PathMark.load(directory, rank) for directory in directories}
    pointed = {Path(mark.manifest_directory): directory for directory, mark in marks.items() if mark is not None}
    for places in (directories, list(pointed)):
        found = {place: Manifest.load(place / manifest_name(rank)) for place in places if (place / manifest_name(rank)).exists()}
        if found:
            place = max(found, key=lambda place: found[place].serial)
            return found[place], place
    for place, directory in pointed.items():
        hint = f"{directory} is part of a run whose manifest is there: mount or add that path"
        raise StorageError(errno.ENOENT, str(place / manifest_name(rank)), hint=hint)
    return None


def our_files(directory: Path, rank: int | None = None) -> list[Path]:
    """Shard files, manifests and marks in a run's directory; of one rank, or of all. Other files are not ours."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_file() and _is_ours(path.name, rank))


def shard_files(directory: Path, rank: int) -> list[Path]:
    return [path for path in our_files(directory, rank) if _SHARD.fullmatch(path.name)]


def _is_ours(name: str, rank: int | None) -> bool:
    match = _SHARD.fullmatch(name) or _STATE.fullmatch(name)
    return match is not None and rank in (None, int(match["rank"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run holds on its paths."""

    run: str
    files: tuple[Path, ...]
    nbytes: int


def run_files(paths: Sequence[Path], run: str) -> RunFiles:
    """All files of a run, of every rank, with their sum of bytes."""
    files = tuple(file for path in paths for file in our_files(run_directory(path, run)))
    return RunFiles(run=run, files=files, nbytes=sum(file.stat().st_size for file in files))


def discard(paths: Sequence[Path], run: str) -> RunFiles:
    """Remove a run's files, and its directories where nothing else is in them. Returns what was removed.

    Manifests go first, so a removal that is cut short leaves no run that looks whole. Raises LockError while a job uses the run.
    """
    directories = [run_directory(path, run) for path in paths if run_directory(path, run).is_dir()]
    locks: list[RunLock] = []
    try:
        locks.extend(RunLock(directory) for directory in directories)
        removed = run_files(paths, run)
        for file in sorted(removed.files, key=lambda file: not file.name.startswith("manifest")):
            file.unlink(missing_ok=True)
        for directory in directories:
            (directory / LOCK_NAME).unlink(missing_ok=True)
            if not any(directory.iterdir()):
                directory.rmdir()
    finally:
        for lock in locks:
            lock.close()
    return removed
