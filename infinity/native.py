"""The C extension with Python types: AdamW and its helpers on CPU tensors, memory on large pages, asynchronous disk I/O.

All calls release the GIL. Kernels take flat, contiguous CPU tensors and a `ThreadPool` to run on. Threads do not survive
`fork()`: a child that touches a pool or an `Aio` of its parent gets a RuntimeError, never a hang.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity._native import ffi, lib
from infinity.errors import CapacityError, ClosedError, StorageError

_ISAS = {"plain": lib.INF_ISA_PLAIN, "avx2": lib.INF_ISA_AVX2, "avx512": lib.INF_ISA_AVX512}
_TYPES = {torch.float32: lib.INF_F32, torch.bfloat16: lib.INF_BF16, torch.float16: lib.INF_F16}

Backend = Literal["auto", "libaio", "kernel", "threads"]

_BACKENDS: tuple[Backend, ...] = ("libaio", "kernel", "threads")


def available_isas() -> tuple[str, ...]:
    """The instruction sets this processor runs, best last; the first is always "plain"."""
    return tuple(name for name, number in _ISAS.items() if lib.inf_isa_available(number))


def available_backends() -> tuple[Backend, ...]:
    """The I/O backends of this installation, best first: "libaio" is there where the library is, the other two always."""
    return tuple(name for name in _BACKENDS if lib.inf_backend_find(name.encode()))


def _check(code: int, what: str) -> int:
    """The C side's answer, or the exception it stands for."""
    if code >= 0:
        return code
    if code == -errno.ECHILD:
        raise RuntimeError(f"{what}: its threads stayed in the parent process. Open a new one after fork().")
    if code == -errno.ENOMEM:
        raise CapacityError(f"{what}: the system has no memory left")
    if code == -errno.EINVAL:
        raise ValueError(f"{what}: invalid argument")
    raise OSError(-code, f"{what}: {os.strerror(-code)}")


# ---- threads ----


class ThreadPool:
    """Native threads for the kernels below; one kernel runs at a time, further callers wait for their turn.

    `cores` pins thread i to core cores[i]; without it the scheduler decides.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        if threads < 1:
            raise ValueError(f"a pool of {threads} threads: at least 1 is needed")
        if cores is not None and len(cores) != threads:
            raise ValueError(f"{threads} threads and {len(cores)} cores to pin them to: give one core per thread")
        handle = ffi.new("inf_pool **")
        numbers = ffi.NULL if cores is None else ffi.new("int[]", list(cores))
        _check(lib.inf_pool_open(threads, numbers, handle), f"thread pool on cores {list(cores)}" if cores is not None else "thread pool")
        self._handle = ffi.gc(handle[0], lib.inf_pool_close)
        self.threads = threads

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise ClosedError("the thread pool was used after close()")
        return self._handle

    def close(self) -> None:
        """Ends the threads. No kernel may be running; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ffi.gc(handle, None)
            lib.inf_pool_close(handle)

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- kernels ----


class AdamSegment(NamedTuple):
    """Elements [start, stop) of a chunk and the torch.optim.AdamW settings that hold for them; `step` is 1 at the first update."""

    start: int
    stop: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def _isa_number(isa: str | None) -> int:
    if isa is None:
        return -1
    if isa not in available_isas():
        raise ValueError(f"instruction set {isa!r} does not run here: choose one of {', '.join(available_isas())}")
    return int(_ISAS[isa])


