"""Gradients on their way from the compute device to CPU memory or NVMe: one thread that lands them and adds them up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity import native
from infinity.errors import ClosedError, InfinityError, MoverError
from infinity.home import Home
from infinity.kinds import Group, Lane, Tier
from infinity.optim.chunks import Chunk
from infinity.optim.ring import Ring
from infinity.storage.condition import Condition
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import COMPLETED, Work, join
from infinity.timeline import Timeline

LOOKAHEAD = 2
"""Chunks under way at a time: one that comes down while the one before is added up."""


def ring_count(busy_paths: int) -> int:
    """Buffers of sums that rest on NVMe: those under way, and one being written to each of `busy_paths` NVMe paths."""
    return LOOKAHEAD + busy_paths


@dataclass(slots=True, eq=False)
class Move:
    """One chunk of an arriving gradient."""

    chunk: Chunk
    source: Tensor | None
    """[chunk.numel] of chunk.dtype or, reduced after it was added up, chunk.grad_dtype, on the compute device; dropped once it has landed."""
    ready: torch.cuda.Event | None
    """When the stream that computed `source` had it done; None on a CPU compute device."""
    is_first: bool
    """Nothing of this step rests in the chunk yet: it is overwritten, not added to."""
    guard: Work
    """The last step's use of the chunk."""
    landed: Callable[[], None]
    """Told once nothing reads `source` any more."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A whole flat gradient that is under way to where it rests, as the first of its step: only its sums of squares are missing."""

    chunks: tuple[Chunk, ...]
    rest: Tensor
    """Of the gradient's dtype, in CPU memory."""
    start: int
    """Where `rest` begins in the full flat buffer."""
    arrived: Work
    landed: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Landing:
    """A move under way."""

    move: Move
    total: Tensor
    """[numel] of chunk.grad_dtype: the sum at rest, in the resident buffer or in a loan of the resting ring."""
    addend: Tensor | None
    """[numel] of chunk.dtype, landed beside `total`; None where it lands in `total` itself."""
    total_loan: Tensor | None
    addend_loan: Tensor | None
    arrived: Work


