"""The scheduler: brings units to the compute device ahead of their use, and takes them back, within one byte budget.

The training and autograd threads ask and wait. What only has to be copied from pinned memory they start themselves; one mover thread
starts everything else, in the order of the trace. On a CUDA device a second thread turns NVMe reads that have arrived into uploads, so
that the mover never waits for a disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity import native
from infinity.device import tier_of
from infinity.errors import CapacityError, ClosedError, InfinityError, MoverError, TraceError
from infinity.kinds import Group, Lane
from infinity.runtime.buffers import Buffers
from infinity.runtime.collector import Collector
from infinity.runtime.compute_clock import ComputeClock
from infinity.runtime.descent import Descent
from infinity.runtime.fetches import Fetch, Parts, Retired
from infinity.runtime.resting import resting_unit
from infinity.runtime.states import States
from infinity.runtime.trace import Trace
from infinity.runtime.units import Unit
from infinity.runtime.uploader import Uploader
from infinity.sharding.groups import first_other
from infinity.sharding.layout import Interval
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.sizes import format_bytes
from infinity.storage.chunks import ChunkKey, as_bytes
from infinity.storage.copies import Copies
from infinity.storage.reserve import Reserve
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import Work

EVENT_POLL_S = 0.0005
"""How often the mover looks whether a buffer that it needs back is not in use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movers:
    """What the scheduler moves bytes with; tests replace any of them."""

    store: Store
    copies: Copies
    slabs: SlabPool
    staging: Reserve | None
    """Pinned buffers of one parameter chunk each; None on a CPU device, where reads land in the unit's own buffer."""
    descent: Descent
    states: States
    clock: ComputeClock
    ranks: Ranks
    share: Share


