"""The ranks of one job: collectives that one thread issues in one order, and an error that names a rank where one does not come.

torch.distributed does the work: gloo between CPU tensors. A world of one rank takes the same calls and moves nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.errors import ClosedError, ConfigError, InfinityError, MoverError, RankError, TraceError
from infinity.kinds import Lane
from infinity.sharding.groups import ALONE_HERE, COLLECTIVE, Groups, Here, join_groups
from infinity.sharding.layout import Interval
from infinity.sharding.watch import FAILED, Watch
from infinity.storage.work import COMPLETED, Work, join
from infinity.timeline import Timeline, this_host

logger = logging.getLogger("infinity")

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By their names since torch 2.13, or the older ones."""

BETWEEN = "between two collectives"
"""What a rank is at that computes."""

PATIENCE = 1.25
"""Timeouts after which the watch has missed a rank that is dead: one, and the beats around it."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
"""Between two looks at who has come."""

T = TypeVar("T")
Reduced = Callable[[Tensor, frozenset[int]], None]
_Operation = Callable[[], object]


class RankWork(Work):
    """A collective that waits for its turn, or for other ranks."""

    def __init__(self, name: str, limit_s: float | None) -> None:
        """`limit_s`: after which its end would have been told by the ranks' own timeout; None where a rank may take as long as it needs."""
        self.name, self._limit_s = name, limit_s
        self._over = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The first end counts."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Other ranks may take their time: no deadline of this machine's movers is shorter than the ranks' timeout."""
        limit_s = None if self._limit_s is None else max(timeout_s or 0.0, self._limit_s)
        if not self._over.wait(limit_s):
            raise MoverError(f"{self.name} was not over after {limit_s:g} s, and nobody said why")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_over_within(self, seconds: float) -> bool:
        """As `is_completed`, after at most so long."""
        return self._over.wait(seconds)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A collective in the queue."""

    work: RankWork
    operation: _Operation
    nbytes: int
    after: Sequence[Work]
    """What has to be over on this rank first."""
    among: Any
    """The process group whose ranks do it together."""
    is_patient: bool
    """It begins once every rank has come to it, however long that takes."""


class Ranks:
    """This process's place among the ranks, and the collectives between them.

    Whatever is asked for is done in the order of asking, by one thread: so ranks that ask in the same order never wait for each other
    crosswise. Tensors belong to the collective until its work is over. After a RankError every further call raises the same error.
    """

    def __init__(self, *, timeout_s: float, timeline: Timeline, groups: Groups | None = None, store: Any = None) -> None:
        """`groups` None: a world of one. `store`: any that all ranks share. Waits at most `timeout_s` for another rank."""
        self._timeout_s, self._timeline = timeout_s, timeline
        self._group: Any = None if groups is None else groups.everyone
        self._shards: Any = None if groups is None else groups.shards
        self._replicas: Any = None if groups is None else groups.replicas
        self.rank = 0 if groups is None else dist.get_rank(self._group)
        self.world_size = 1 if groups is None else dist.get_world_size(self._group)
        self.shard_rank = 0 if groups is None else dist.get_rank(self._shards)
        self.shard_size = 1 if groups is None else dist.get_world_size(self._shards)
        """Over how many ranks a flat buffer is split. The others keep replicas of the same shards."""
        self.here = ALONE_HERE
        """Among the ranks of this machine."""
        self.limit_s = 3 * COLLECTIVE * timeout_s if self.world_size > 1 else 0.0
        """Seconds that a collective may take, from asking: it may wait for one before it, and for itself, and then for whom to blame."""
        self._begun = 0
        self._error: InfinityError | None = None
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._waiting: dict[RankWork, None] = {}
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        if groups is not None and store is not None and self.world_size > 1:
            beats = dist.PrefixStore(f"infinity/{groups.everyone.group_name}", store)  # type: ignore[attr-defined]
            self._watch = Watch(beats, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s, on_loss=self._lose)
            self._thread = threading.Thread(target=self._run, name="infinity-collectives", daemon=True)
            self._thread.start()

    # -- collectives -------------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, name: str, *, after: Sequence[Work] = ()) -> Work:
        """All-gather in place: `full` [shard_size x n] holds this rank's shard once `after` is over, and everybody's once the work is."""
        if self.shard_size == 1:
            return join(after)
        own = full[_slice(self.shard(full.numel()))]
        return self._ask(f"gather of {name}", full.nbytes, lambda: _all_gather(full, own, group=self._shards), after, self._shards)

    def reduce(self, full: Tensor, members: frozenset[int], count: int, name: str, then: Reduced) -> Work:
        """Reduce-scatter in place, the mean over all ranks: `then` gets this rank's shard of `full` [shard_size x n], and who of `count` members
        any rank has. It is called before the work is over, from the thread of the collectives.

        The other shards' contents are undefined then. Every rank divides before it adds, as DistributedDataParallel does.
        """
        if self.world_size == 1:
            then(full, members)
            return COMPLETED

        def reduce() -> None:
            present = self._union(members, count)
            then(self._average(full), present)

        return self._ask(f"reduce of {name}", full.nbytes, reduce)

    def average(self, full: Tensor, name: str, *, after: Sequence[Work] = ()) -> Work:
        """The same where all ranks know already who has a part in it, once `after` is over: the mean is in this rank's shard of `full`."""
        return self._ask(f"mean of {name}", full.nbytes, lambda: self._average(full), after)

    def total(self, value: float, name: str) -> float:
        """The sum over all shards, in fp64 and in their order: the same number on every rank. Waits."""
        if self.shard_size == 1:
            return value
        cells, mine = torch.zeros(self.shard_size, dtype=torch.float64), torch.tensor([value], dtype=torch.float64)
        self._ask(f"sum of {name}", cells.nbytes, lambda: _all_gather(cells, mine, group=self._shards), among=self._shards).wait()
        return float(sum(cells.tolist()))

    def broadcast(self, tensor: Tensor, name: str) -> Work:
        """Once the work is over, everybody's `tensor` (contiguous, on the CPU, of any dtype) is rank 0's to the bit."""
        return self._ask(f"broadcast of {name}", tensor.nbytes, lambda: dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group))

    def everybodys(self, value: T, name: str) -> list[T]:
        """What each rank has under this name, by rank; anything that pickles. Waits."""
        return self._exchange(value, name)

    def check_same(self, value: object, name: str, hint: str) -> None:
        """Raise ConfigError, on all ranks, when one of them has another value than the others."""
        values = self.everybodys(value, name)
        if any(other != values[0] for other in values):
            told = "; ".join(f"{other!r} on {_named(values, other)}" for other in _distinct(values))
            raise ConfigError(f"{name} differs between ranks: {told}. {hint}")

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """The body, without collectives in it, succeeds on all ranks or on none: RankError where it went well here and failed elsewhere.

        A rank that lives may take as long as it needs.
        """
        try:
            yield
        except Exception as error:
            self._exchange(f"{type(error).__name__}: {error}", what, is_patient=True)
            raise
        failures = [(rank, told) for rank, told in enumerate(self._exchange("", what, is_patient=True)) if told]
        if failures:
            raise RankError(f"{what} failed on rank {failures[0][0]}, of {len(failures)} that failed: {failures[0][1]}")

    @contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """The body, with collectives in it, succeeds on all ranks, or none does anything together any more: RankError where it failed elsewhere."""
        try:
            yield
        except Exception as error:
            with suppress(InfinityError):  # the others', which this one has caused; or that which the body ended with
                self._ask(f"{FAILED}{what} failed on rank {self.rank}: {type(error).__name__}: {error}", 0, lambda: None).wait()
            raise
        self.everybodys(None, what)

    def shard(self, numel: int) -> Interval:
        """This rank's part of a full flat buffer."""
        part = numel // self.shard_size
        return Interval(self.shard_rank * part, (self.shard_rank + 1) * part)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """What was asked for is done first, unless a rank is lost. The process group stays its owner's."""
        if self._watch is None:
            return
        self._asked.put(None)
        self._thread.join(0 if self._error is not None else self._timeout_s)
        self._watch.close()
        self._error = self._error or ClosedError("the engine is closed: its ranks do nothing together any more")

    def _average(self, full: Tensor) -> Tensor:
        """This rank's shard of the mean over all ranks; the rest of `full` is undefined from here on."""
        own = full[_slice(self.shard(full.numel()))]
        full.div_(self.world_size)
        if self.shard_size > 1:
            _reduce_scatter(own, full, group=self._shards)
        if self._replicas is not None:
            dist.all_reduce(own, group=self._replicas)
        return own

    def _exchange(self, value: T, name: str, *, is_patient: bool = False) -> list[T]:
        values: list[Any] = [value] * self.world_size
        self._ask(f"comparison of {name}", 0, lambda: dist.all_gather_object(values, value, group=self._group), is_patient=is_patient).wait()
        return values

    def _union(self, members: frozenset[int], count: int) -> frozenset[int]:
        mask = torch.zeros(count, dtype=torch.uint8)
        mask[sorted(members)] = 1
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group)
        return frozenset(mask.nonzero().flatten().tolist())

    def _ask(
        self, name: str, nbytes: int, operation: _Operation, after: Sequence[Work] = (), among: Any = None, is_patient: bool = False
    ) -> Work:
        if self.world_size == 1:
            return COMPLETED
        work = RankWork(name, None if is_patient else self.limit_s)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._waiting[work] = None
        self._asked.put(_Asked(work, operation, nbytes, after, among or self._group, is_patient))
        return work

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work = asked.work
            if work.is_completed():  # a rank was lost before its turn
                continue
            error = self._do(asked)
            del asked  # the tensors are whose they were
            if error is not None:
                self._lose(error)
                continue
            with self._lock:
                self._waiting.pop(work, None)
            work.end()

    def _do(self, asked: _Asked) -> InfinityError | None:
        """One collective. What goes wrong beside it, in what it waits for or leads to, is this rank's own error, and the others' loss."""
        assert self._watch is not None
        name, began = asked.work.name, time.monotonic()
        self._begun += 1
        self._watch.tell(self._begun, name)
        try:
            for motion in asked.after:
                motion.wait()
            if asked.is_patient:
                self._meet()
            with self._timeline.span(Lane.COMM, name, asked.nbytes):
                self._agree(name, asked.among)
                asked.operation()
        except InfinityError as error:
            return error
        except Exception as error:
            return self._blame(asked.work, error, waited_s=time.monotonic() - began)
        self._watch.tell(self._begun, BETWEEN)
        return None

    def _meet(self) -> None:
        """Wait until every rank has come to this collective, or one is lost."""
        assert self._watch is not None
        self._watch.come_to(self._begun)
        pause_s = _SHORTEST_PAUSE_S
        while not self._watch.have_all_come_to(self._begun):
            if self._error is not None:
                raise self._error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _agree(self, name: str, group: Any) -> None:
        """Raise TraceError, on all ranks, where they have come to different collectives: of gathers of equal size nobody else would notice.

        RankError where one has come to its failure instead.
        """
        mine = torch.tensor([zlib.crc32(name.encode())])
        size = dist.get_world_size(group)
        everybodys = torch.empty(size, dtype=mine.dtype)
        _all_gather(everybodys, mine, group=group)
        if len(set(everybodys.tolist())) > 1:
            names: list[Any] = [name] * size
            dist.all_gather_object(names, name, group=group)
            failed = [other.removeprefix(FAILED) for other in names if other.startswith(FAILED)]
            if failed:
                raise RankError(failed[0])
            told = "; ".join(f"{other!r} on {_named(names, other)}" for other in _distinct(names))
            raise TraceError(
                f"the ranks took different ways through the model, and nothing more is updated. Collective number {self._begun} is {told}. "
                "Let every rank call the same modules in the same order. Modules that only some batches use, such as experts, belong into one unit: "
                "name the class around them in units.classes"
            )

    def _blame(self, work: RankWork, cause: Exception, waited_s: float) -> InfinityError:
        """A collective failed here. A rank that is dead is soon missed by the watch; one that lives and is behind is known by its count."""
        assert self._watch is not None
        if work.is_over_within(max(0.0, self._timeout_s * PATIENCE - waited_s)):
            assert self._error is not None
            return self._error
        behind = self._watch.laggard()
        told = "all other ranks have come as far" if behind is None else f"rank {behind[0]} is behind, at: {behind[1]}"
        error = RankError(f"{work.name}, collective number {self._begun}, failed on rank {self.rank}; {told}. {cause}")
        error.__cause__ = cause
        return error

    def _lose(self, error: InfinityError) -> None:
        """Whoever waits raises it, now and from now on."""
        if self._watch is not None:
            self._watch.tell(self._begun, f"{FAILED}{error}")
        with self._lock:
            self._error = self._error or error
            works = list(self._waiting)
            self._waiting.clear()
        for work in works:
            work.end(self._error)


def join_ranks(device: str, *, timeout_s: float, timeline: Timeline, shard_group: int | None = None) -> Ranks:
    """The ranks of this job, as `join_groups` finds them; alone where there are none."""
    groups = join_groups(device, timeout_s=timeout_s, shard_group=shard_group)
    store = None if groups is None else dist.distributed_c10d._get_default_store()
    ranks = Ranks(timeout_s=timeout_s, timeline=timeline, groups=groups, store=store)
    hosts = ranks.everybodys(this_host(), "the machines")
    ranks.here = Here(hosts[: ranks.rank].count(this_host()), hosts.count(this_host()))
    return ranks


ALONE = Ranks(timeout_s=0.0, timeline=Timeline())
"""A process without others."""


def _slice(run: Interval) -> slice:
    return slice(run.start, run.stop)


def _distinct(values: Sequence[T]) -> list[T]:
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _named(values: Sequence[object], value: object) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{', ...' if len(ranks) > 8 else ''}"
