"""A shard file: chunk after chunk on 4096-byte boundaries, readable by every safetensors reader. See docs/format.md."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import StorageError
from infinity.sizes import MIN_FILE_BYTES, SECTOR_BYTES, MiB, align_up
from infinity.storage.chunks import ChunkSpec

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls each dtype."""

PADDING = "|padding|"
"""Names of padding tensors start with this; safetensors allows no holes, so padding is data too."""

MAX_HEADER_BYTES = 100_000_000
"""safetensors readers refuse longer headers."""

_OFFSET_DIGITS = 15
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where each chunk starts in one file, and the header that says so. `nbytes` is the whole file."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def header_entry_bytes(spec: ChunkSpec) -> int:
    """An upper bound of what a chunk adds to the JSON of a header, its padding tensor included."""
    return sum(len(json.dumps(part.name)) + 64 + 3 * _OFFSET_DIGITS for part in spec.parts) + 64 + 4 * _OFFSET_DIGITS


def header_bytes(entry_bytes: int, metadata: Mapping[str, str]) -> int:
    """The header's place in the file for chunks whose entries sum to `entry_bytes`: whole sectors, data starts behind it."""
    return align_up(8 + len(json.dumps(dict(metadata))) + entry_bytes + 128 + 4 * _OFFSET_DIGITS, SECTOR_BYTES)


def file_bytes(entry_bytes: int, data_bytes: int, metadata: Mapping[str, str]) -> int:
    """The size of a file whose padded chunks sum to `data_bytes`."""
    return max(MIN_FILE_BYTES, header_bytes(entry_bytes, metadata) + data_bytes)


def lay_out(specs: Sequence[ChunkSpec], metadata: Mapping[str, str]) -> ShardLayout:
    """Put chunks end to end, each on a 4096-byte boundary, with padding tensors between and behind them."""
    entry_bytes = sum(header_entry_bytes(spec) for spec in specs)
    data_bytes = sum(spec.padded_nbytes for spec in specs)
    start = header_bytes(entry_bytes, metadata)
    nbytes = file_bytes(entry_bytes, data_bytes, metadata)
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets, at, paddings = [], 0, 0
    for spec in specs:
        offsets.append(start + at)
        begin = at
        for part in spec.parts:
            assert part.name not in table and not part.name.startswith(PADDING), f"the name {part.name!r} is taken"
            table[part.name] = _entry(DTYPE_NAMES[part.dtype], part.numel, at, part.nbytes)
            at += part.nbytes
        if spec.padded_nbytes > spec.nbytes:
            table[f"{PADDING}{paddings}"] = _entry("U8", spec.padded_nbytes - spec.nbytes, at, spec.padded_nbytes - spec.nbytes)
            paddings += 1
        at = begin + spec.padded_nbytes
    if start + at < nbytes:
        table[f"{PADDING}{paddings}"] = _entry("U8", nbytes - start - at, at, nbytes - start - at)
    return ShardLayout(_pack(table, start), tuple(offsets), nbytes)


