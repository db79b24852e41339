"""What a run's files hold, as JSON beside them: written to a temporary name, synced, renamed, the directory synced."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infinity.errors import StorageError
from infinity.kinds import Group
from infinity.storage.chunks import ChunkKey

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PathEntry:
    """A directory with files of the run. The id is in the directory too, so a moved directory is still known."""

    id: str
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One shard file."""

    name: str
    path: int
    """Index into `paths`."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEntry:
    """Where a chunk's bytes are."""

    key: ChunkKey
    file: int
    """Index into `files`."""
    offset: int
    """Bytes from the start of the file, a multiple of 4096."""
    nbytes: int
    crc32c: int | None = None
    """Of the `nbytes` bytes, where it was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One rank's part of a published run."""

    run: str
    rank: int
    serial: int
    """Grows with every publish; of two manifests of a run the higher one counts."""
    generation: int
    step: int
    is_clean: bool
    """False from the first in-place write after a publish until the next: the files are then a mix of two steps."""
    fingerprint: str
    """Of all chunks: keys, bytes and parts."""
    identity: Mapping[str, str]
    """What else must match to go on, named: a difference is reported by its name."""
    units: Sequence[str]
    paths: Sequence[PathEntry]
    files: Sequence[FileEntry]
    chunks: Sequence[ChunkEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the layers above."""

    def dirty(self) -> Manifest:
        return replace(self, is_clean=False)

    def save(self, directory: Path) -> Path:
        """Replace the manifest in `directory` durably: at every instant there is the old one or the new one, whole."""
        path = directory / manifest_name(self.rank)
        text = json.dumps(_to_json(self), separators=(",", ":"))
        save_text(path, text)
        return path

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Raises StorageError when the file is not a manifest of a version this code reads."""
        try:
            return _from_json(json.loads(path.read_text()))
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, str(path)) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StorageError(errno.EINVAL, str(path), hint=f"Not a manifest of format version {FORMAT_VERSION}: {error!r}") from error


def manifest_name(rank: int) -> str:
    return f"manifest.r{rank}.json"


def save_text(path: Path, text: str) -> None:
    """Temporary name, fsync, rename, fsync of the directory. Raises StorageError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb", closefd=False) as stream:
                stream.write(text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(path), 0, len(text)) from error


def sync_directory(directory: Path) -> None:
    """Names created, renamed or removed in it are on the device when this returns."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _to_json(manifest: Manifest) -> dict[str, object]:
    return {
        "format": "infinity-store",
        "version": FORMAT_VERSION,
        "run": manifest.run,
        "rank": manifest.rank,
        "serial": manifest.serial,
        "generation": manifest.generation,
        "step": manifest.step,
        "clean": manifest.is_clean,
        "fingerprint": manifest.fingerprint,
        "identity": dict(manifest.identity),
        "units": list(manifest.units),
        "paths": [{"id": path.id, "directory": path.directory} for path in manifest.paths],
        "files": [{"name": file.name, "path": file.path, "bytes": file.nbytes} for file in manifest.files],
        "chunks": [_chunk_to_json(chunk) for chunk in manifest.chunks],
        "extra": dict(manifest.extra),
    }


def _chunk_to_json(chunk: ChunkEntry) -> dict[str, object]:
    key = [chunk.key.unit, chunk.key.flat, str(chunk.key.group), chunk.key.chunk]
    return {"key": key, "file": chunk.file, "offset": chunk.offset, "bytes": chunk.nbytes, "crc32c": chunk.crc32c}


def _from_json(table: Any) -> Manifest:
    if table["format"] != "infinity-store" or table["version"] != FORMAT_VERSION:
        raise ValueError(f"format {table['format']!r}, version {table['version']!r}")
    files = tuple(FileEntry(name=_plain_name(file["name"]), path=int(file["path"]), nbytes=int(file["bytes"])) for file in table["files"])
    paths = tuple(PathEntry(id=str(path["id"]), directory=str(path["directory"])) for path in table["paths"])
    chunks = tuple(_chunk_from_json(chunk, files) for chunk in table["chunks"])
    if any(not 0 <= file.path < len(paths) for file in files):
        raise ValueError("a file names a path that is not listed")
    return Manifest(
        run=str(table["run"]),
        rank=int(table["rank"]),
        serial=int(table["serial"]),
        generation=int(table["generation"]),
        step=int(table["step"]),
        is_clean=bool(table["clean"]),
        fingerprint=str(table["fingerprint"]),
        identity={str(name): str(value) for name, value in table["identity"].items()},
        units=tuple(str(name) for name in table["units"]),
        paths=paths,
        files=files,
        chunks=chunks,
        extra=dict(table["extra"]),
    )


def _chunk_from_json(chunk: Any, files: Sequence[FileEntry]) -> ChunkEntry:
    unit, flat, group, index = chunk["key"]
    key = ChunkKey(int(unit), int(flat), Group(group), int(index))
    crc = chunk["crc32c"]
    entry = ChunkEntry(
        key=key, file=int(chunk["file"]), offset=int(chunk["offset"]), nbytes=int(chunk["bytes"]), crc32c=None if crc is None else int(crc)
    )
    if not 0 <= entry.file < len(files) or entry.offset % 4096 or not 0 <= entry.offset <= files[entry.file].nbytes - entry.nbytes:
        raise ValueError(f"chunk {key} does not lie inside a listed file")
    return entry


def _plain_name(name: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(name)):
        raise ValueError(f"{name!r} is not a file name")
    return str(name)
