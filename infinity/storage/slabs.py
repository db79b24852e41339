"""Host memory for big transfers: exact sizes on 2 MiB pages, pinned where asked, recycled when the last alias dies."""

from __future__ import annotations

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


class SlabPool:
    """Tensors on private mappings of exactly the asked size, rounded up to 2 MiB (below that to 4 KiB, several to a mapping).

    A tensor's memory goes back to the free list of its size when the last alias dies: views, `.data`, `set_()` and
    `untyped_storage()` all count, because each holds the buffer object that the tensor was made from. Work that a device does with the memory
    must hold a reference too (AioWork and Copies do).
    """

    def __init__(self, *, pin: bool, threads: int) -> None:
        self._pin = pin
        self._threads = threads
        self._slabs: list[_Slab] = []
        self._free: dict[int, list[_Piece]] = {}
        self._shared: _Slab | None = None
        self._returned: deque[_Piece] = deque()
        """What finalizers hand back. They run at any moment, also inside our own locked sections, so they only append."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def allocated_bytes(self) -> int:
        """All mappings, in use or free."""
        with self._lock:
            return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on a 4096-byte boundary, contents undefined; the memory up to the next multiple of 4096 is the tensor's too.

        Raises CapacityError when the system has no more memory or refuses to pin it.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this slab pool is closed")
            self._collect()
            piece = self._piece(max(nbytes, 1))
            piece.slab.live += 1
        buffer = piece.slab.view(piece)
        weakref.finalize(buffer, self._give, piece).atexit = False
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)

    def trim(self) -> None:
        """Give free mappings back to the system."""
        with self._lock:
            self._collect()
            self._drop_idle()

    def close(self) -> None:
        """Free what is free; what is still in use is freed as its last alias dies."""
        with self._lock:
            self._closed = True
            self._collect()
            self._drop_idle()

    def _piece(self, nbytes: int) -> _Piece:
        size = align_up(nbytes, PAGE_BYTES if nbytes >= PAGE_BYTES else SECTOR_BYTES)
        free = self._free.get(size)
        if free:
            return free.pop()
        if size >= PAGE_BYTES:
            return self._map(size).carve(size)
        if self._shared is None or self._shared.room < size:
            self._shared = self._map(PAGE_BYTES)
        return self._shared.carve(size)

    def _map(self, nbytes: int) -> _Slab:
        try:
            slab = _Slab(Mapping(nbytes, threads=self._threads), pin=self._pin)
        except CapacityError as error:
            held = sum(slab.nbytes for slab in self._slabs)
            raise CapacityError(f"no {format_bytes(nbytes)} of CPU memory on top of {format_bytes(held)} here: {error}. Lower budgets.cpu") from error
        self._slabs.append(slab)
        return slab

    def _give(self, piece: _Piece) -> None:
        """The last alias died. Called by the garbage collector, from any thread."""
        self._returned.append(piece)
        if self._closed and self._lock.acquire(blocking=False):
            try:
                self._collect()
                self._drop_idle()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            piece.slab.live -= 1
            self._free.setdefault(piece.nbytes, []).append(piece)

    def _drop_idle(self) -> None:
        idle = {id(slab) for slab in self._slabs if not slab.live}
        for size, pieces in self._free.items():
            self._free[size] = [piece for piece in pieces if id(piece.slab) not in idle]
        for slab in self._slabs:
            if id(slab) in idle:
                slab.close()
        self._slabs = [slab for slab in self._slabs if id(slab) not in idle]
        if self._shared is not None and id(self._shared) in idle:
            self._shared = None


class _Piece:
    """A run of a slab: what one tensor sits on."""

    __slots__ = ("nbytes", "slab", "start")

    def __init__(self, slab: _Slab, start: int, nbytes: int) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes


class _Slab:
    """One mapping, registered with CUDA as long as it lives if `pin`."""

    def __init__(self, mapping: Mapping, *, pin: bool) -> None:
        self._mapping: Mapping | None = mapping
        self._address = mapping.address
        self.nbytes = mapping.nbytes
        self.live = 0
        self._carved = 0
        self._unregister: Callable[[], object] = lambda: None
        if pin:
            _register(self._address, self.nbytes)
            # Runs at close(), or when the slab dies with its pool: always before the mapping does, or its addresses stay taken.
            self._unregister = weakref.finalize(self, _unregister, self._address)

    @property
    def room(self) -> int:
        return self.nbytes - self._carved

    def carve(self, nbytes: int) -> _Piece:
        piece = _Piece(self, self._carved, nbytes)
        self._carved += nbytes
        return piece

    def view(self, piece: _Piece) -> memoryview:
        """A new buffer object over the piece: tensors made from it keep it, and it keeps the mapping."""
        assert self._mapping is not None
        return memoryview(self._mapping.buffer)[piece.start : piece.start + piece.nbytes]

    def close(self) -> None:
        self._unregister()
        self._mapping = None


def _register(address: int, nbytes: int) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _CUDA_HOST_REGISTER_PORTABLE))  # type: ignore[no-untyped-call]
    if code != _CUDA_SUCCESS:
        raise CapacityError(f"cudaHostRegister refuses to pin {format_bytes(nbytes)} of CPU memory (CUDA error {code}). Lower budgets.cpu")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