def _entry(dtype: str, numel: int, at: int, nbytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": [numel], "data_offsets": [at, at + nbytes]}


def _pack(table: Mapping[str, object], start: int) -> bytes:
    text = json.dumps(table, separators=(",", ":")).encode()
    assert 8 + len(text) <= start, "the header outgrew its bound"
    if start > MAX_HEADER_BYTES:
        hint = "Its header lists too many tensors for safetensors readers: use larger chunks or smaller units"
        raise StorageError(errno.EFBIG, "a shard file", 0, start, hint)
    return (start - 8).to_bytes(8, "little") + text.ljust(start - 8)


class ShardFile:
    """An open shard file. Opened once, with O_DIRECT where the file system takes it."""

    def __init__(self, path: Path, fd: int, nbytes: int) -> None:
        self.path = path
        self.fd = fd
        self.nbytes = nbytes
        self.is_written = False
        """Written since the last `sync`."""

    @classmethod
    def create(cls, path: Path, layout: ShardLayout) -> ShardFile:
        """Preallocate a new file and write its header. Raises StorageError; on ENOSPC it names needed and free bytes.

        A file that exists already is an error: nothing is overwritten here.
        """
        file = cls(path, open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), layout.nbytes)
        try:
            file._preallocate()
            file._write(layout.header, 0)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        return file

    @classmethod
    def open(cls, path: Path, nbytes: int) -> ShardFile:
        """Open an existing file that must have `nbytes`. Raises StorageError when it is missing or has another size."""
        file = cls(path, open_direct(path, os.O_RDWR), nbytes)
        try:
            file.check()
        except BaseException:
            file.close()
            raise
        return file

    def check(self) -> None:
        """Raise StorageError when the file was truncated or removed since it was opened."""
        found = os.fstat(self.fd)
        if not found.st_nlink:
            raise StorageError(errno.ENOENT, str(self.path), 0, self.nbytes, "The file was removed while the store was using it. Load a checkpoint")
        if found.st_size != self.nbytes:
            hint = f"The file has {found.st_size} bytes, it was made with {self.nbytes}. Load a checkpoint"
            raise StorageError(errno.EIO, str(self.path), found.st_size, self.nbytes, hint)

    def sync(self) -> None:
        """What was written is on the device when this returns (fdatasync)."""
        self.check()
        self.is_written = False
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            self.is_written = True
            raise StorageError(error.errno or errno.EIO, str(self.path), 0, self.nbytes, "The drive lost a write: do not trust this file") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _preallocate(self) -> None:
        """fallocate(2) itself: glibc's posix_fallocate silently writes every block where the file system cannot."""
        code = fallocate(self.fd, self.nbytes)
        if code == errno.EOPNOTSUPP:
            for at in range(0, self.nbytes, MiB):
                self._write(bytes(min(MiB, self.nbytes - at)), at)
        elif code:
            raise self._failed(code, 0)

    def _write(self, data: bytes, offset: int) -> None:
        """A blocking write from aligned memory, for headers and zeros."""
        with mmap.mmap(-1, len(data)) as aligned:
            aligned[:] = data
            done = 0
            while done < len(data):
                try:
                    with memoryview(aligned)[done:] as rest:
                        done += os.pwrite(self.fd, rest, offset + done)
                except OSError as error:
                    raise self._failed(error.errno or errno.EIO, offset + done) from error

    def _failed(self, code: int, offset: int) -> StorageError:
        if code not in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(code, str(self.path), offset, self.nbytes)
        free = os.statvfs(self.path.parent)
        free_bytes = free.f_bavail * free.f_frsize
        return StorageError(code, str(self.path), offset, self.nbytes, f"The file needs {self.nbytes} bytes, {free_bytes} bytes are free there")


def open_direct(path: Path, flags: int) -> int:
    """A descriptor with O_DIRECT, or without where the file system refuses it, said once per directory. Raises StorageError."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        try:
            return os.open(path, flags | direct | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if flags & os.O_EXCL:
                path.unlink(missing_ok=True)  # some file systems create the file, then refuse O_DIRECT
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
            _say_buffered(path.parent)
            return fd
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(path), 0, 0, _open_hint(error.errno)) from error


_said: set[Path] = set()


def _say_buffered(directory: Path) -> None:
    if directory not in _said:
        _said.add(directory)
        _logger.warning("%s takes no O_DIRECT: reads and writes go through the page cache, which costs memory and speed", directory)


def _open_hint(code: int | None) -> str:
    hints = {
        errno.ENOENT: "The file is missing: restore it, load a checkpoint, or remove the run with `infinity clean`",
        errno.EEXIST: "Files of another run are never overwritten: choose another store.run, or remove it with `infinity clean`",
        errno.EMFILE: "Each shard file stays open: raise the descriptor limit (ulimit -n)",
        errno.EROFS: "The path is read-only",
    }
    return hints.get(code or 0, "")


def fallocate(fd: int, nbytes: int) -> int:
    """Take space for a file of `nbytes`: 0 or errno, EOPNOTSUPP where the file system cannot. glibc's fallocate() is the bare system call."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while call(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return errno.EOPNOTSUPP if code == errno.ENOSYS else code
    return 0