class GradMover:
    """Lands moves in order of arrival. `sumsq` is the sum of squares of each chunk's sum, known once `wait_landed()` returned."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        *,
        store: Store,
        copies: Copies,
        pool: native.ThreadPool,
        slabs: SlabPool,
        timeline: Timeline,
        device: torch.device,
        deadline_s: float,
        busy_paths: int = 1,
    ) -> None:
        """`busy_paths`: NVMe paths to keep writing at once."""
        self.sumsq: dict[Chunk, float] = {}
        self._store = store
        self._copies = copies
        self._pool = pool
        self._timeline = timeline
        self._device, self._is_cuda = device, device.type == "cuda"
        self._deadline_s = deadline_s
        addends, totals = self._staging(chunks)
        self._addends = Ring(slabs.take, count=LOOKAHEAD, nbytes=addends)
        self._totals = Ring(slabs.take, count=ring_count(busy_paths), nbytes=totals)
        self._written: dict[Chunk, Work] = {}
        self._pending: deque[Move | Arrival] = deque()
        self._taken = 0
        """Of those, how many the thread has begun and not ended; it alone counts."""
        self._failure: BaseException | None = None
        self._closing = False
        self._home = Home()
        self._changed = Condition()
        self._thread = threading.Thread(target=self._run, name="infinity-grads", daemon=True)
        self._thread.start()

    @property
    def staging_bytes(self) -> int:
        """CPU memory held beside the gradients at rest."""
        return self._addends.nbytes + self._totals.nbytes

    def push(self, moves: Sequence[Move | Arrival]) -> None:
        """Start landing `moves`, in order. Raises what the thread died of."""
        with self._changed.lock:
            self.check()
            self._changed.notify_all()  # first, so that no interrupt comes between: the thread goes on once the lock is free
            self._pending.extend(moves)

    def check(self) -> None:
        """Raise what the thread died of. TraceError in a forked child, which has no such thread."""
        self._home.check()
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise ClosedError("gradients arrived after close()")

    def wait_landed(self) -> None:
        """Until every move pushed so far is added up. Raises what the thread died of, MoverError if nothing moves for the deadline."""
        self._home.check()
        with self._changed.lock:
            while (before := self._unfinished()) and self._failure is None:
                if not self._changed.wait(self._deadline_s) and self._unfinished() == before:
                    raise MoverError(f"gradients: none of {before} chunks under way came to rest within {self._deadline_s:g} s")
            self.check()

    def _unfinished(self) -> int:
        return len(self._pending) + self._taken

    def wait_written(self) -> None:
        """Until every chunk that rests on NVMe is there."""
        self.wait_landed()
        join(self._written.values()).wait()

    def clear(self) -> None:
        """Forget the sums, after `wait_landed()`. Writes under way go on, and the next write of a chunk comes after them."""
        self.sumsq = {}

    def close(self) -> None:
        """Finish what is under way, drop what is not, end the thread."""
        with self._changed.lock:
            self._closing = True
            dropped = self._drop_pending()
            self._changed.notify_all()
        for move in dropped:
            move.landed()
        self._thread.join(self._deadline_s)
        self._failure = None  # it holds on to the buffers of the frames that it went through
        self._addends.close()
        self._totals.close()

    # The thread.

    def _run(self) -> None:
        under_way: deque[_Landing | Arrival] = deque()
        begun: Move | None = None
        try:
            if self._is_cuda and self._device.index is not None:
                torch.cuda.set_device(self._device)  # or this thread would open the first GPU too
            while True:
                move = self._next(under_way)
                if isinstance(move, Move):
                    begun = move
                    under_way.append(self._start(move))
                    begun = None
                elif move is not None:
                    under_way.append(move)
                elif under_way:
                    self._finish(under_way[0])
                    under_way.popleft()
                else:
                    break
            join(self._written.values()).wait()
        except BaseException as error:
            lost = [item.move if isinstance(item, _Landing) else item for item in under_way]
            self._fail(error, lost + ([begun] if begun is not None else []))

    def _next(self, under_way: deque[_Landing | Arrival]) -> Move | Arrival | None:
        """The next move to start; None when one has to be finished first, or when there is nothing more to do at all."""
        with self._changed.lock:
            while not (self._pending or under_way or self._closing):
                self._changed.wait()
            if not self._pending or len(under_way) == LOOKAHEAD:
                return None
            first = self._pending[0]
            if isinstance(first, Move) and any(first.chunk in _chunks_of(item) for item in under_way):
                return None  # its sum is what this one adds to
            self._taken += 1
            return self._pending.popleft()

    def _start(self, move: Move) -> _Landing:
        """Begin to bring down the new gradient and, from NVMe, the sum so far."""
        assert move.source is not None
        chunk = move.chunk
        move.guard.wait()
        total, total_loan, fetched = self._begin_total(move)
        if move.is_first and chunk.grad_dtype == move.source.dtype:
            is_there = move.source.data_ptr() == total.data_ptr()
            arrived = COMPLETED if is_there else self._copies.download(move.source, total, after=move.ready)
            return _Landing(move, total, None, total_loan, None, arrived)
        if not self._is_cuda:
            return _Landing(move, total, move.source, total_loan, None, fetched)
        addend_loan = self._addends.take()
        addend = typed(addend_loan, chunk.dtype, chunk.numel)
        downloaded = self._copies.download(move.source, addend, after=move.ready)
        return _Landing(move, total, addend, total_loan, addend_loan, join((fetched, downloaded)))

    def _begin_total(self, move: Move) -> tuple[Tensor, Tensor | None, Work]:
        """Where the sum is, the ring buffer if it is one, and the read that brings the sum so far."""
        chunk, key = move.chunk, move.chunk.key(Group.GRAD)
        at_rest = grad_at_rest(self._store, chunk)
        if at_rest is not None:
            return at_rest, None, COMPLETED
        loan = self._totals.take()
        total = typed(loan, chunk.grad_dtype, chunk.numel)
        fetched = COMPLETED if move.is_first else self._store.fetch(key, total.view(torch.uint8))
        return total, loan, fetched

    def _finish(self, item: _Landing | Arrival) -> None:
        sums = self._settle(item) if isinstance(item, Arrival) else self._land(item)
        with self._changed.lock:
            self.sumsq.update(sums)
            self._taken -= 1
            self._changed.notify_all()

    def _settle(self, arrival: Arrival) -> dict[Chunk, float]:
        """A flat gradient is where it rests: chunk by chunk, so that the norm does not depend on the way it came."""
        arrival.arrived.wait()
        arrival.landed()
        with self._timeline.span(Lane.ADAM, "gradient norm", arrival.rest.nbytes):
            return {chunk: native.sum_of_squares(self._pool, chunk.of(arrival.rest, arrival.start)) for chunk in arrival.chunks}

    def _land(self, landing: _Landing) -> dict[Chunk, float]:
        """Add up, and write the sum to where it rests."""
        move, key = landing.move, landing.move.chunk.key(Group.GRAD)
        landing.arrived.wait()
        with self._timeline.span(Lane.ADAM, f"grad {key}", landing.total.nbytes):
            sumsq = self._add_up(landing)
        if landing.addend_loan is not None:
            self._addends.give_back(landing.addend_loan, COMPLETED)
        if landing.total_loan is not None:
            write = self._store.write_back(key, landing.total.view(torch.uint8))
            self._totals.give_back(landing.total_loan, write)
            self._written[move.chunk] = write
        move.source = landing.addend = None
        move.landed()
        return {move.chunk: sumsq}

    def _add_up(self, landing: _Landing) -> float:
        """The sum of squares of the new sum."""
        if landing.addend is None:
            return native.sum_of_squares(self._pool, landing.total)
        if landing.move.is_first:
            native.cast(self._pool, landing.addend, landing.total)
            return native.sum_of_squares(self._pool, landing.total)
        return native.accumulate(self._pool, landing.total, landing.addend)

    def _fail(self, error: BaseException, under_way: list[Move | Arrival]) -> None:
        """Everybody who waits hears of it; nobody waits for memory that would come from moves that never happen."""
        if not isinstance(error, InfinityError):
            cause = error
            error = MoverError(f"the thread that lands gradients died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._changed.lock:
            self._failure = error
            dropped = self._drop_pending()
            self._changed.notify_all()
        for move in under_way + dropped:
            move.landed()

    def _drop_pending(self) -> list[Move | Arrival]:
        dropped = list(self._pending)
        self._pending.clear()
        return dropped

    def _staging(self, chunks: Iterable[Chunk]) -> tuple[int, int]:
        """Bytes per buffer of the two rings."""
        addends = totals = 0
        for chunk in chunks:
            tier = self._store.tier(chunk.key(Group.GRAD))
            addend, total = landing_bytes(chunk.numel, chunk.dtype, chunk.grad_dtype, tier, is_cuda=self._is_cuda)
            addends, totals = max(addends, addend), max(totals, total)
        return addends, totals


def landing_bytes(numel: int, dtype: torch.dtype, grad_dtype: torch.dtype, tier: Tier, *, is_cuda: bool) -> tuple[int, int]:
    """Bytes that an arriving chunk needs in a buffer of the addends' ring and of the totals' ring, by where it rests."""
    addend = numel * dtype.itemsize if is_cuda and tier is not Tier.HBM else 0
    return addend, numel * grad_dtype.itemsize if tier is Tier.NVME else 0


def _chunks_of(item: _Landing | Arrival) -> tuple[Chunk, ...]:
    return item.chunks if isinstance(item, Arrival) else (item.move.chunk,)


def grad_at_rest(store: Store, chunk: Chunk) -> Tensor | None:
    """[numel] of chunk.grad_dtype, the memory itself; None where the gradient rests on NVMe."""
    resident = store.resident(chunk.key(Group.GRAD))
    return None if resident is None else typed(resident, chunk.grad_dtype, chunk.numel)


def typed(buffer: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """The first `numel` elements of a uint8 buffer as `dtype`, the same memory."""
    return buffer[: numel * dtype.itemsize].view(dtype)
