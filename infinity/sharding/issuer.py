"""One thread that issues collectives in the order of asking, compares their names between ranks, and tells who failed when one does."""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from infinity.errors import ClosedError, InfinityError, MoverError, RankError, TraceError
from infinity.kinds import Lane
from infinity.sharding.calls import Call, Calls, all_gather, finish, no_calls, telling
from infinity.sharding.groups import COLLECTIVE
from infinity.sharding.watch import FAILED, SharedStore, Watch
from infinity.storage.motions import Motion, Motions
from infinity.storage.streams import OnStream
from infinity.storage.work import Work, follow, join
from infinity.timeline import Timeline

logger = logging.getLogger("infinity")

BETWEEN = "between two collectives"
"""What a rank is at that computes."""

PATIENCE = 1.25
"""Timeouts after which the watch has missed a rank that is dead: one, and the beats around it."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
"""Between two looks at who has come."""

_GLANCE_S = 0.25
"""At whether a rank is lost, while gloo waits for it."""

_LAST_WORDS_S = 1.0
"""For the thread to end after an error: it does, unless a device hangs. And for the device's abort."""

_LOOK_EVERY_S = 1.0
"""At what the device has, while nothing is asked for."""

T = TypeVar("T")


def longest_wait_s(timeout_s: float) -> float:
    """From asking for a collective to its end: it may wait for one before it, and for itself, and then for whom to blame."""
    return 3 * COLLECTIVE * timeout_s


class RankWork:
    """A collective that waits for its turn, or for other ranks; of tensors on a GPU, then for its stream."""

    def __init__(self, name: str, limit_s: float | None) -> None:
        """`limit_s`: after which its end would have been told by the ranks' own timeout; None where a rank may take as long as it needs."""
        self.name, self._limit_s = name, limit_s
        self._has_begun = threading.Event()
        """The host is done with it: it is over, or queued as `motion`."""
        self._motion: Motion | None = None
        self._error: BaseException | None = None
        self.begun_at = float("inf")
        """When the host was done with it, on the monotonic clock."""

    def begin(self, motion: Motion | None) -> None:
        """The host is done with it, and the device will be once the motion is over."""
        self._motion, self.begun_at = motion, time.monotonic()
        self._has_begun.set()

    def fail(self, error: BaseException) -> None:
        """It will not come, unless it is known to be over: the device is not asked, which may be hung. The first failure counts."""
        is_over = self._has_begun.is_set() and self._motion is None
        if not is_over and self._error is None:
            self._error = error
            self._has_begun.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Other ranks may take their time: no deadline of this machine's movers is shorter than the ranks' timeout."""
        limit_s = None if self._limit_s is None else max(timeout_s or 0.0, self._limit_s)
        self._wait_begun(limit_s)
        if self._motion is not None:
            self._motion.wait(limit_s)
            self._check()

    def is_completed(self) -> bool:
        return self._has_begun.is_set() and (self._error is not None or self._motion is None or self._motion.is_completed())

    def sync_current_stream(self) -> None:
        """Waits for the other ranks' hosts, and has the stream wait for their devices."""
        self._wait_begun(self._limit_s)
        if self._motion is not None:
            self._motion.sync_current_stream()

    def _wait_begun(self, limit_s: float | None) -> None:
        if not self._has_begun.wait(limit_s):
            raise MoverError(f"{self.name} was not over after {limit_s:g} s, and nobody said why")
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def has_failed(self) -> bool:
        """Before its turn, or since."""
        return self._error is not None

    def fails_within(self, seconds: float) -> bool:
        """Whether it does, of one that the host is not done with."""
        return self._has_begun.wait(seconds)


@dataclass(frozen=True, slots=True)
class Collective:
    """What ranks do together with a tensor of each."""

    name: str
    tensor: torch.Tensor
    """What passes. Where it is on a GPU the device does it, on the stream of collectives."""
    operation: Callable[[Any], Calls[object]]
    """Given what the hosts' meeting before it has found out, or None."""
    after: Sequence[Work] = ()
    """What has to be over on this rank first."""
    holds: Sequence[torch.Tensor] = ()
    """What the device may need when everybody else has let go of it."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the ranks' hosts come together before a turn of collectives: they compare the names of all of them."""

    among: Any
    """The process group whose ranks do them together."""
    number: int = 0
    """Of 64 bits with its sign, compared with the names."""
    first: Callable[[], Calls[Any]] | None = None
    """What the hosts do where not all of them have the same `number`."""
    is_patient: bool = False
    """It begins once every rank has come to it, however long that takes."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Collectives in the queue, one after the other."""

    meeting: Meeting
    names: Sequence[str]
    left: deque[tuple[RankWork, Collective]]
    """Those that have not been begun: the tensors of the others are whose they were."""


