"""Gradients at rest: what has arrived since the last step, where, and how large it is."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from infinity import native
from infinity.kinds import Group, Tier
from infinity.optim.chunks import Chunk, FlatKey
from infinity.optim.grad_mover import Arrival, GradMover, Move, grad_at_rest
from infinity.optim.promise import Promise
from infinity.sharding.layout import Interval
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import COMPLETED, Work
from infinity.timeline import Timeline


class GradSet:
    """The gradients of one step, owned by whoever took them. The next backward may overwrite a chunk as soon as it is `done`."""

    def __init__(self, present: dict[FlatKey, frozenset[int]], guards: dict[Chunk, Promise]) -> None:
        self.present = present
        """Per flat, the slots that got a gradient."""
        self._guards = guards

    def done(self, chunk: Chunk, after: Work = COMPLETED) -> None:
        """The chunk's gradient is not read any more once `after` is over."""
        self._guards[chunk].keep(after)

    def holds(self, chunk: Chunk) -> bool:
        """Whether anything arrived for the chunk."""
        return chunk in self._guards

    def keep_only(self, chunks: Iterable[Chunk]) -> None:
        """The others are not read."""
        kept = set(chunks)
        for chunk, guard in self._guards.items():
            if chunk not in kept:
                guard.keep()

    def drop(self) -> None:
        """Nothing of the set is read any more."""
        for guard in self._guards.values():
            guard.keep()

    def fail(self, failure: BaseException) -> None:
        """The step died; what it was to read must not be overwritten as if it had been used."""
        for guard in self._guards.values():
            guard.fail(failure)


