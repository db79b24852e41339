"""The scheduler: brings units to the compute device ahead of their use, and takes them back, within one byte budget.

The training and autograd threads ask and wait. What only has to be copied from pinned memory they start themselves; one mover thread
starts everything else, in the order of the trace. On a CUDA device a second thread turns NVMe reads that have arrived into uploads, so
that the mover never waits for a disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from infinity import native
from infinity.device import tier_of
from infinity.errors import CapacityError, ClosedError, InfinityError, MoverError, TraceError
from infinity.kinds import Group, Lane
from infinity.runtime.ascent import Ascent
from infinity.runtime.collector import Collector
from infinity.runtime.fetches import Fetch, Parts
from infinity.runtime.movers import Movers
from infinity.runtime.resting import resting_unit
from infinity.runtime.room import Room
from infinity.runtime.trace import Trace
from infinity.runtime.units import Unit
from infinity.sharding.groups import first_other
from infinity.sizes import format_bytes
from infinity.storage.chunks import as_bytes
from infinity.storage.condition import Condition

EVENT_POLL_S = 0.0005
"""How often the mover looks whether a buffer that it needs back is not in use any more."""


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
        self._prefetch_units, self._deadline_s = prefetch_units, deadline_s
        self._is_alone = movers.share.is_alone
        self._gathers = movers.share.is_sharded(Group.PARAM)
        self._resting = {unit.layout.index: resting_unit(unit, movers.store, device, chunk_numel, movers.share) for unit in units}
        self._trace = Trace()
        self._collector = Collector()
        self._fetches: dict[int, Fetch] = {}
        self._queue: deque[Fetch] = deque()
        self.peak_units = 0
        self._closing = False
        self._error: BaseException | None = None
        self._changed = Condition()
        self._landing = Condition()
        self._room = Room(device, movers.slabs, movers.copies.upload_stream, budget_bytes=budget_bytes, spare_bytes=spare_bytes)
        self._ascent = Ascent(movers, self._room, self._changed, deadline_s=deadline_s, on_death=self._fail)
        self._in_memory = self._in_memory_everywhere() if self._gathers else frozenset()
        mover = threading.Thread(target=self._run, name="infinity-mover", daemon=True)
        self._threads = [mover, *self._ascent.threads]
        for thread in self._threads:
            thread.start()

    @property
    def peak_bytes(self) -> int:
        """The most that visits of units took at once on the compute device."""
        return self._room.peak_bytes

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
        with self._changed.lock:
            self._check()
            fetch = self._fetches.get(index)
            if fetch is not None and fetch.attached:
                self._drop(fetch)  # an interrupt came before the hooks had it: by now it may be old
                fetch = None
            try:
                fetch = fetch or self._request(index)
                fetch.urgent = fetch.attached = True
                for other in self._ahead_of(index):
                    self._request_ahead(other)
            finally:
                self._gather_begun()
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
        with self._changed.lock:
            fetch.attached = fetch.urgent = False
            if fetch in self._queue or fetch.has_failed():
                self._drop(fetch)
            self._changed.notify_all()

    def release(self, unit: Unit, *, is_changed: bool, is_shared: bool) -> None:
        """The hooks dropped their references; the current stream is the last that reads the buffers."""
        with self._changed.lock:
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
            self._room.retire(fetch)
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
        with self._changed.lock:
            for fetch in [fetch for fetch in self._fetches.values() if not fetch.attached and (fetch in self._queue or fetch.is_to_gather)]:
                self._drop(fetch)  # nothing of it will come
            stale = [fetch for fetch in self._fetches.values() if not fetch.attached]
        for fetch in stale:
            fetch.join()
        self._ascent.wait_for_reads(self._deadline_s)  # of units long released too: the update writes what they read
        with self._changed.lock:
            for fetch in stale:
                self._give_up(fetch)
            self._trace.restart()
            self._changed.notify_all()

    def warm(self) -> None:
        """Start on the first units of the next forward. Raises what the mover died of."""
        with self._changed.lock:
            self._check()
            self._request_first(lambda index: True)

    def warm_updated(self, is_updated: Callable[[int], bool]) -> None:
        """The same of those whose parameters will not change any more, in a step that has begun: a dead mover is no reason to break it off."""
        with self._changed.lock:
            if self._error is None and not self._closing and self._is_alone:  # ranks would not all be as far, and ask in different orders
                self._request_first(is_updated)

    def _request_first(self, is_wanted: Callable[[int], bool]) -> None:
        try:
            for place, index in enumerate(self._trace.first(self._prefetch_units + 1)):
                if index not in self._fetches and is_wanted(index):
                    self._request_ahead(index)
                if place == 0:
                    self._gather_begun()  # by itself: the forward waits for it
        finally:
            self._gather_begun()
        self._wake_mover()

    def close(self) -> None:
        """Stop the threads and drop every buffer. Waiters raise ClosedError."""
        self._collector.resume()
        with self._changed.lock:
            self._closing = True
            self._changed.notify_all()
        self._ascent.stop(_closed())
        for thread in self._threads:
            thread.join(self._deadline_s)
        for fetch in self._fetches.values():
            fetch.fail(_closed())
        self._error = None  # it holds on to the buffers of the frames that it went through
        self._fetches.clear()
        self._room.close()
        self._resting.clear()
        self._ascent.close()

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
        with self._changed.lock:
            fetches = list(self._fetches.values())
            self._changed.notify_all()
        self._ascent.fail(error)
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
                self._begin_to_gather(fetch)
            elif not fetch.nbytes or (resting.is_near and self._may_begin_now(fetch)):
                self._begin_now(fetch)
            else:
                self._queue.append(fetch)
        except BaseException:  # an interrupt in the middle: nobody would ever finish it
            self._drop(fetch)
            raise
        return fetch

    def _request_ahead(self, index: int) -> None:
        """Where ranks gather only what has room: what is begun, and when, follows from the program alone, so that all gather in one order."""
        if index not in self._fetches and (not self._gathers or self._room.fits(self._resting[index].visit_bytes)):
            self._request(index)

    def _in_memory_everywhere(self) -> frozenset[int]:
        """Units of which no rank has anything on NVMe."""
        mine = frozenset(index for index, resting in self._resting.items() if resting.is_in_memory)
        return mine.intersection(*self._movers.ranks.everybodys(mine, "which units rest in memory"))

    def _begin_to_gather(self, fetch: Fetch) -> None:
        """What rests in memory is gathered together with what else is asked for now. What some rank has to read is gathered by itself, and at
        once: to begin the next may wait for a disk.
        """
        is_read = fetch.index not in self._in_memory
        if is_read:
            self._gather_begun()
        self._begin_now(fetch)
        if is_read:
            self._gather_begun()

    def _gather_begun(self) -> None:
        """Have ranks gather what was begun since the last time."""
        begun = [(fetch, self._resting[fetch.index]) for fetch in self._fetches.values() if fetch.is_to_gather] if self._gathers else []
        if not begun or self._error is not None:  # with less than the others gather this rank would seem to take another way than they
            return
        try:
            self._ascent.gather(begun)
        except Exception as error:
            self._fail(error, f"unit {begun[0][0].name!r} could not be gathered")
        except BaseException:  # an interrupt in the middle: nobody would know which of them have been asked for
            for fetch, _ in begun:
                self._drop(fetch)
            raise

    def _make_room_in_order(self, fetch: Fetch) -> None:
        """Where ranks gather: give up what was fetched ahead, last asked first, once it has landed. Raises CapacityError where that is not enough."""
        ahead = [other for other in self._fetches.values() if not other.attached and other is not fetch and other.nbytes]
        while ahead and not self._room.fits(fetch.nbytes):
            other = ahead.pop()
            if other.is_to_gather:  # an interrupt has left it
                self._drop(other)
            else:
                other.join()
                self._give_up(other)
        if not self._room.fits(fetch.nbytes) and not self._room.overdraw(fetch.nbytes):
            raise self._too_much(fetch)

    def _may_begin_now(self, fetch: Fetch) -> bool:
        """Its room is there and nobody else's turn comes first."""
        self._room.reap()
        return not self._queue and self._error is None and not self._closing and self._room.fits(fetch.nbytes)

    def _begin_now(self, fetch: Fetch) -> None:
        """Start it from the thread that asks: the copies only have to be queued, and the mover would take the interpreter from this thread."""
        if fetch.nbytes:
            self._count(fetch)
        try:
            self._ascent.begin(fetch, self._resting[fetch.index])
        except Exception as error:
            self._fail(error, f"unit {fetch.name!r} could not be fetched")

    def _move(self) -> None:
        while True:
            with self._changed.lock:
                fetch = self._next()
                while fetch is None and not self._closing:
                    self._changed.wait(timeout=EVENT_POLL_S if self._must_poll() else None)
                    fetch = self._next()
                if fetch is None:
                    return
            self._ascent.begin(fetch, self._resting[fetch.index])

    def _must_poll(self) -> bool:
        """Whether what a fetch waits for comes without a word: the compute stream, or a read that has to land before it can be given up."""
        return bool(self._queue) and (self._room.waits_for_a_stream or any(fetch.urgent for fetch in self._queue))

    def _next(self) -> Fetch | None:
        """The next fetch that may begin, taken off the queue with its bytes; None when there is none or no room."""
        self._room.reap()
        fetch = next((fetch for fetch in self._queue if fetch.urgent), self._queue[0] if self._queue else None)
        if fetch is None or self._error is not None or self._closing:
            return None
        if not self._room.fits(fetch.nbytes) and not (fetch.urgent and self._make_room(fetch)):
            return None
        self._queue.remove(fetch)
        self._count(fetch)
        return fetch

    def _count(self, fetch: Fetch) -> None:
        self._room.count(fetch)
        self.peak_units = max(self.peak_units, len(self._fetches) - len(self._queue))

    def _make_room(self, fetch: Fetch) -> bool:
        """Give up what was fetched ahead, last asked first; wait for buffers that the stream still reads; take what the budget has left over."""
        begun = [other for other in self._fetches.values() if not other.attached and other.nbytes and other not in self._queue]
        for other in reversed(begun):
            if other.is_completed():
                self._give_up(other)
                if self._room.fits(fetch.nbytes):
                    return True
        if begun or self._room.waits_for_a_stream:
            return False  # look again soon
        if self._room.overdraw(fetch.nbytes):
            return True
        self._refuse(fetch)
        return False

    def _refuse(self, fetch: Fetch) -> None:
        """Whoever waits for it raises CapacityError."""
        fetch.fail(self._too_much(fetch))
        self._drop(fetch)

    def _too_much(self, fetch: Fetch) -> CapacityError:
        others = [other for other in self._fetches.values() if other.attached and other is not fetch and other not in self._queue]
        live = ", ".join(f"{other.name} {format_bytes(other.nbytes)}" for other in others[:4]) + (", ..." if len(others) > 4 else "")
        tier = tier_of(self._device)
        return CapacityError(
            f"unit {fetch.name!r} needs {format_bytes(fetch.nbytes)}, but {len(others)} live units ({live}) hold "
            f"{format_bytes(self._room.used_bytes)} of the {format_bytes(self._room.limit_bytes)} that budgets.{tier.value} leaves for them. "
            f"Gather one module at a time, raise budgets.{tier.value}, or name smaller units in units.classes."
        )

    def _give_up(self, fetch: Fetch) -> None:
        """What was fetched ahead is not wanted any more; nothing of it is in the air, unless it failed."""
        if fetch.has_failed():
            self._drop(fetch)
        else:
            self._let_go(fetch)

    def _recycle(self, fetch: Fetch) -> None:
        """Forget it. Its buffers serve others from now on."""
        if self._fetches.get(fetch.index) is fetch:
            fetch.attached = True  # an interrupt from here on: whoever asks for the unit again starts afresh
            self._room.reuse(fetch)
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        """Forget it. Its buffers live on while anything is on its way into them."""
        if self._fetches.get(fetch.index) is not fetch:
            return
        if fetch in self._queue:
            self._queue.remove(fetch)
        self._room.uncount(fetch)  # first: an interrupt in between may leave it here, but not forgotten and counted for good
        del self._fetches[fetch.index]
        fetch.borrowed.clear()
        if fetch.nbytes:
            self._room.repay(is_last=lambda: not any(other.attached and other.nbytes for other in self._fetches.values()))


def _closed() -> ClosedError:
    """One for each who waits: an error that was raised holds on to the buffers of the frames that it went through."""
    return ClosedError("the engine was closed while a unit was on its way")
