"""The optimizer step: read the next chunk, update this one, write the last. Three hands, one loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.errors import ClosedError, MoverError
from infinity.kinds import OPTIMIZER_STATES, Group, Lane, Tier
from infinity.native import AdamSegment
from infinity.optim.adamw import Kernel, States
from infinity.optim.chunks import Chunk, Rules, segments
from infinity.optim.grad_mover import grad_at_rest, typed
from infinity.optim.grads import GradSet
from infinity.optim.promise import Promise
from infinity.optim.ring import Ring
from infinity.optim.staging import Homes, Staging, states_nbytes
from infinity.storage.chunks import ChunkKey
from infinity.storage.copies import Copies
from infinity.storage.store import Store
from infinity.storage.stream_work import stream_work
from infinity.storage.tiers import Pools
from infinity.storage.work import COMPLETED, Work, join
from infinity.timeline import Timeline


def buffer_count(busy_paths: int) -> int:
    """Buffers of each kind in the update: one that is updated, and for each of `busy_paths` NVMe paths one being read and one being written."""
    return 2 * busy_paths + 1


@dataclass(slots=True, eq=False)
class _Hand:
    """A chunk between its reads and its writes."""

    chunk: Chunk
    homes: Homes
    states: States
    """Where the kernel runs."""
    states_loan: Tensor | None
    """uint8: the staging buffer that they lie in end to end."""
    grad: Tensor
    """[numel] of chunk.grad_dtype, in CPU memory or in HBM."""
    grad_loan: Tensor | None
    arrived: Work


@dataclass(frozen=True, slots=True, eq=False)
class _Rest:
    """A chunk's three groups where they rest in memory, each None on NVMe. Nothing moves, and to look it up for every update takes long."""

    states: States | None
    grad: Tensor | None
    """[numel] of chunk.grad_dtype."""
    param: Tensor | None
    """[numel] of chunk.dtype."""


@dataclass(slots=True, eq=False)
class _Step:
    """One optimizer step under way."""

    rules: Rules
    grads: GradSet
    grad_scale: float
    unread: deque[Chunk]
    """Chunks with an update to make, in forward order, whose reads have not started."""
    of_unit: dict[int, list[Chunk]]
    hands: deque[_Hand] = field(default_factory=deque)
    """Chunks whose reads have started, in order."""