class Grads:
    """Receives full flat gradients during backward and brings each chunk to rest in the tier that the store placed it in.

    HBM: added up on the compute device, at once. CPU: brought down, then added up by the CPU. NVMe: brought down, added to what is there, written.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        *,
        store: Store,
        copies: Copies,
        pool: native.ThreadPool,
        slabs: SlabPool,  # pinned where there is a CUDA device
        timeline: Timeline,
        device: torch.device,
        deadline_s: float,
        busy_paths: int = 1,
        total: Callable[[float], float] = lambda value: value,
    ) -> None:
        """`busy_paths`: NVMe paths to keep writing at once. `total`: the sum over all ranks, of whose shards these are one."""
        self._total = total
        self._chunks = tuple(chunks)
        self._by_flat: dict[FlatKey, list[Chunk]] = {}
        for chunk in self._chunks:
            self._by_flat.setdefault(chunk.flat_key, []).append(chunk)
        self._rests = {key: _rest_of(store, chunks[0]) for key, chunks in self._by_flat.items()}
        """Per flat: where its gradients rest, if that is one tensor of their own dtype."""
        in_hbm = [chunk for chunk in self._chunks if store.tier(chunk.key(Group.GRAD)) is Tier.HBM]
        self._in_hbm = {chunk: grad for chunk in in_hbm if (grad := grad_at_rest(store, chunk)) is not None}
        """Of the chunks whose gradients rest in HBM."""
        self._copies = copies
        self._device = device
        self._deadline_s = deadline_s
        self._mover = GradMover(
            self._chunks,
            store=store,
            copies=copies,
            pool=pool,
            slabs=slabs,
            timeline=timeline,
            device=device,
            deadline_s=deadline_s,
            busy_paths=busy_paths,
        )
        self._present: dict[FlatKey, frozenset[int]] = {}
        self._begun: set[Chunk] = set()
        self._norms: dict[FlatKey, tuple[Tensor, ...]] = {}
        """Per flat that came down whole: the norms of its chunks, fp64 [] each on the compute device."""
        self._sums_on_device = device.type == "cuda"
        """A GPU sums a whole flat gradient in passing; the CPU does it on the mover's thread."""
        self._coming_down: deque[tuple[Work, _Countdown]] = deque()
        """Copies of such gradients, oldest first. No thread waits for them: it would take the interpreter from the one that launches compute."""
        self.drops = 0
        """How often all gradients were dropped since the start, whoever asked for it."""
        self.arrivals = 0
        """How many flat gradients have arrived since the start."""
        self._guards: dict[Chunk, Promise] = {}
        self._lock = threading.Lock()

    @property
    def staging_bytes(self) -> int:
        """CPU memory held beside the gradients at rest."""
        return self._mover.staging_bytes

    def arrive(
        self, unit: int, flat: int, grad: Tensor, present: frozenset[int], on_release: Callable[[], None] = lambda: None, *, start: int = 0
    ) -> None:
        """A gradient of the run of a flat buffer that begins at its element `start`, on the compute device; zero outside the slots in `present`.

        It is in the flat's dtype, or already in the one in which it rests, and covers whole chunks.
        May come several times between steps: later ones are added. Ownership passes: `on_release` is called once nothing but the stream
        that is current now uses `grad`, from this thread or another. Returns without waiting for a copy or a disk, except where the last
        step still reads a chunk in HBM. Raises what landing an earlier gradient raised.
        """
        self._mover.check()
        count = _Countdown(on_release)
        with self._lock:
            self.arrivals += 1
            self._present[unit, flat] = self._present.get((unit, flat), frozenset()) | present
            run = Interval(start, start + grad.numel())
            chunks = [chunk for chunk in self._by_flat[unit, flat] if chunk.meets(present) and len(chunk.interval.overlap(run))]
            ready = torch.cuda.current_stream(self._device.index).record_event() if self._device.type == "cuda" else None
            rest = self._fresh_rest(unit, flat)
            if rest is not None and len(chunks) == len(self._by_flat[unit, flat]):
                self._send_whole(chunks, grad, start, rest, ready, count)
            else:
                self._send_chunks(chunks, grad, start, ready, count)
            self._begun.update(chunks)

    def in_place(self, unit: int, flat: int) -> Tensor | None:
        """The resting memory itself, where the coming gradient may be computed; None where it is elsewhere or in use."""
        rest = self._rests.get((unit, flat))
        if rest is None or rest.device != self._device:
            return None
        with self._lock:
            return self._fresh_rest(unit, flat)

    def _fresh_rest(self, unit: int, flat: int) -> Tensor | None:
        """Where a flat's gradients rest, if that is one tensor that holds nothing of this step and that nobody reads."""
        rest = self._rests.get((unit, flat))
        is_free = rest is not None and all(
            chunk not in self._begun and self._guards.get(chunk, COMPLETED).is_completed() for chunk in self._by_flat[unit, flat]
        )
        return rest if is_free else None

    def _send_whole(self, chunks: list[Chunk], grad: Tensor, start: int, rest: Tensor, ready: torch.cuda.Event | None, count: _Countdown) -> None:
        """Everything in one copy, or none where the gradient was computed in place."""
        is_there = grad.data_ptr() == rest.data_ptr()
        if rest.device.type != "cpu":
            if not is_there:
                rest.copy_(grad)
            count.start(0)
            return
        count.start(1)
        arrived = COMPLETED if is_there else self._copies.download(grad, rest, after=ready)
        if not self._sums_on_device:
            self._mover.push([Arrival(tuple(chunks), rest, start, arrived, count.down)])
        else:
            self._norms[chunks[0].flat_key] = _norms_of([chunk.of(grad, start) for chunk in chunks])
            self._coming_down.append((arrived, count))

    def _send_chunks(self, chunks: list[Chunk], grad: Tensor, start: int, ready: torch.cuda.Event | None, count: _Countdown) -> None:
        moves = []
        for chunk in chunks:
            moves.append(Move(chunk, chunk.of(grad, start), ready, chunk not in self._begun, self._guards.get(chunk, COMPLETED), count.down))
        far = [move for move in moves if not self._land_in_hbm(move)]
        count.start(len(far))
        self._mover.push(far)

    def _land_in_hbm(self, move: Move) -> bool:
        """Add up on the current stream, if that is where the chunk rests."""
        total = self._in_hbm.get(move.chunk)
        if total is None:
            return False
        assert move.source is not None
        move.guard.wait()
        if move.is_first:
            total.copy_(move.source)
        else:
            total.add_(move.source)
        return True

    def let_go(self) -> None:
        """Release the gradients that have come down since the last arrival. Never waits."""
        with self._lock:
            while self._coming_down and self._coming_down[0][0].is_completed():
                self._coming_down[0][1].down()  # counts once, so that an interrupt before the next line loses nothing
                self._coming_down.popleft()

    def land_oldest(self) -> bool:
        """Wait for the oldest gradient that no thread waits for, and release it. False where there is none."""
        with self._lock:
            if not self._coming_down:
                return False
            arrived, count = self._coming_down[0]
            arrived.wait(self._deadline_s)
            count.down()
            self._coming_down.popleft()
            return True

    def present(self, unit: int, flat: int) -> frozenset[int]:
        """The slots of a flat that got a gradient since the last step."""
        return self._present.get((unit, flat), frozenset())

    def all_present(self) -> Mapping[FlatKey, frozenset[int]]:
        """The same of every flat."""
        return self._present

    def is_empty(self) -> bool:
        """Whether no parameter got a gradient since the last step."""
        return not any(self._present.values())

    def wait(self) -> None:
        """Until everything that arrived is at rest. Raises what the mover raised."""
        self._wait_landed()
        self._mover.wait_written()

    def norm(self) -> float:
        """The 2-norm of all gradients since the last step: fp64 sums per chunk, added in chunk order, shard by shard. Waits."""
        self._wait_landed()
        sumsq = self._sumsq_on_arrival()
        sumsq.update(self._mover.sumsq)  # of chunks that were added to since
        sumsq.update(self._sumsq_in_hbm())
        of_shard: dict[int, float] = {}
        for chunk in self._chunks:
            if chunk in self._begun:
                of_shard[chunk.shard] = of_shard.get(chunk.shard, 0.0) + sumsq[chunk]
        return math.sqrt(self._total(sum(of_shard[shard] for shard in sorted(of_shard))))

    def _sumsq_in_hbm(self) -> dict[Chunk, float]:
        chunks = [chunk for chunk in self._in_hbm if chunk in self._begun]
        return _squared(chunks, _norms_of([self._in_hbm[chunk] for chunk in chunks])) if chunks else {}

    def _sumsq_on_arrival(self) -> dict[Chunk, float]:
        """What the GPU summed up before the gradients went down. One read for all."""
        if not self._norms:
            return {}
        chunks = [chunk for flat_key in self._norms for chunk in self._by_flat[flat_key]]
        return _squared(chunks, [norm for norms in self._norms.values() for norm in norms])

    def take(self) -> GradSet:
        """All gradients since the last step, added up; the next arrival starts afresh. Waits.

        Some may still be on their way to NVMe: the store reads a chunk after the write before it.
        """
        self._wait_landed()
        with self._lock:
            guards = {chunk: Promise(f"the update of {chunk.key(Group.OPTIMIZER)}", self._deadline_s) for chunk in self._begun}
            taken = GradSet(self._present, guards)
            self._guards.update(guards)
            self._forget()
        return taken

    def clear(self) -> None:
        """Drop all gradients since the last step. Waits until none is under way."""
        self._wait_landed()
        with self._lock:
            self._forget()
            self.drops += 1

    def close(self) -> None:
        """End the mover's thread, which finishes what it has begun. Copies that no thread waits for hold their tensors until they are over."""
        self._mover.close()
        self._coming_down.clear()
        self._guards.clear()
        self._rests.clear()
        self._in_hbm.clear()

    def _wait_landed(self) -> None:
        self._mover.wait_landed()
        while self.land_oldest():
            pass

    def _forget(self) -> None:
        self._present = {}
        self._begun = set()
        self._norms = {}
        self._mover.clear()


def _rest_of(store: Store, chunk: Chunk) -> Tensor | None:
    rest = store.whole(*chunk.flat_key, Group.GRAD)
    return rest.view(chunk.dtype) if rest is not None and chunk.grad_dtype == chunk.dtype else None


def _norms_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """fp64 [] each, on their device."""
    return tuple(torch._foreach_norm(tensors, 2, torch.float64))


def _squared(chunks: Sequence[Chunk], norms: Sequence[Tensor]) -> dict[Chunk, float]:
    """Waits for the device."""
    return dict(zip(chunks, torch.stack(list(norms)).square().tolist(), strict=True))


class _Countdown:
    """Calls back when as many events came as were announced."""

    def __init__(self, on_zero: Callable[[], None]) -> None:
        self._on_zero = on_zero
        self._left = 0

    def start(self, events: int) -> None:
        self._left = events
        if events == 0:
            self._on_zero()

    def down(self) -> None:
        self._left -= 1
        if self._left <= 0:  # again, where an interrupt came before the end of the first time
            self._on_zero()