class Issuer:
    """The thread, and what has been asked of it. After an error every further call raises the same one."""

    def __init__(
        self,
        store: SharedStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        timeline: Timeline,
        device: torch.device,
        abort: Callable[[], None],
    ) -> None:
        """`abort` ends what is queued on `device` and would wait for a lost rank for ever."""
        self._rank, self._timeout_s, self._timeline, self._device, self._abort = rank, timeout_s, timeline, device, abort
        self._motions = Motions(device, timeline, (Lane.COMM,), is_urgent=True) if device.type == "cuda" else None
        self._begun = 0
        """How many collectives, counting the one under way."""
        self._error: InfinityError | None = None
        self._aborter: threading.Thread | None = None
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._waiting: dict[RankWork, None] = {}
        self._lock = threading.Lock()
        self._watch = Watch(store, rank=rank, world_size=world_size, timeout_s=timeout_s, on_loss=self.lose)
        self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
        self._thread.start()

    def ask(self, collectives: Sequence[Collective], meeting: Meeting) -> list[RankWork]:
        """Put a turn into the queue. Raises what a rank was lost with.

        The hosts meet before its first collective, and do not wait for each other again. A device that comes early to one of the others waits
        there for the slowest rank's, and computes the slower meanwhile: so what they come `after` is over soon on every rank.
        """
        limit_s = None if meeting.is_patient else longest_wait_s(self._timeout_s)
        works = [RankWork(collective.name, limit_s) for collective in collectives]
        turn = _Turn(meeting, [collective.name for collective in collectives], deque(zip(works, collectives, strict=True)))
        with self._lock:
            if self._error is not None:
                raise self._error
            self._turns.put(turn)  # first: an interrupt in between must not leave what would never be over
            self._waiting.update(dict.fromkeys(works))
        return works

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was asked for is over, however it went. Raises MoverError at the deadline."""
        with self._lock:
            asked = join(self._waiting)
        try:
            asked.wait(timeout_s)
        except Exception:
            if not asked.is_completed():
                raise

    def close(self, limit_s: float | None = None) -> bool:
        """Do what was asked for first, unless a rank is lost. True when it has been done to its end, within `limit_s` or the ranks' timeout."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        closed = ClosedError("the engine is closed: its ranks do nothing together any more")
        self._turns.put(None)
        self._thread.join(limit_s if self._error is None else _LAST_WORDS_S)
        has_ended = not self._thread.is_alive()
        if not has_ended and self._fail(closed):  # it waits for a rank that does not come
            self._thread.join(_LAST_WORDS_S)
        is_drained = has_ended and self._drain(limit_s)
        self._watch.close()  # after the device, which may hang where a rank is lost now
        is_over = is_drained and self._has_aborted()
        if is_over:
            self._abort = _do_not_abort  # it holds on to the process groups
        self._error = self._error or closed
        return is_over

    def _has_aborted(self) -> bool:
        """What was begun of it. Its thread must not come back once Python has begun to end: that aborts the process."""
        if self._aborter is not None:
            self._aborter.join(_LAST_WORDS_S)
        return self._aborter is None or not self._aborter.is_alive()

    def _drain(self, limit_s: float) -> bool:
        """Wait for what the device has. False where it does not end."""
        if self._motions is None:
            return True
        try:
            self._motions.close(limit_s)
            return True
        except Exception as error:
            logger.warning("closing: %s", error)
            return False

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while (turn := self._next()) is not None:
                self._take_turn(turn)
                del turn  # the tensors that are left of it, where a rank was lost, are whose they were
        except BaseException as error:
            self.lose(MoverError(f"the thread of collectives died on rank {self._rank}: {type(error).__name__}: {error}"))
            raise

    def _next(self) -> _Turn | None:
        """What was asked for next. Meanwhile a device that hangs is found: nobody else would say so."""
        while True:
            try:
                return self._turns.get(timeout=_LOOK_EVERY_S if self._motions is not None else None)
            except queue.Empty:
                self._check_device()

    def _check_device(self) -> None:
        self._forget_completed()
        with self._lock:
            oldest = next(iter(self._waiting), None)
        limit_s = COLLECTIVE * self._timeout_s
        if oldest is not None and time.monotonic() - oldest.begun_at > limit_s:
            self.lose(RankError(f"all ranks have come to {oldest.name}, which was not over on the device of rank {self._rank} within {limit_s:g} s"))

    def _take_turn(self, turn: _Turn) -> None:
        agreement: Calls[Any] = self._agree(turn)
        while turn.left:
            work, collective = turn.left.popleft()
            if work.has_failed():  # a rank was lost before, and all the others have failed too
                return
            outcome = self._do(work, collective, agreement, turn.meeting)
            if isinstance(outcome, InfinityError):
                self.lose(outcome)
                return
            work.begin(outcome)
            self._forget_completed()
            agreement = no_calls()

    def _forget_completed(self) -> None:
        with self._lock:
            while self._waiting and (oldest := next(iter(self._waiting))).is_completed():
                del self._waiting[oldest]

    def _do(self, work: RankWork, collective: Collective, agreement: Calls[Any], meeting: Meeting) -> Motion | InfinityError | None:
        """One collective, to its end or up to where the device has it. What goes wrong beside it, in what it waits for or leads to, is this
        rank's own error, and the others' loss."""
        began = time.monotonic()
        self._begun += 1
        self._watch.tell(self._begun, collective.name)
        try:
            motion = None
            if collective.tensor.is_cuda:
                motion = self._queue(collective, agreement)
            else:
                self._perform(collective, agreement, meeting)
        except InfinityError as error:
            return error
        except Exception as error:
            return self._blame(work, error, waited_s=time.monotonic() - began)
        self._watch.tell(self._begun, BETWEEN)
        return motion

    def _perform(self, collective: Collective, agreement: Calls[Any], meeting: Meeting) -> None:
        """From beginning to end."""
        for motion in collective.after:
            motion.wait()
        if meeting.is_patient:
            self._meet()
        until = self._until()
        with self._timeline.span(Lane.COMM, collective.name, collective.tensor.nbytes):
            self._finish(collective.operation(self._finish(agreement, until)), until)

    def _queue(self, collective: Collective, agreement: Calls[Any]) -> Motion:
        """On the stream of collectives, once every rank's host has come to its turn."""
        assert self._motions is not None
        with OnStream(self._motions.stream(Lane.COMM)):
            for motion in collective.after:
                follow(motion)
        until = self._until()
        told = self._finish(agreement, until)

        def operation() -> None:
            self._finish(collective.operation(told), until)

        return self._motions.run(Lane.COMM, collective.name, collective.tensor.nbytes, operation, collective.holds)

    def _agree(self, turn: _Turn) -> Calls[Any]:
        """What the ranks have come to is the same on all; then what they tell each other."""
        meeting = turn.meeting
        is_same = yield from self._compare(turn.names, meeting.number, meeting.among)
        if is_same or meeting.first is None:
            return None
        return (yield from meeting.first())

    def _meet(self) -> None:
        """Wait until every rank has come to this collective, or one is lost."""
        self._watch.come_to(self._begun)
        pause_s = _SHORTEST_PAUSE_S
        while not self._watch.have_all_come_to(self._begun):
            if self._error is not None:
                raise self._error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _compare(self, names: Sequence[str], number: int, group: Any) -> Calls[bool]:
        """Whether all ranks have the same number. Raises TraceError, on all of them, where they have come to different collectives: of gathers of
        equal size nobody else would notice. RankError where one has come to its failure instead.
        """
        mine = torch.tensor([zlib.crc32("\n".join(names).encode()), number])
        everybodys = torch.empty(dist.get_world_size(group) * len(mine), dtype=mine.dtype)
        yield Call(all_gather(everybodys, mine, group=group, async_op=True), group, (everybodys, mine))
        told = everybodys.tolist()
        if len(set(told[::2])) > 1:
            ranks, turns = zip(*(yield from telling(group, (self._rank, names))), strict=True)
            self._refuse(turns, ranks)
        return len(set(told[1::2])) == 1

    def _until(self) -> float:
        """When what ranks begin together now has to be over, on the monotonic clock."""
        return time.monotonic() + COLLECTIVE * self._timeout_s

    def _finish(self, calls: Calls[T], until: float) -> T:
        return finish(calls, lambda call, work: self._await(call, work, until))

    def _await(self, call: Call, work: dist.Work, until: float) -> None:
        """Wait for gloo, or until a rank is lost: for one that was stopped gloo itself waits to the group's timeout, and this thread must not come
        back once Python has begun to end, which aborts the process. Raises TimeoutError where a rank lives and does not come, or is too slow.
        """
        while not work.is_completed():
            if self._error is not None:
                _keep(call)
                raise self._error
            if time.monotonic() > until:
                _keep(call)
                raise TimeoutError(
                    f"{COLLECTIVE * self._timeout_s:g} s have passed, {COLLECTIVE} times zero.timeout_s: raise that where a rank may be alone, or a "
                    "transfer take, for so long"
                )
            with suppress(RuntimeError):  # the glance is over, or gloo has failed
                work.wait(timedelta(seconds=_GLANCE_S))
        work.wait()

    def _refuse(self, turns: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
        """What those ranks have come to differs."""
        failed = [name.removeprefix(FAILED) for names in turns for name in names if name.startswith(FAILED)]
        if failed:
            raise RankError(failed[0])
        place, names = next((place, names) for place, names in enumerate(zip_longest(*turns)) if len(set(names)) > 1)
        told = "; ".join(f"{repr(name) if name else 'nothing more at once'} on {named_ranks(names, name, ranks)}" for name in distinct(names))
        raise TraceError(
            f"the ranks took different ways through the model, and nothing more is updated. Collective number {self._begun + place} is {told}. "
            "Let every rank call the same modules, and engine.gathered, in the same order. Modules that only some batches use, such as experts, "
            "belong into one unit: name the class around them in units.classes"
        )

    def _blame(self, work: RankWork, cause: Exception, waited_s: float) -> InfinityError:
        """A collective failed here. A rank that is dead is soon missed by the watch; one that lives and is behind is known by its count."""
        if work.fails_within(max(0.0, self._timeout_s * PATIENCE - waited_s)):
            assert self._error is not None
            return self._error
        behind = self._watch.laggard()
        told = "all other ranks have come as far" if behind is None else f"rank {behind[0]} is behind, at: {behind[1]}"
        error = RankError(f"{work.name}, collective number {self._begun}, failed on rank {self._rank}; {told}. {cause}")
        error.__cause__ = cause
        return error

    def lose(self, error: InfinityError) -> None:
        """Whoever waits raises it, now and from now on; or what there was before it."""
        if self._fail(error, told=f"{FAILED}{error}") and self._motions is not None:
            aborter = threading.Thread(target=self._abort_device, name="infinity-abort", daemon=True)  # it may take long, and never end
            with suppress(RuntimeError):  # Python has begun to end
                aborter.start()
                self._aborter = aborter

    def _fail(self, error: InfinityError, told: str | None = None) -> bool:
        """Whether it is the first. Other ranks read what is `told`."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            if told is not None:
                self._watch.tell(self._begun, told)
            for work in self._waiting:
                work.fail(error)
            self._waiting.clear()
        return True

    def _abort_device(self) -> None:
        try:
            self._abort()
        except Exception as error:
            logger.warning("what is queued between the ranks' GPUs could not be ended: %s", error)


def _keep(call: Call) -> None:
    """What gloo has is not let go of any more, not at Python's end either, which empties every module: tensors, as the last to do so would be
    gloo's thread, which then aborts the process; and the group, as that waits for what is in it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))


def _do_not_abort() -> None:
    """What there is to end once the groups are gone."""


def distinct(values: Sequence[T]) -> list[T]:
    """Each once, in order."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def named_ranks(values: Sequence[object], value: object, ranks: Sequence[int] | None = None) -> str:
    """Which of the ranks have this value; `values` are those of `ranks`, or of all."""
    those = [str(rank) for rank, other in zip(ranks or range(len(values)), values, strict=True) if other == value]
    return f"rank{'s' if len(those) > 1 else ''} {', '.join(those[:8])}{', ...' if len(those) > 8 else ''}"