class Pipeline:
    """Updates the chunks of a step in forward order, each where its states are: on the GPU in HBM, on the CPU elsewhere.

    A chunk without a rule is neither read nor written. Reads run ahead and writes drain behind as far as `buffers` staging buffers per kind
    allow: with 3, one is read, one updated, one written. After an error the states are a mix of two steps, so every later call raises it again.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        store: Store,
        copies: Copies,
        cpu_kernel: Kernel,
        gpu_kernel: Kernel,
        pools: Pools,
        timeline: Timeline,
        device: torch.device,
        deadline_s: float,
        buffers: int = 3,
    ) -> None:
        assert buffers >= 3, "one chunk is read, one updated and one written at the same time"
        self._chunks = tuple(chunks)
        self._store = store
        self._copies = copies
        self._cpu_kernel = cpu_kernel
        self._gpu_kernel = gpu_kernel
        self._timeline = timeline
        self._device = device
        self._deadline_s = deadline_s
        self._homes = {chunk: Homes.of(store.tier, chunk.key(Group.OPTIMIZER)) for chunk in self._chunks}
        self._rests = {chunk: _rest_of(store, chunk) for chunk in self._chunks}
        self._staging = Staging(self._chunks, store, pools=pools, device=device, count=buffers)
        self._step: _Step | None = None
        self._updated: dict[int, Promise] = {}
        self._failure: Exception | None = None

    @property
    def staging_bytes(self) -> tuple[int, int]:
        """(CPU memory, HBM) held beside the states at rest."""
        return self._staging.cpu_bytes, self._staging.hbm_bytes

    def step(self, rules: Rules, grads: GradSet, grad_scale: float, on_progress: Callable[[], None] = lambda: None) -> None:
        """Update every parameter that has a rule, from gradients times `grad_scale`, and wait until all is at rest; in HBM, queued on the stream.

        `on_progress` is called after each unit, of which `is_updated` may be true now.
        """
        self.begin(rules, grads, grad_scale)
        try:
            for unit in self.units():
                self.run_unit(unit)
                on_progress()
        except BaseException as error:
            if self._step is not None:  # not of a unit, whose failure has been told
                self._fail(self._step, error)
            raise
        self.finish()

    def begin(self, rules: Rules, grads: GradSet, grad_scale: float) -> None:
        """Take over a step's gradients. Chunks without a rule give theirs back at once."""
        self.check()
        assert self._step is None, "the last step was not finished"
        of_unit: dict[int, list[Chunk]] = {}
        for chunk in self._chunks:
            chunks = of_unit.setdefault(chunk.unit, [])
            if chunk.meets(frozenset(rules.get(chunk.flat_key, ()))):
                chunks.append(chunk)
        unread = deque(chunk for chunks in of_unit.values() for chunk in chunks)
        grads.keep_only(unread)
        self._updated = {unit: Promise(f"the update of unit {unit}", self._deadline_s) for unit in of_unit}
        self._step = _Step(rules, grads, grad_scale, unread, of_unit)

    def units(self) -> Iterator[int]:
        """The units of the step, in forward order."""
        assert self._step is not None
        return iter(tuple(self._step.of_unit))

    def run_unit(self, unit: int) -> None:
        """Update one unit; units come in forward order. Its last writes may still be under way: see `updated`."""
        step = self._current()
        try:
            writes = [self._advance(step) for _ in step.of_unit[unit]]
            self._updated[unit].keep(join(writes))
        except BaseException as error:
            self._fail(step, error)
            raise

    def updated(self, unit: int) -> Work:
        """Over when the unit's parameters and states of the last step begun are at rest. Raises what the step raised."""
        return self._updated.get(unit, COMPLETED)

    def is_updated(self, unit: int) -> bool:
        """Whether the unit's parameters at rest are those of the last step begun; never where that went wrong."""
        update = self.updated(unit)
        try:
            if update.is_completed():
                update.wait(0)
                return True
        except Exception:
            pass  # `finish` raises it
        return False

    def finish(self) -> None:
        """Wait until the last write is over."""
        step = self._current()
        try:
            everything = join(self._updated.values())
            if not everything.is_completed():
                with self._timeline.stall(Lane.NVME_WRITE, "last chunks"):
                    everything.wait()
            self._staging.drain()
        except BaseException as error:
            self._fail(step, error)
            raise
        self._step = None

    @property
    def is_sound(self) -> bool:
        """Whether the states are those of one step: no step is under way, and none has failed."""
        return self._step is None and self._failure is None

    def spoil(self, error: BaseException) -> None:
        """Whoever changed the states stopped half-way: as after a step that failed."""
        self._failure = _lasting(error)

    def check(self) -> None:
        """Raise what a step has failed with."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for what is under way. A step that was not finished stays half done."""
        if self._step is not None:
            self._fail(self._step, ClosedError("the optimizer was closed in the middle of a step"))
        self._failure = ClosedError("optimizer.step() after close()")  # an older one holds on to the buffers of the frames that it went through
        self._updated.clear()
        self._rests.clear()
        self._staging.close()

    # One chunk.

    def _advance(self, step: _Step) -> Work:
        """Update the next chunk of the step. The Work is over when its states and parameters are at rest."""
        self._read_ahead(step)
        if not step.hands:
            self._read_next(step)
        hand = step.hands.popleft()
        if not hand.arrived.is_completed():
            with self._timeline.stall(Lane.NVME_READ, str(hand.chunk.key(Group.OPTIMIZER))):
                hand.arrived.wait()
        else:
            hand.arrived.wait()
        self._read_ahead(step)
        if hand.homes.on_gpu:
            return self._update_on_gpu(step, hand)
        return self._update_on_cpu(step, hand)

    def _read_ahead(self, step: _Step) -> None:
        """Start the reads of coming chunks, as many as get a buffer without waiting; chunks in memory, which need none, do not stand in the way."""
        while step.unread and self._staging.can_read(self._homes[step.unread[0]]):
            self._read_next(step)

    def _read_next(self, step: _Step) -> None:
        chunk = step.unread.popleft()
        homes = self._homes[chunk]
        states, states_loan, states_arrived = self._read_states(chunk)
        grad, grad_loan, grad_arrived = self._read_grad(chunk, homes)
        step.hands.append(_Hand(chunk, homes, states, states_loan, grad, grad_loan, join((states_arrived, grad_arrived))))

    def _read_states(self, chunk: Chunk) -> tuple[States, Tensor | None, Work]:
        at_rest = self._rests[chunk].states
        if at_rest is not None:
            return at_rest, None, COMPLETED
        loan = self._take(self._staging.states, Lane.NVME_WRITE)
        return _states_in(loan, chunk.numel), loan, self._store.fetch(chunk.key(Group.OPTIMIZER), loan[: states_nbytes(chunk.numel)])

    def _read_grad(self, chunk: Chunk, homes: Homes) -> tuple[Tensor, Tensor | None, Work]:
        at_rest = self._rests[chunk].grad
        if at_rest is not None and not homes.stages_grad:
            return at_rest, None, COMPLETED
        loan = self._take(self._staging.grads, Lane.UPLOAD)
        grad, key = typed(loan, chunk.grad_dtype, chunk.numel), chunk.key(Group.GRAD)
        if at_rest is None:
            return grad, loan, self._store.fetch(key, grad.view(torch.uint8))
        return grad, loan, self._copies.download(at_rest, grad, str(key))

    # States in CPU memory or on NVMe: the CPU updates.

    def _update_on_cpu(self, step: _Step, hand: _Hand) -> Work:
        chunk, runs = hand.chunk, segments(hand.chunk, step.rules[hand.chunk.flat_key])
        param, loan = self._param_on_cpu(hand)
        with self._timeline.span(Lane.ADAM, str(chunk.key(Group.OPTIMIZER)), states_nbytes(chunk.numel)):
            self._apply(self._cpu_kernel, step, hand, hand.grad, param, runs, fills_gaps=loan is not None)
        step.grads.done(chunk)
        if hand.grad_loan is not None:
            self._staging.grads.give_back(hand.grad_loan, COMPLETED)
        return join((self._write_states(hand), self._write_param(hand, param, loan)))

    def _param_on_cpu(self, hand: _Hand) -> tuple[Tensor, Tensor | None]:
        """Where the CPU puts the new parameters, and the ring buffer if it is not their home."""
        chunk, at_rest = hand.chunk, self._rests[hand.chunk].param
        if at_rest is not None and not hand.homes.stages_param:
            return at_rest, None
        loan = self._take(self._staging.params, Lane.NVME_WRITE if hand.homes.param is Tier.NVME else Lane.UPLOAD)
        return typed(loan, chunk.dtype, chunk.numel), loan

    def _write_states(self, hand: _Hand) -> Work:
        if hand.states_loan is None:
            return COMPLETED
        write = self._store.write_back(hand.chunk.key(Group.OPTIMIZER), hand.states_loan[: states_nbytes(hand.chunk.numel)])
        self._staging.states.give_back(hand.states_loan, write)
        return write

    def _write_param(self, hand: _Hand, param: Tensor, loan: Tensor | None) -> Work:
        """Bring new parameters from a ring buffer home."""
        if loan is None:
            return COMPLETED
        key, at_rest = hand.chunk.key(Group.PARAM), self._rests[hand.chunk].param
        write = self._store.write_back(key, param.view(torch.uint8)) if at_rest is None else self._upload_param(key, param, at_rest)
        self._staging.params.give_back(loan, write)
        return write

    def _upload_param(self, key: ChunkKey, param: Tensor, at_rest: Tensor) -> Work:
        if self._copies.upload_stream is not None:
            # Kernels that are queued may still read the old parameters.
            self._copies.upload_stream.wait_stream(torch.cuda.current_stream(self._device))
        upload = self._copies.upload(param, at_rest, str(key))
        upload.sync_current_stream()
        return upload

    # States in HBM: the GPU updates, on the current stream.

    def _update_on_gpu(self, step: _Step, hand: _Hand) -> Work:
        chunk, runs = hand.chunk, segments(hand.chunk, step.rules[hand.chunk.flat_key])
        grad, grad_loan = self._grad_on_gpu(step, hand)
        param, param_loan = self._param_on_gpu(hand)
        self._apply(self._gpu_kernel, step, hand, grad, param, runs, fills_gaps=param_loan is not None)
        if grad_loan is None:
            step.grads.done(chunk)
        else:
            self._staging.device_grads.give_back(grad_loan, stream_work(self._device))
        return self._download_param(hand, param, param_loan)

    def _grad_on_gpu(self, step: _Step, hand: _Hand) -> tuple[Tensor, Tensor | None]:
        """The gradient in HBM, and the ring buffer it was uploaded to if that is not its home."""
        chunk = hand.chunk
        if not hand.homes.uploads_grad:
            return hand.grad, None
        loan = self._staging.device_grads.take()
        grad = typed(loan, chunk.grad_dtype, chunk.numel)
        upload = self._copies.upload(hand.grad, grad, str(chunk.key(Group.GRAD)))
        upload.sync_current_stream()
        step.grads.done(chunk, after=upload)
        if hand.grad_loan is not None:
            self._staging.grads.give_back(hand.grad_loan, upload)
        return grad, loan

    def _param_on_gpu(self, hand: _Hand) -> tuple[Tensor, Tensor | None]:
        chunk, at_rest = hand.chunk, self._rests[hand.chunk].param
        if at_rest is not None and not hand.homes.downloads_param:
            return at_rest, None
        loan = self._staging.device_params.take()
        return typed(loan, chunk.dtype, chunk.numel), loan

    def _download_param(self, hand: _Hand, param: Tensor, loan: Tensor | None) -> Work:
        if loan is None:
            return COMPLETED  # for everybody after it on the stream, who alone reads what rests in HBM
        chunk = hand.chunk
        target, cpu_loan = self._param_on_cpu(hand)
        download = self._copies.download(param, target, str(chunk.key(Group.PARAM)))
        self._staging.device_params.give_back(loan, download)
        if cpu_loan is None:
            return download
        download.wait()
        return self._write_param(hand, target, cpu_loan)

    # Both.

    def _apply(self, kernel: Kernel, step: _Step, hand: _Hand, grad: Tensor, param: Tensor, runs: Sequence[AdamSegment], *, fills_gaps: bool) -> None:
        """The update itself. A ring buffer's parameters outside `runs` are filled in: a parameter always is its master, rounded."""
        kernel.update(hand.states, grad, param, runs, step.grad_scale)
        if fills_gaps:
            for gap in _gaps(runs, hand.chunk.numel):
                param[gap].copy_(hand.states[0][gap])

    def _take(self, ring: Ring, lane: Lane) -> Tensor:
        """A buffer in CPU memory; one that is waited for is being moved on over `lane`."""
        if ring.has_free():
            return ring.take()
        with self._timeline.stall(lane, "staging buffers"):
            return ring.take()

    def _current(self) -> _Step:
        self.check()
        assert self._step is not None, "begin() was not called"
        return self._step

    def _fail(self, step: _Step, error: BaseException) -> None:
        """Tell every waiter, and wait until no device uses a buffer any more."""
        self._failure = failure = _lasting(error)
        self._step = None
        for promise in self._updated.values():
            promise.fail(failure)
        step.grads.fail(failure)
        for settle in (join(hand.arrived for hand in step.hands).wait, self._staging.drain):
            try:
                settle()
            except Exception:
                pass  # the first error is the one to tell


