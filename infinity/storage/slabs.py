"""Host memory for big transfers: exact sizes on 2 MiB pages, pinned where asked, recycled when the last alias dies."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from infinity.errors import CapacityError, ClosedError
from infinity.native import Mapping
from infinity.sizes import SECTOR_BYTES, MiB, align_up, format_bytes

PAGE_BYTES = 2 * MiB
"""A transparent huge page: disk requests over 4 KiB pages split into more segments than drives take at once."""

_CUDA_HOST_REGISTER_PORTABLE = 1
_CUDA_SUCCESS = 0


def slab_bytes(nbytes: int) -> int:
    """The memory that a tensor of `nbytes` takes: whole 2 MiB pages, below one of those whole 4 KiB pages."""
    return align_up(max(nbytes, 1), PAGE_BYTES if nbytes >= PAGE_BYTES else SECTOR_BYTES) if nbytes else 0


def footprint(nbytes: int, device: torch.device) -> int:
    """What a buffer on the compute device takes: in CPU memory it is a slab's."""
    return nbytes if device.type == "cuda" else slab_bytes(nbytes)


class SlabPool:
    """Tensors on private mappings of exactly `slab_bytes` of the asked size.

    A tensor's memory waits for the next tensor of its size when the last alias dies: views, `.data`, `set_()` and `untyped_storage()` all
    count, because each holds the buffer object that the tensor was made from. Work that a device does with the memory must hold a reference
    too (AioWork and Copies do). Before the pool grows beyond `limit_bytes`, idle memory of other sizes goes back to the system, longest
    idle first. What is in use may still exceed the limit: only its users know what else they could do.
    """

    def __init__(self, *, pin: bool, threads: int, limit_bytes: int | None = None) -> None:
        self._pin = pin
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._idle: dict[_Slab, None] = {}
        """In the order in which they became idle."""
        self._allocated_bytes = 0
        self._peak_bytes = 0
        self._returned: deque[_Slab] = deque()
        """What finalizers hand back. They run at any moment, also inside our own locked sections, so they only append."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def allocated_bytes(self) -> int:
        """All mappings, in use or idle."""
        return self._allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever mapped at one time."""
        return self._peak_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on a 4096-byte boundary, contents undefined; the memory up to the next multiple of 4096 is the tensor's too.

        Raises CapacityError when the system has no more memory or refuses to pin it.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            if self._closed:
                raise ClosedError("this slab pool is closed")
            self._collect()
            slab = self._slab(slab_bytes(nbytes))
        buffer = slab.view()
        weakref.finalize(buffer, self._give, slab).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)

    def trim(self) -> None:
        """Give idle mappings back to the system."""
        with self._lock:
            self._collect()
            self._drop_idle()

    def close(self) -> None:
        """Free what is idle; what is still in use is freed as its last alias dies."""
        with self._lock:
            self._closed = True
            self._collect()
            self._drop_idle()

    def _slab(self, size: int) -> _Slab:
        slab = next((slab for slab in reversed(self._idle) if slab.nbytes == size), None)
        if slab is not None:
            del self._idle[slab]
            return slab
        if self._limit_bytes is not None:
            self._drop_idle(self._limit_bytes - size)
        try:
            slab = _Slab(size, pin=self._pin, threads=self._threads)
        except CapacityError as error:
            held = format_bytes(self._allocated_bytes)
            raise CapacityError(f"no {format_bytes(size)} of CPU memory on top of {held} here: {error}. Lower budgets.cpu") from error
        self._allocated_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        return slab

    def _give(self, slab: _Slab) -> None:
        """The last alias died. Called by the garbage collector, from any thread."""
        self._returned.append(slab)
        if self._closed and self._lock.acquire(blocking=False):
            try:
                self._collect()
                self._drop_idle()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._idle[self._returned.popleft()] = None

    def _drop_idle(self, down_to_bytes: int = 0) -> None:
        while self._idle and self._allocated_bytes > down_to_bytes:
            slab = next(iter(self._idle))
            del self._idle[slab]
            slab.close()
            self._allocated_bytes -= slab.nbytes


class _Slab:
    """One mapping, registered with CUDA as long as it lives if `pin`. Small ones have no huge pages: those would be larger than they are."""

    def __init__(self, nbytes: int, *, pin: bool, threads: int) -> None:
        self.nbytes = nbytes
        self._buffer, address = _map_huge(nbytes, threads) if nbytes >= PAGE_BYTES else _map_small(nbytes)
        self._unregister: Callable[[], object] = lambda: None
        if pin:
            pin_memory(address, nbytes)
            # Runs at close(), or when the slab dies with its pool: always before the mapping does, or its addresses stay taken.
            self._unregister = weakref.finalize(self, unpin_memory, address)

    def view(self) -> memoryview:
        """A new buffer object over all of it: tensors made from it keep it, and it keeps the mapping."""
        assert self._buffer is not None
        return memoryview(self._buffer)

    def close(self) -> None:
        """Nobody uses it. Give it back to the system."""
        self._unregister()
        self._buffer = None


_Buffer = mmap.mmap | memoryview
"""What keeps a mapping alive."""


def _map_huge(nbytes: int, threads: int) -> tuple[_Buffer | None, int]:
    mapping = Mapping(nbytes, threads=threads)
    return memoryview(mapping.buffer), mapping.address


def _map_small(nbytes: int) -> tuple[_Buffer | None, int]:
    try:
        small = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"mmap of {nbytes} bytes: {error.strerror}") from error
    small.madvise(mmap.MADV_DONTFORK)  # a device that writes into a page which fork() has marked copy-on-write writes into one process only
    return small, ctypes.addressof(ctypes.c_char.from_buffer(small))


def pin_memory(address: int, nbytes: int) -> None:
    """Let CUDA devices reach this memory by themselves, until `unpin_memory`. Raises CapacityError when the system refuses."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _CUDA_HOST_REGISTER_PORTABLE))  # type: ignore[no-untyped-call]
    if code != _CUDA_SUCCESS:
        raise CapacityError(f"cudaHostRegister refuses to pin {format_bytes(nbytes)} of CPU memory (CUDA error {code}). Lower budgets.cpu")


def unpin_memory(address: int) -> None:
    """Before the memory goes: else its addresses stay taken."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