def _flat(x: Tensor, name: str, dtypes: Sequence[torch.dtype], numel: int) -> Any:
    """The address of a tensor that the C side may read or write as `numel` elements in a row."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}: expected one of {', '.join(map(str, dtypes))}")
    if x.device.type != "cpu" or not x.is_contiguous() or x.numel() != numel:
        got = f"{x.numel()} {'' if x.is_contiguous() else 'scattered '}elements on {x.device}"
        raise ValueError(f"{name} is {got}: expected {numel} contiguous ones on the CPU")
    return ffi.cast("void *", x.data_ptr())


def adamw(
    pool: ThreadPool,
    master: Tensor,  # [n] fp32, CPU, in place
    exp_avg: Tensor,  # [n] fp32, CPU, in place
    exp_avg_sq: Tensor,  # [n] fp32, CPU, in place
    grad: Tensor,  # [n] fp32, bf16 or fp16, CPU
    param_out: Tensor | None,  # [n] fp32, bf16 or fp16, CPU: the new master, rounded
    segments: Sequence[AdamSegment],
    *,
    grad_scale: float = 1.0,
    isa: str | None = None,
) -> None:
    """One AdamW update in one pass over memory, with gradient `grad * grad_scale`.

    Rounds as torch.optim.AdamW(fused=True) does on vectors of fp32; denormals are kept. `segments` are in ascending order and
    do not overlap; what they leave out stays untouched in every tensor, `param_out` included.
    Raises ValueError for tensors or segments that do not fit each other.
    """
    n = master.numel()
    full = (torch.float32,)
    chunk = ffi.new("struct inf_adam_chunk *")
    chunk.master = ffi.cast("float *", _flat(master, "master", full, n))
    chunk.exp_avg = ffi.cast("float *", _flat(exp_avg, "exp_avg", full, n))
    chunk.exp_avg_sq = ffi.cast("float *", _flat(exp_avg_sq, "exp_avg_sq", full, n))
    chunk.grad = _flat(grad, "grad", tuple(_TYPES), n)
    chunk.grad_type = _TYPES[grad.dtype]
    chunk.param_out = ffi.NULL if param_out is None else _flat(param_out, "param_out", tuple(_TYPES), n)
    chunk.out_type = lib.INF_NONE if param_out is None else _TYPES[param_out.dtype]
    chunk.numel = n
    if n == 0:
        return
    rows = ffi.new("struct inf_adam_segment[]", [tuple(segment) for segment in segments])
    code = lib.inf_adamw(pool.handle, _isa_number(isa), chunk, rows, len(segments), grad_scale)
    if code == -errno.EINVAL:
        raise ValueError(f"segments must ascend, lie in [0, {n}) and have step >= 1: {list(segments)}")
    _check(code, "adamw")


def sum_of_squares(pool: ThreadPool, x: Tensor, *, isa: str | None = None) -> float:
    """The sum of squares of a flat fp32, bf16 or fp16 tensor in fp64, in an order that depends on neither threads nor instruction set.

    Sixteen fp64 lanes per 65536 elements, blocks added in order. inf and nan come out as inf and nan.
    """
    result = ffi.new("double *")
    address = _flat(x, "x", tuple(_TYPES), x.numel())
    _check(lib.inf_sum_of_squares(pool.handle, _isa_number(isa), address, _TYPES[x.dtype], x.numel(), result), "sum_of_squares")
    return float(result[0])


def accumulate(pool: ThreadPool, total: Tensor, addend: Tensor, *, isa: str | None = None) -> float:
    """total += addend, and the sum of squares of the new total (as `sum_of_squares` gives it), in one pass.

    total is fp32 and addend fp32, bf16 or fp16; or both have the same 16-bit dtype, added in fp32 and rounded once.
    """
    n = total.numel()
    result = ffi.new("double *")
    target = _flat(total, "total", tuple(_TYPES), n)
    source = _flat(addend, "addend", tuple(_TYPES) if total.dtype == torch.float32 else (total.dtype,), n)
    code = lib.inf_accumulate(pool.handle, _isa_number(isa), target, _TYPES[total.dtype], source, _TYPES[addend.dtype], n, result)
    _check(code, "accumulate")
    return float(result[0])


def cast(pool: ThreadPool, source: Tensor, target: Tensor, *, isa: str | None = None) -> None:
    """target = source, between fp32, bf16 and fp16, rounded to nearest even; one 16-bit type goes to the other through fp32.

    Equal to torch's copy_ to the bit, except that torch itself gives one NaN several bit patterns in fp16.
    """
    n = source.numel()
    left, right = _flat(source, "source", tuple(_TYPES), n), _flat(target, "target", tuple(_TYPES), n)
    _check(lib.inf_cast(pool.handle, _isa_number(isa), left, _TYPES[source.dtype], right, _TYPES[target.dtype], n), "cast")


def crc32c(buffer: Tensor, crc: int = 0) -> int:
    """CRC-32C (Castagnoli) of a uint8 CPU tensor; `crc` is that of the bytes before it."""
    return int(lib.inf_crc32c(crc, _flat(buffer, "buffer", (torch.uint8,), buffer.numel()), buffer.numel()))


def crc32c_combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32C of two runs of bytes end to end, from that of each.

    A crc is a polynomial modulo Castagnoli's, so `second_nbytes` behind it multiply it by x to the 8 * second_nbytes: some 40 squarings.
    """
    shift, power = 1 << 31, 1 << 23  # x to the 0 and to the 8: bit 31 - n is the coefficient of x to the n
    while second_nbytes:
        if second_nbytes & 1:
            shift = _times(shift, power)
        power = _times(power, power)
        second_nbytes >>= 1
    return _times(first, shift) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo Castagnoli's."""
    product = 0
    for n in range(31, -1, -1):
        if a >> n & 1:
            product ^= b
        b = b >> 1 ^ (0x82F63B78 if b & 1 else 0)
    return product


# ---- memory ----