def _lasting(error: BaseException) -> Exception:
    """What later calls raise: the error itself, or, after an interrupt, why they cannot go on."""
    if isinstance(error, Exception):
        return error
    failure = MoverError(f"interrupted by {type(error).__name__} while the states were being changed: they are a mix of two steps. Load a checkpoint")
    failure.__cause__ = error
    return failure


def _rest_of(store: Store, chunk: Chunk) -> _Rest:
    states, param = (store.resident(chunk.key(group)) for group in (Group.OPTIMIZER, Group.PARAM))
    return _Rest(
        None if states is None else _states_in(states, chunk.numel),
        grad_at_rest(store, chunk),
        None if param is None else typed(param, chunk.dtype, chunk.numel),
    )


def _states_in(memory: Tensor, numel: int) -> States:
    """At the head of uint8 memory, end to end."""
    return typed(memory, torch.float32, len(OPTIMIZER_STATES) * numel).view(len(OPTIMIZER_STATES), numel).unbind()


def _gaps(runs: Sequence[AdamSegment], numel: int) -> Iterator[slice]:
    """What `runs` leave out of [0, numel)."""
    at = 0
    for run in runs:
        if run.start > at:
            yield slice(at, run.start)
        at = run.stop
    if at < numel:
        yield slice(at, numel)