class Scheduler:
    """Residency (what the hooks ask for) over the store."""

    def __init__(
        self,
        units: Sequence[Unit],
        movers: Movers,
        device: torch.device,
        *,
        chunk_numel: int,
        budget_bytes: int,
        spare_bytes: int,
        prefetch_units: int,
        deadline_s: float,
    ) -> None:
        self._movers, self._device, self._cuda = movers, device, device.type == "cuda"
        self._budget_bytes, self._prefetch_units, self._deadline_s = budget_bytes, prefetch_units, deadline_s
        self._spare_bytes = spare_bytes
        self._is_overdrawn = False
        self._is_alone = movers.share.is_alone
        self._gathers = movers.share.is_sharded(Group.PARAM)
        self._resting = {unit.layout.index: resting_unit(unit, movers.store, device, chunk_numel, movers.share) for unit in units}
        self._trace = Trace()
        self._collector = Collector()
        self._fetches: dict[int, Fetch] = {}
        self._queue: deque[Fetch] = deque()
        self._retired: deque[Retired] = deque()
        self._buffers = Buffers(device, movers.slabs, movers.copies.upload_stream)
        self._used_bytes = 0
        """Of live units, and of those that come; idle buffers are counted beside it."""
        self.peak_bytes = 0
        self.peak_units = 0
        self._closing = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._landing = threading.Condition()
        self._uploader: Uploader | None = None
        if movers.staging is not None:
            self._uploader = Uploader(movers.store, movers.copies, movers.staging, deadline_s=deadline_s, on_death=self._fail)
        mover = threading.Thread(target=self._run, name="infinity-mover", daemon=True)
        self._threads = [mover, self._uploader.thread] if self._uploader is not None else [mover]
        mover.start()

    # -- what the hooks ask, in the order of a step -----------------------------------------------------------------

    def forward_begins(self) -> None:
        if self._cuda:
            self._collector.pause()
        self._movers.clock.begin("forward")

    def forward_ends(self) -> None:
        self._movers.clock.end()
        self._collector.resume()

    def backward_begins(self) -> None:
        self._movers.clock.begin("backward")

    def backward_breaks(self) -> None:
        self._movers.descent.break_off()

    def backward_ends(self) -> None:
        self._movers.clock.end()
        self._movers.descent.end()

    def fetch(self, unit: Unit) -> list[Tensor]:
        """The unit's full flat buffers, usable by the current stream. Blocks; counts as a stall where it has to wait."""
        index = unit.layout.index
        with self._changed:
            self._check()
            fetch = self._fetches.get(index)
            if fetch is not None and fetch.attached:
                self._drop(fetch)  # an interrupt came before the hooks had it: by now it may be old
                fetch = None
            fetch = fetch or self._request(index)
            fetch.urgent = fetch.attached = True
            for other in self._ahead_of(index):
                self._request_ahead(other)
            self._wake_mover()
        try:
            self._wait_for(fetch)
        except BaseException:
            self._abandon(fetch)
            raise
        return fetch.flats

    def _wait_for(self, fetch: Fetch) -> None:
        if fetch.is_completed():
            fetch.sync_current_stream()
        else:
            lane = Lane.COMM if self._gathers else Lane.UPLOAD if self._cuda else Lane.NVME_READ
            with self._movers.clock.waiting(lane, fetch.name):
                fetch.sync_current_stream()

    def _abandon(self, fetch: Fetch) -> None:
        """It failed, or an interrupt came first: the hooks do not have it, and whoever asks again starts afresh."""
        with self._changed:
            fetch.attached = fetch.urgent = False
            if fetch in self._queue:
                self._queue.remove(fetch)
                del self._fetches[fetch.index]
            elif fetch.has_failed():
                self._drop(fetch)
            self._changed.notify_all()

    def release(self, unit: Unit, *, is_changed: bool, is_shared: bool) -> None:
        """The hooks dropped their references; the current stream is the last that reads the buffers."""
        with self._changed:
            fetch = self._fetches[unit.layout.index]
            fetch.last_use = torch.cuda.current_stream(self._device.index).record_event() if self._cuda and fetch.nbytes else None
            fetch.is_held |= is_shared or is_changed
            if fetch.nbytes and not is_changed and self._comes_soon(fetch.index):  # nothing that differs between ranks
                fetch.attached = fetch.urgent = False  # as if it had been fetched ahead
            else:
                self._let_go(fetch)
            self._wake_mover()

    def _let_go(self, fetch: Fetch) -> None:
        """No visit uses it any more."""
        if fetch.is_held:
            self._retire(fetch)
        else:
            self._recycle(fetch)

    def _retire(self, fetch: Fetch) -> None:
        """What happens to the buffers is up to those who hold views of them: nobody else gets this memory as long as they do."""
        if self._cuda:
            for flat in fetch.borrowed:
                flat.record_stream(torch.cuda.current_stream(self._device))
        if self._cuda and fetch.nbytes and not self._gathers:  # ranks must agree on what has room, and not on how far their streams are
            assert fetch.last_use is not None
            self._retired.append(Retired(fetch, fetch.last_use))
            del self._fetches[fetch.index]
        else:
            self._drop(fetch)

    def grad_buffer(self, unit: Unit, flat: int) -> Tensor:
        """A fresh buffer for a full flat gradient on the compute device, contents undefined."""
        return self._movers.descent.buffer(unit, flat)

    def flats_to_reduce(self, unit: Unit, begun: Collection[int]) -> Sequence[int]:
        """Of a unit whose gradients go down."""
        return self._movers.descent.flats_to_reduce(unit, begun)

    def reduce(self, unit: Unit, flat: int, grad: Tensor, present: frozenset[int]) -> None:
        """A full flat gradient goes to rest; ownership passes. Waits only while too many others are still on their way."""
        self._movers.descent.reduce(unit, flat, grad, present)

    def drop_grads(self) -> None:
        """Forget every gradient that came down since the last step."""
        self._collector.resume()
        self._movers.descent.drop()

    def commit(self, unit: Unit, flats: Sequence[Tensor]) -> None:
        """Changed values go back to where the unit rests. Raises TraceError where another rank has others."""
        self._check_alike(unit, flats)
        self._movers.states.commit(unit, flats)

    def _check_alike(self, unit: Unit, flats: Sequence[Tensor]) -> None:
        """Each rank keeps its own part: a change that one alone has made would be kept by halves."""
        if self._is_alone:
            return
        mine = [native.crc32c(as_bytes(flat.cpu())) for flat in flats]
        everybodys = self._movers.ranks.everybodys(mine, f"the values of {unit.name}")
        other = first_other(everybodys)
        if other is not None:
            raise TraceError(
                f"the parameters of unit {unit.name!r} were changed on rank 0 in another way than on rank {other}. "
                "Make the same changes under engine.gathered on every rank"
            )

    def invalidate(self) -> None:
        """Parameters are about to change: give up what was fetched ahead."""
        self._collector.resume()  # an interrupt may have ended the forward without a word
        with self._changed:
            for fetch in [fetch for fetch in self._queue if not fetch.attached]:
                self._queue.remove(fetch)
                del self._fetches[fetch.index]
            stale = [fetch for fetch in self._fetches.values() if not fetch.attached]
        for fetch in stale:
            fetch.join()
        self._movers.copies.wait_for_uploads(self._deadline_s)  # of units long released too: the update writes what they read
        with self._changed:
            for fetch in stale:
                self._give_up(fetch)
            self._trace.restart()
            self._changed.notify_all()

    def warm(self) -> None:
        """Start on the first units of the next forward. Raises what the mover died of."""
        with self._changed:
            self._check()
            self._request_first(lambda index: True)

    def warm_updated(self, is_updated: Callable[[int], bool]) -> None:
        """The same of those whose parameters will not change any more, in a step that has begun: a dead mover is no reason to break it off."""
        with self._changed:
            if self._error is None and not self._closing and self._is_alone:  # ranks would not all be as far, and ask in different orders
                self._request_first(is_updated)

    def _request_first(self, is_wanted: Callable[[int], bool]) -> None:
        for index in self._trace.first(self._prefetch_units + 1):
            if index not in self._fetches and is_wanted(index):
                self._request_ahead(index)
        self._wake_mover()

    def close(self) -> None:
        """Stop the threads and drop every buffer. Waiters raise ClosedError."""
        self._collector.resume()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._uploader is not None:
            self._uploader.stop()
            self._uploader.fail(ClosedError("the engine was closed while a unit was on its way"))
        for thread in self._threads:
            thread.join(self._deadline_s)
        for fetch in self._fetches.values():
            fetch.fail(ClosedError("the engine was closed while a unit was on its way"))
        self._error = None  # it holds on to the buffers of the frames that it went through
        self._fetches.clear()
        self._retired.clear()
        self._buffers.shrink(0)
        self._resting.clear()
        if self._uploader is not None:
            self._uploader.close()

    # -- the mover ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._cuda:
                torch.cuda.set_device(self._device)
            self._move()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException, what: str = "a mover thread died") -> None:
        if not isinstance(error, InfinityError):
            cause = error
            is_full = isinstance(cause, torch.OutOfMemoryError)
            error = CapacityError(f"HBM is full: {cause}") if is_full else MoverError(f"{what}: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self._error = error  # before the lock: whoever holds it may be waiting for what will not come
        with self._changed:
            fetches = list(self._fetches.values())
            self._changed.notify_all()
        if self._uploader is not None:
            self._uploader.fail(error)
        for fetch in fetches:
            fetch.fail(error)

    def _is_alive(self) -> bool:
        return self._error is None and all(thread.is_alive() for thread in self._threads)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ClosedError("the engine is closed: call infinity.initialize again")

    def _wake_mover(self) -> None:
        """Only where there is something for it: a thread that wakes up takes time from the one that launches compute."""
        if self._queue:
            self._changed.notify_all()

    def _ahead_of(self, index: int) -> list[int]:
        """What to fetch ahead while `index` is used."""
        return self._within_step(self._trace.visit(index, self._prefetch_units))

    def _comes_soon(self, index: int) -> bool:
        """Whether a unit that has been used is about to be used again, as the last ones of a forward are."""
        return index in self._within_step(self._trace.next_after(self._trace.position, self._prefetch_units))

    def _within_step(self, ahead: list[int]) -> list[int]:
        """Nothing past the end of the step: the update would make it stale."""
        left = len(self._trace.order) - self._trace.position if self._trace.position else 0
        return ahead[:left]

    def _request(self, index: int) -> Fetch:
        resting = self._resting[index]
        fetch = Fetch(index, resting.name, resting.visit_bytes, self._landing, self._deadline_s, self._is_alive)
        if self._gathers:
            fetch.shards = Parts(resting.name, self._landing, self._deadline_s, self._is_alive)
        if resting.is_copied:
            fetch.asked_at = torch.cuda.current_stream(self._device).record_event()
        self._fetches[index] = fetch
        try:
            if self._gathers:
                self._make_room_in_order(fetch)
                self._begin_now(fetch)
            elif not fetch.nbytes or (resting.is_near and self._may_begin_now(fetch)):
                self._begin_now(fetch)
            else:
                self._queue.append(fetch)
        except BaseException:  # an interrupt in the middle: nobody would ever finish it
            if fetch in self._queue:
                self._queue.remove(fetch)
            self._drop(fetch)
            raise
        return fetch

    def _request_ahead(self, index: int) -> None:
        """Where ranks gather only what has room: what is begun, and when, follows from the program alone, so that all gather in one order."""
        if index not in self._fetches and (not self._gathers or self._has_room_for(self._resting[index].visit_bytes)):
            self._request(index)

    def _make_room_in_order(self, fetch: Fetch) -> None:
        """Where ranks gather: give up what was fetched ahead, last asked first, once it has landed. Raises CapacityError where that is not enough."""
        ahead = [other for other in self._fetches.values() if not other.attached and other is not fetch and other.nbytes]
        while ahead and not self._has_room(fetch):
            other = ahead.pop()
            other.join()
            self._give_up(other)
        if not self._has_room(fetch):
            if self._used_bytes + fetch.nbytes > self._budget_bytes + self._spare_bytes:
                raise self._too_much(fetch)
            self._is_overdrawn = True

    def _may_begin_now(self, fetch: Fetch) -> bool:
        """Its room is there and nobody else's turn comes first."""
        self._reap()
        return not self._queue and self._error is None and not self._closing and self._has_room(fetch)

    def _begin_now(self, fetch: Fetch) -> None:
        """Start it from the thread that asks: the copies only have to be queued, and the mover would take the interpreter from this thread."""
        if fetch.nbytes:
            self._count(fetch)
        try:
            self._begin(fetch)
        except Exception as error:
            self._fail(error, f"unit {fetch.name!r} could not be fetched")

    def _move(self) -> None:
        while True:
            with self._changed:
                fetch = self._next()
                while fetch is None and not self._closing:
                    self._changed.wait(timeout=EVENT_POLL_S if self._must_poll() else None)
                    fetch = self._next()
                if fetch is None:
                    return
            self._begin(fetch)

    def _must_poll(self) -> bool:
        """Whether what a fetch waits for comes without a word: the compute stream, or a read that has to land before it can be given up."""
        return bool(self._queue) and (bool(self._retired) or any(fetch.urgent for fetch in self._queue))

    def _next(self) -> Fetch | None:
        """The next fetch that may begin, taken off the queue with its bytes; None when there is none or no room."""
        self._reap()
        fetch = next((fetch for fetch in self._queue if fetch.urgent), self._queue[0] if self._queue else None)
        if fetch is None or self._error is not None or self._closing:
            return None
        if not self._has_room(fetch) and not (fetch.urgent and self._make_room(fetch)):
            return None
        self._queue.remove(fetch)
        self._count(fetch)
        return fetch

    def _count(self, fetch: Fetch) -> None:
        self._used_bytes += fetch.nbytes
        fetch.counted = True
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        self.peak_units = max(self.peak_units, len(self._fetches) - len(self._queue))

    def _has_room(self, fetch: Fetch) -> bool:
        return self._has_room_for(fetch.nbytes)

    def _has_room_for(self, nbytes: int) -> bool:
        return self._used_bytes + nbytes <= self._budget_bytes

    def _make_room(self, fetch: Fetch) -> bool:
        """Give up what was fetched ahead, last asked first; wait for buffers that the stream still reads; take what the budget has left over."""
        begun = [other for other in self._fetches.values() if not other.attached and other.nbytes and other not in self._queue]
        for other in reversed(begun):
            if other.is_completed():
                self._give_up(other)
                if self._has_room(fetch):
                    return True
        if self._retired:
            return False  # the stream is not done with them: look again soon
        if not begun and self._used_bytes + fetch.nbytes <= self._budget_bytes + self._spare_bytes:
            self._is_overdrawn = True
            return True
        if not begun:
            self._refuse(fetch)
        return False

    def _refuse(self, fetch: Fetch) -> None:
        """Whoever waits for it raises CapacityError."""
        fetch.fail(self._too_much(fetch))
        self._queue.remove(fetch)
        del self._fetches[fetch.index]

    def _too_much(self, fetch: Fetch) -> CapacityError:
        others = [other for other in self._fetches.values() if other.attached and other is not fetch and other not in self._queue]
        live = ", ".join(f"{other.name} {format_bytes(other.nbytes)}" for other in others[:4]) + (", ..." if len(others) > 4 else "")
        tier = tier_of(self._device)
        return CapacityError(
            f"unit {fetch.name!r} needs {format_bytes(fetch.nbytes)}, but {len(others)} live units ({live}) hold {format_bytes(self._used_bytes)} of "
            f"the {format_bytes(self._budget_bytes + self._spare_bytes)} that budgets.{tier.value} leaves for them. "
            f"Gather one module at a time, raise budgets.{tier.value}, or name smaller units in units.classes."
        )

    def _return_overdraft(self) -> None:
        """Memory that only a large gather needed goes back to the system."""
        if self._is_overdrawn and self._used_bytes <= self._budget_bytes:
            self._is_overdrawn = any(fetch.attached and fetch.nbytes for fetch in self._fetches.values())
            self._buffers.shrink(self._budget_bytes - self._used_bytes)
            self._movers.slabs.trim()

    def _reap(self) -> None:
        while self._retired and self._retired[0].event.query():  # type: ignore[no-untyped-call]
            self._used_bytes -= self._retired.popleft().nbytes

    def _give_up(self, fetch: Fetch) -> None:
        """What was fetched ahead is not wanted any more; nothing of it is in the air, unless it failed."""
        if fetch.has_failed():
            self._drop(fetch)
        else:
            self._let_go(fetch)

    def _recycle(self, fetch: Fetch) -> None:
        """Forget it. Its buffers serve others from now on."""
        if self._fetches.get(fetch.index) is fetch:
            for flat in fetch.borrowed:
                self._buffers.give(flat, fetch.last_use)
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        """Forget it. Its buffers live on while anything is on its way into them."""
        if self._fetches.get(fetch.index) is not fetch:
            return
        del self._fetches[fetch.index]
        if fetch.counted:
            self._used_bytes -= fetch.nbytes
            fetch.borrowed.clear()
            self._return_overdraft()

    def _begin(self, fetch: Fetch) -> None:
        """Allocate the unit's buffers and start everything towards them. What rests where it is used is used in place."""
        resting, parts = self._resting[fetch.index], fetch.shards or fetch
        for flat in resting.flats:
            if flat.is_in_place:
                assert flat.whole is not None
                fetch.flats.append(flat.whole)
                continue
            target = self._allocate(flat.layout.numel, flat.layout.dtype)
            fetch.borrowed.append(target)
            fetch.flats.append(target)
            if flat.whole is not None:
                parts.expect(1)
                parts.started(self._copy(fetch, flat.whole, target[flat.kept.start : flat.kept.stop]))
            else:
                for key, interval in flat.chunks:
                    self._start(fetch, parts, key, _bytes_of(target, interval))
        if fetch.shards is not None:
            self._gather(fetch, fetch.shards)
        fetch.started()

    def _gather(self, fetch: Fetch, shards: Parts) -> None:
        """Everybody's shards, once this rank's have come: some of them are started later, by the uploader."""
        shards.started()
        for f, target in enumerate(fetch.borrowed):
            fetch.expect(1)
            fetch.started(self._movers.ranks.gather(target, self._resting[fetch.index].layout.flat_name(f), after=[shards]))

    def _start(self, fetch: Fetch, parts: Parts, key: ChunkKey, target: Tensor) -> None:
        store = self._movers.store
        resident = store.resident(key)
        parts.expect(1)
        if resident is not None:
            parts.started(self._copy(fetch, resident[: target.numel()], target))
        elif self._uploader is None:
            parts.started(store.fetch(key, target))
        else:
            self._uploader.bring(parts, key, target)

    def _copy(self, fetch: Fetch, resident: Tensor, target: Tensor) -> Work:
        """From where it rests in memory. What rests in HBM is copied after the update that may be queued, or it would overtake that."""
        after = fetch.asked_at if resident.device == self._device else None
        return self._movers.copies.upload(resident, target, fetch.name, after=after)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A unit's buffer, counted already; what is idle beside it stays within the budget."""
        with self._changed:
            return self._buffers.take(numel, dtype, max(0, self._budget_bytes - self._used_bytes))


def _bytes_of(flat: Tensor, interval: Interval) -> Tensor:
    return flat[interval.start : interval.stop].view(torch.uint8)