class Mapping:
    """`nbytes` of zeroed private memory, aligned to 2 MiB, on 2 MiB pages where the kernel has them; a forked child does not have it.

    `buffer` goes to torch.frombuffer. The memory is returned to the system when this object and the last view of `buffer` are gone.
    Raises CapacityError when the system refuses.
    """

    def __init__(self, nbytes: int, *, threads: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a mapping of {nbytes} bytes")
        place = ffi.new("void **")
        _check(lib.inf_memory_map(nbytes, threads, place), f"mapping {nbytes} bytes")
        address = place[0]
        unmap = lib.inf_memory_unmap  # held here: at exit the module's names may be gone first
        owner = ffi.gc(address, lambda pointer: unmap(pointer, nbytes))
        self.nbytes = nbytes
        self.address = int(ffi.cast("uintptr_t", address))
        self.buffer = ffi.buffer(owner, nbytes)  # holds `owner`


# ---- disk ----

READ, WRITE, SYNC = int(lib.INF_READ), int(lib.INF_WRITE), int(lib.INF_SYNC)
"""Directions of a transfer."""

TRANSFER = np.dtype([("offset", "<i8"), ("nbytes", "<u4"), ("direction", "<i4"), ("file", "<i4"), ("buffer", "<i4")])
"""One of the transfers of `Aio.scatter`: `file` is an index into its descriptors, `buffer` -1 or -2 for the buffers of the slot it gets."""

TIMING = np.dtype([("begun_ns", "<i8"), ("issued_ns", "<i8"), ("done_ns", "<i8"), ("depth", "<i8")])
"""What became of it, on CLOCK_MONOTONIC: taken up, with the kernel, over; and how many were under way then. 0: never begun."""

_SLICE_NS = 200_000_000  # a wait looks at Python's signals this often, so that Ctrl-C works

_lost: list[Request] = []
"""Requests of dead drives, for ever: their memory may still be written to."""


class Request:
    """One read or write under way. `keep` is whatever owns its memory: held until the device is done with it."""

    def __init__(self, aio: Aio, handle: Any, keep: object) -> None:
        self._aio = aio
        self._handle = handle
        self._keep = keep
        self._outcome = ffi.new("struct inf_outcome *")
        self._finished = False
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> int:
        """0, or -errno: -EIO also for a file that ends too early, -ETIMEDOUT for a drive that does not answer.

        Raises TimeoutError when `timeout_s` passes first; the request goes on. Without it the engine's deadline ends the wait.
        """
        left_ns = None if timeout_s is None else max(0, round(timeout_s * 1e9))
        while not self._poll(_SLICE_NS if left_ns is None else min(left_ns, _SLICE_NS)):
            if left_ns is not None:
                left_ns -= min(left_ns, _SLICE_NS)
                if not left_ns:
                    raise TimeoutError(f"the transfer is still under way after {timeout_s} s")
        return int(self._outcome.error)

    def done(self) -> bool:
        return self._poll(0)

    def _poll(self, timeout_ns: int) -> bool:
        if not self._finished and _check(lib.inf_request_wait(self._handle, timeout_ns, self._outcome), "I/O request"):
            self._settle()
        return self._finished

    def _settle(self) -> None:
        with self._lock:  # several threads may wait for one request
            if self._finished:
                return
            self._finished = True
        if self._outcome.error == -errno.ETIMEDOUT:
            _lost.append(self)
        else:
            self._keep = None
        self._aio._pending.discard(self)

    @property
    def started_ns(self) -> int:
        """CLOCK_MONOTONIC when the first block went to the kernel; valid once done."""
        return int(self._outcome.started_ns)

    @property
    def finished_ns(self) -> int:
        """CLOCK_MONOTONIC at the last completion; valid once done."""
        return int(self._outcome.finished_ns)

    @property
    def failed_offset(self) -> int:
        """The byte of the file at which the first failure was seen, -1 without one; valid once done."""
        return int(self._outcome.failed_offset)


class Aio:
    """The I/O engine of one NVMe path: requests are cut into blocks and kept at `queue_depth` by each reader and writer thread.

    `backend`: "libaio", "kernel" (its system calls, no library), "threads" (pread and pwrite), or "auto", which takes the first
    that works. A transfer that stays with the device for longer than `deadline_s` ends its request with -ETIMEDOUT.
    Raises StorageError when a backend asked for by name is refused.
    """

    def __init__(
        self,
        *,
        block_bytes: int,  # largest single transfer handed to the kernel, a multiple of 4096 for direct I/O
        queue_depth: int,  # transfers in flight per thread
        readers: int = 1,
        writers: int = 1,
        deadline_s: float = 120.0,
        backend: Backend = "auto",
    ) -> None:
        self._pending: set[Request] = set()
        options = ffi.new("struct inf_aio_options *")
        options.block_bytes = block_bytes
        options.queue_depth = queue_depth
        options.workers = [readers, writers]
        options.deadline_ns = round(deadline_s * 1e9)
        options.fallback = lib.inf_backend_find(b"threads") if backend == "auto" else ffi.NULL
        options.backend = _find_backend(backend)
        self._open(options)

    def _open(self, options: Any) -> None:
        handle = ffi.new("inf_aio **")
        code = lib.inf_aio_open(options, handle)
        if code == -errno.EINVAL:
            raise ValueError(f"no engine with blocks of {options.block_bytes} bytes, queue depth {options.queue_depth} and these thread counts")
        if code < 0:
            raise StorageError(-code, "kernel AIO", hint='Raise fs.aio-max-nr, lower queue_depth, or use backend "auto" or "threads".')
        self._handle = ffi.gc(handle[0], lib.inf_aio_close)

    @property
    def backend(self) -> str:
        """The backend in use: with "auto", "threads" once asynchronous calls turned out not to work here."""
        return str(ffi.string(lib.inf_aio_backend_name(self._live())).decode())

    def read(self, fd: int, offset: int, address: int, nbytes: int, keep: object = None) -> Request:
        """Starts reading `nbytes` at `offset` of `fd` into memory at `address`."""
        return self._submit(lib.INF_READ, fd, offset, address, nbytes, keep)

    def write(self, fd: int, offset: int, address: int, nbytes: int, keep: object = None) -> Request:
        """Starts writing `nbytes` from memory at `address` to `offset` of `fd`."""
        return self._submit(lib.INF_WRITE, fd, offset, address, nbytes, keep)

    def slots(self) -> int:
        """Buffers that `scatter` needs for transfers with buffer -1; those with -2 take as many again behind them."""
        return int(lib.inf_aio_slots(self._live(), lib.INF_READ))

    def scatter(
        self,
        fds: Sequence[int],
        transfers: NDArray[np.void],  # [n] TRANSFER
        timings: NDArray[np.void],  # [n] TIMING, filled in as transfers are done
        address: int,
        stride: int,
        *,
        until_ns: int = 0,
        keep: object = None,
    ) -> Request:
        """Starts many small transfers, in their order, through the reading threads whatever their direction: `address + buffer * stride` each.

        The queue depth is kept over the end of one request and the start of the next. None begins after `until_ns` (0: no limit);
        what is left then has no timing. After a failure, the failed transfer is the one begun and not done.
        """
        assert transfers.dtype == TRANSFER and timings.dtype == TIMING and len(transfers) == len(timings)
        timings[:] = np.zeros((), TIMING)
        scatter = ffi.new("struct inf_scatter *")
        files, rows, stamps = ffi.new("int[]", list(fds)), ffi.from_buffer(transfers), ffi.from_buffer(timings, require_writable=True)
        scatter.fds, scatter.files, scatter.count = files, len(fds), len(transfers)
        scatter.transfers, scatter.timings = ffi.cast("struct inf_transfer *", rows), ffi.cast("struct inf_timing *", stamps)
        scatter.address, scatter.stride, scatter.until_ns = ffi.cast("void *", address), stride, until_ns
        place = ffi.new("inf_request **")
        _check(lib.inf_aio_submit_scatter(self._live(), lib.INF_READ, scatter, place), f"{len(transfers)} transfers")
        return self._started(place, (keep, files, rows, stamps))

    def close(self) -> None:
        """Finishes what is under way, then ends the threads; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        ffi.gc(handle, None)
        lib.inf_aio_close(handle)
        for request in list(self._pending):
            request.done()  # lets go of the memory, unless its drive is dead

    def __enter__(self) -> Aio:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> Any:
        if self._handle is None:
            raise ClosedError("the I/O engine was used after close()")
        return self._handle

    def _submit(self, direction: int, fd: int, offset: int, address: int, nbytes: int, keep: object) -> Request:
        place = ffi.new("inf_request **")
        what = f"{'write' if direction == lib.INF_WRITE else 'read'} of {nbytes} bytes at {offset}"
        _check(lib.inf_aio_submit(self._live(), direction, fd, offset, ffi.cast("void *", address), nbytes, place), what)
        return self._started(place, keep)

    def _started(self, place: Any, keep: object) -> Request:
        request = Request(self, ffi.gc(place[0], lib.inf_request_release), keep)
        self._pending.add(request)
        return request


def _find_backend(name: str) -> Any:
    if name not in ("auto", "libaio", "kernel", "threads"):
        raise ValueError(f"I/O backend {name!r}: choose auto, libaio, kernel or threads")
    found = lib.inf_backend_find(b"libaio" if name == "auto" else name.encode())
    if not found and name == "auto":
        found = lib.inf_backend_find(b"kernel")
    if not found:
        raise StorageError(errno.ENOENT, name, hint='The library libaio is not installed; backend "kernel" needs none.')
    return found
