"""Tensors whose bytes live in unlinked files: the kernel can write them out, so they need not fit in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from infinity.errors import ConfigError, StorageError
from infinity.runtime.storage_ref import StorageRef
from infinity.sizes import MiB, format_bytes

WINDOW_BYTES = 256 * MiB
SMALLEST_WINDOW_BYTES = 32 * MiB
"""How much of a model under construction is in memory at a time: as a rule, and where little is allowed."""

_MS_SYNC = 4
_MADV_PAGEOUT = 21
"""From linux/mman.h, since 5.4. It only takes pages that are clean or can be written out, so it never loses data, whatever lies at the address."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_Run = tuple[int, int, int]
"""(address of the mapping, first byte, last byte + 1)"""


class Spool:
    """Allocates CPU tensors as shared mappings of unlinked files, and keeps at most `window_bytes` of them in memory.

    A file has no name from the first microsecond on and dies with the last tensor that views it, so that nothing is left behind
    however the process ends. Every file is preallocated: a full disk is a `StorageError` here, never a SIGBUS later. A thread
    writes out what was touched longest ago while the caller goes on; `flush` ends it.
    """

    def __init__(self, directory: str, window_bytes: int) -> None:
        if not os.path.isdir(directory):
            raise ConfigError(f"spool directory {directory!r} does not exist or is not a directory: create it, on the fastest local drive")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"spool directory {directory!r} is not writable by this user: change its mode, or choose another path")
        self.window_bytes = window_bytes
        self._directory = directory
        self._storages: dict[int, StorageRef] = {}
        """By address."""
        self._recent: dict[_Run, StorageRef] = {}
        self._recent_bytes = 0
        self._writer: ThreadPoolExecutor | None = None
        self._writing: deque[tuple[int, Future[None]]] = deque()
        """(bytes, when they have left memory), oldest first."""

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor over a fresh file; its bytes are zero. Raises StorageError when the disk has no room."""
        span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        storage = self._map(span * dtype.itemsize)
        address = storage.data_ptr()
        self._forget(address)
        self._storages[address] = StorageRef(storage)
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        reference = self._storages.get(tensor.untyped_storage().data_ptr())
        return reference is not None and not reference.is_dead()

    def visited(self, tensor: torch.Tensor) -> None:
        """Some tensor was just read. Where it lives here, that counts as touched."""
        if self.holds(tensor):
            self.touched(tensor)

    def touched(self, tensor: torch.Tensor) -> None:
        """`tensor` was just read or written: it is in memory now, and whatever was touched longest ago leaves for it."""
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + tensor.numel() * tensor.element_size() if tensor.is_contiguous() else storage.nbytes()
        run = (storage.data_ptr(), start, stop)
        self._drop(run)
        self._recent[run] = StorageRef(storage)
        self._recent_bytes += stop - start
        while self._recent_bytes > self.window_bytes // 2:
            self._write_out(next(iter(self._recent)))
        self._wait_for_writes(self.window_bytes // 2)

    def flush(self) -> None:
        """Write out everything touched so far."""
        while self._recent:
            self._write_out(next(iter(self._recent)))
        try:
            self._wait_for_writes(0)
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def _map(self, nbytes: int) -> torch.UntypedStorage:
        descriptor, path = tempfile.mkstemp(prefix="infinity-build-", dir=self._directory)
        try:
            os.unlink(path)
            os.posix_fallocate(descriptor, 0, nbytes)
            return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()
        except OSError as error:
            free = shutil.disk_usage(self._directory).free
            hint = f"{format_bytes(free)} are free there; a built model needs the bytes of its parameters and buffers. Choose another path"
            raise StorageError(error.errno or errno.EIO, self._directory, 0, nbytes, hint) from error
        finally:
            os.close(descriptor)

    def _forget(self, address: int) -> None:
        """A storage that was here has died, and another takes its address."""
        for run in [run for run in list(self._recent) if run[0] == address]:
            self._drop(run)

    def _drop(self, run: _Run) -> None:
        if self._recent.pop(run, None) is not None:
            self._recent_bytes -= run[2] - run[1]

    def _write_out(self, run: _Run) -> None:
        reference = self._recent.get(run)
        storage = reference() if reference is not None else None  # so that the mapping outlives the writing
        self._drop(run)
        if storage is None:
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="infinity-spool")
        self._writing.append((run[2] - run[1], self._writer.submit(_page_out, storage, run, self._directory)))

    def _wait_for_writes(self, down_to_bytes: int) -> None:
        """Until no more than so many bytes are being written. Raises what writing them raised."""
        while self._writing and sum(nbytes for nbytes, _ in self._writing) > down_to_bytes:
            self._writing.popleft()[1].result()


def _page_out(storage: torch.UntypedStorage, run: _Run, directory: str) -> None:
    """Write a run of a mapping to its file, and let the kernel have its pages."""
    address, start, stop = run
    start -= start % os.sysconf("SC_PAGE_SIZE")
    if _libc.msync(address + start, stop - start, _MS_SYNC):
        raise StorageError(ctypes.get_errno(), directory, start, stop - start, "writing initial values to the spool directory failed")
    _libc.madvise(address + start, stop - start, _MADV_PAGEOUT)  # a kernel without it reclaims clean pages when it needs them
