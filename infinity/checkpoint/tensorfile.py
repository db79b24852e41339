"""A safetensors file written and read in pieces: the header first, since all sizes are known, then each tensor at its place."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import CheckpointError, StorageError
from infinity.sizes import MiB
from infinity.storage.shardfile import DTYPE_NAMES

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FLUSH_BYTES = 64 * MiB
"""Written bytes are sent to the disk, and dropped from the page cache, this often: a checkpoint does not crowd out the job."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Layout:
    """Where the tensors of a file lie: widest dtypes first, so that each is aligned for readers that map the file."""

    def __init__(self, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
        table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        places: dict[str, tuple[int, Entry]] = {}
        at = 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            assert entry.key not in places, f"two tensors are called {entry.key!r}"
            places[entry.key] = (at, entry)
            table[entry.key] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
            at += entry.nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.starts = {key: len(self.header) + start for key, (start, _) in places.items()}
        self.dtypes = {key: entry.dtype for key, (_, entry) in places.items()}
        self.sizes = {key: entry.nbytes for key, (_, entry) in places.items()}
        self.nbytes = len(self.header) + at


def make_file(path: Path, layout: Layout) -> None:
    """The file with its header, and room for all tensors: a full disk shows before hours of work. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, layout.nbytes)
            _write_at(descriptor, 0, memoryview(layout.header))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _failure(path, error, 0, layout.nbytes) from error


class TensorWriter:
    """Fills a file that `make_file` made, in any order. Several processes may, each its own bytes. Use under `with`."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path, self._starts = path, layout.starts
        self._unflushed = 0
        try:
            # for writing only: where hosts share a file system, none may send back a page that it has read and others have changed
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _failure(path, error, 0, layout.nbytes) from error

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values`, a contiguous CPU tensor, at byte `start` of the tensor `key`. Raises StorageError."""
        data, offset = as_bytes(values), self._starts[key] + start
        try:
            _write_at(self._fd, offset, data.numpy().data)
            self._unflushed += data.numel()
            if self._unflushed >= _FLUSH_BYTES:
                self._flush()
        except OSError as error:
            raise _failure(self._path, error, offset, data.numel()) from error

    def finish(self) -> None:
        """Everything is on the disk when this returns."""
        try:
            self._flush()
            os.fsync(self._fd)
        except OSError as error:
            raise _failure(self._path, error, 0, self._unflushed) from error

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def _failure(path: Path, error: OSError, offset: int, nbytes: int) -> StorageError:
    return StorageError(error.errno or errno.EIO, str(path), offset, nbytes, "The file was not completed and is removed")


class TensorReader:
    """Opens a file that must be exactly what `layout` says. Use under `with`."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self._starts = layout.starts
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, use another one") from None
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, str(path)) from error
        try:
            self._check(layout)
        except BaseException:
            self.close()
            raise

    def read_into(self, key: str, start: int, target: torch.Tensor) -> None:
        """Fill `target`, a flat CPU tensor, from byte `start` of the tensor `key`. Raises StorageError."""
        offset = self._starts[key] + start
        self._read_at(offset, as_bytes(target).numpy().data)
        os.posix_fadvise(self._fd, offset, target.numel() * target.element_size(), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, layout: Layout) -> None:
        size = os.fstat(self._fd).st_size
        if size != layout.nbytes:
            raise CheckpointError(f"{self.path} has {size} bytes, its manifest says {layout.nbytes}: it was cut or replaced, use another checkpoint")
        header = bytearray(len(layout.header))
        self._read_at(0, memoryview(header))
        if header != layout.header:
            raise CheckpointError(f"{self.path}: its header is not what its manifest says: the file is damaged, use another checkpoint")

    def _read_at(self, offset: int, buffer: memoryview) -> None:
        while buffer:
            try:
                done = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                raise StorageError(error.errno or errno.EIO, str(self.path), offset, len(buffer)) from error
            if not done:
                raise StorageError(errno.EIO, str(self.path), offset, len(buffer), "The file ended early")
            buffer, offset = buffer[done:], offset + done


def deal(entries: Sequence[Entry], file_bytes: int) -> list[list[Entry]]:
    """Cut the list into runs of at most `file_bytes`; a tensor that is larger gets a file of its own."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.nbytes > room:
            files.append([])
            room = file_bytes
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous CPU tensor, uint8 [nbytes], sharing its memory."""
    assert values.is_contiguous()
    return values.detach().as_strided((values.numel(),), (1,)).view(torch.uint8)
