"""The ranks of one job: collectives in one order, and an error that names a rank where one does not come.

torch.distributed does the work: gloo between tensors on the CPU, NCCL between those on GPUs. A world of one rank takes the same calls and
moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.errors import ConfigError, InfinityError, RankError
from infinity.sharding.calls import Call, Calls, all_gather, no_calls, reduce_scatter, telling
from infinity.sharding.groups import ALONE_HERE, Groups, join_groups
from infinity.sharding.issuer import Collective, Issuer, Meeting, distinct, named_ranks
from infinity.sharding.layout import Interval
from infinity.sharding.watch import FAILED
from infinity.storage.stream_work import stream_work
from infinity.storage.work import COMPLETED, Work, join
from infinity.timeline import Timeline

_NOTHING = torch.empty(0)
"""What moves where values are only compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """An all-gather over the ranks that split a flat buffer."""

    full: Tensor
    """[shard_size x n]: everybody's shards, once it is over."""
    name: str
    after: Sequence[Work] = ()
    """What has to be over on this rank first."""
    own: Tensor | None = None
    """[n]: where this rank's shard is, if not in its place in `full`. For ranks that have each a part of it."""


T = TypeVar("T")
Reduced = Callable[[Tensor, frozenset[int]], None]


class Ranks:
    """This process's place among the ranks, and the collectives between them.

    Whatever is asked for is done in the order of asking, by one thread, on a GPU by one stream: so ranks that ask in the same order never
    wait for each other crosswise. Tensors belong to the collective until its work is over. After a RankError every further call raises the
    same error.
    """

    def __init__(self, *, timeout_s: float, timeline: Timeline, groups: Groups | None = None, store: Any = None) -> None:
        """`groups` None: a world of one. `store`: any that all ranks share. Waits at most `timeout_s` for another rank."""
        self._groups = groups
        self._group: Any = None if groups is None else groups.everyone
        self._shards: Any = None if groups is None else groups.shards
        self._replicas: Any = None if groups is None else groups.replicas
        self.rank = 0 if groups is None else dist.get_rank(self._group)
        self.world_size = 1 if groups is None else dist.get_world_size(self._group)
        self.shard_rank = 0 if groups is None else dist.get_rank(self._shards)
        self.shard_size = 1 if groups is None else dist.get_world_size(self._shards)
        """Over how many ranks a flat buffer is split. The others keep replicas of the same shards."""
        self.here = ALONE_HERE if groups is None else groups.here
        """Among the ranks of this machine."""
        self.device = torch.device("cpu") if groups is None else groups.device
        """On which this rank computes; of a world of one it is not known here."""
        self.on_card = 1 if groups is None else groups.on_card
        """How many ranks compute there."""
        self._issuer: Issuer | None = None
        if groups is not None and self.world_size > 1:
            beats = dist.PrefixStore(f"infinity/{groups.everyone.group_name}", store)  # type: ignore[attr-defined]
            self._issuer = Issuer(
                beats,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=timeout_s,
                timeline=timeline,
                device=groups.device,
                abort=groups.abort,
            )

    # -- collectives -------------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, name: str, *, after: Sequence[Work] = ()) -> Work:
        """All-gather in place: `full` [shard_size x n] holds this rank's shard once `after` is over, and everybody's once the work is."""
        return self.gather_each([Gather(full, name, after)])[0]

    def gather_each(self, gathers: Sequence[Gather]) -> list[Work]:
        """Several in a row. The ranks' hosts talk to each other once."""
        if self.shard_size == 1 or self._issuer is None:
            assert all(gather.own is None for gather in gathers), "one shard is all there is, and nothing moves"
            return [join(gather.after) for gather in gathers]
        return list(self._issuer.ask([self._gathering(gather) for gather in gathers], Meeting(self._shards)))

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was asked for is over, also what nobody else waits for any more; however it went. Raises MoverError at the deadline."""
        if self._issuer is not None:
            self._issuer.settle(timeout_s)

    def reduce(self, full: Tensor, members: frozenset[int], count: int, name: str, then: Reduced) -> Work:
        """Reduce-scatter in place, the mean over all ranks: `then` gets this rank's shard of `full` [shard_size x n], and who of `count` members
        any rank has. It is called before the work is over, from the thread of the collectives, with their stream current.

        What the caller's current stream has queued comes first. The other shards' contents are undefined then. Every rank divides before it
        adds, as DistributedDataParallel does.
        """
        if self.world_size == 1:
            then(full, members)
            return COMPLETED

        def mean(union: frozenset[int] | None) -> Calls[None]:
            own = yield from self._average(full)
            then(own, members if union is None else union)

        collective = Collective(f"reduce of {name}", full, mean, [stream_work(full.device)])
        return self._ask(collective, Meeting(self._group, _digest(members), partial(self._union, members, count)))

    def average(self, full: Tensor, name: str, *, after: Sequence[Work] = ()) -> Work:
        """The same where all ranks know already who has a part in it, once `after` is over: the mean is in this rank's shard of `full`."""
        after = [stream_work(full.device), *after]
        return self._ask(Collective(f"mean of {name}", full, lambda _: self._average(full), after))

    def total(self, value: float, name: str, *, is_sharded: bool) -> float:
        """The sum over all shards, in fp64 and in their order, of the first replica of each; or rank 0's value, where every rank has the whole.

        The same number on every rank, to the bit. Waits.
        """
        cells, work = self._begin_cells(torch.tensor([value], dtype=torch.float64), f"sum of {name}")
        work.wait()
        return float(sum(cells[: self.shard_size if is_sharded else 1].tolist()))

    def compare(self, value: int, name: str) -> Callable[[], bool]:
        """Ask whether every rank has this number, of 64 bits with its sign. What is returned waits for the answer."""
        cells, work = self._begin_cells(torch.tensor([value]), f"comparison of {name}")

        def is_same() -> bool:
            work.wait()
            return bool((cells == value).all())

        return is_same

    def broadcast(self, tensor: Tensor, name: str) -> Work:
        """Once the work is over, everybody's `tensor` (contiguous, on the CPU, of any dtype) is rank 0's to the bit."""
        flat = tensor.view(-1).view(torch.uint8)

        def operation(_: None) -> Calls[None]:
            yield Call(dist.broadcast(flat, src=0, group=self._group, async_op=True), self._group, (flat,))

        return self._ask(Collective(f"broadcast of {name}", tensor, operation))

    def everybodys(self, value: T, name: str) -> list[T]:
        """What each rank has under this name, by rank; anything that pickles. Waits."""
        return self._exchange(value, name)

    def check_same(self, value: object, name: str, hint: str) -> None:
        """Raise ConfigError, on all ranks, when one of them has another value than the others."""
        values = self.everybodys(value, name)
        if any(other != values[0] for other in values):
            told = "; ".join(f"{other!r} on {named_ranks(values, other)}" for other in distinct(values))
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
                told = f"{FAILED}{what} failed on rank {self.rank}: {type(error).__name__}: {error}"
                self._ask(Collective(told, _NOTHING, lambda _: no_calls())).wait()
            raise
        self.everybodys(None, what)

    def shard(self, numel: int) -> Interval:
        """This rank's part of a full flat buffer."""
        part = numel // self.shard_size
        return Interval(self.shard_rank * part, (self.shard_rank + 1) * part)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self, limit_s: float | None = None) -> None:
        """What was asked for is done first, unless a rank is lost; other ranks have `limit_s` to come to it, or their timeout. The program's own
        process group stays.

        The groups go, and their threads with them: one that still lets go of a tensor when Python ends would abort the process.
        """
        if self._groups is not None and self._issuer is not None and self._issuer.close(limit_s):
            try:
                self._groups.close()
            finally:
                self._groups = self._group = self._shards = self._replicas = None

    def give_up(self, error: InfinityError) -> None:
        """This rank cannot go on: the others end with what it ended with."""
        if self._issuer is not None:
            self._issuer.lose(error)

    # -- one collective ----------------------------------------------------------------------------------------------

    def _gathering(self, gather: Gather) -> Collective:
        full, group = gather.full, self._shards
        own = full[_slice(self.shard(full.numel()))] if gather.own is None else gather.own

        def operation(_: None) -> Calls[None]:
            yield Call(all_gather(full, own, group=group, async_op=self._goes_over_gloo(full)), group, (full, own))

        return Collective(f"gather of {gather.name}", full, operation, gather.after, holds=(full, own))

    def _average(self, full: Tensor) -> Calls[Tensor]:
        """This rank's shard of the mean over all ranks; the rest of `full` is undefined from here on."""
        own = full[_slice(self.shard(full.numel()))]
        over_gloo = self._goes_over_gloo(full)
        if full.is_cuda:
            full.record_stream(torch.cuda.current_stream(full.device))  # whoever let go of it made it on another
        full.div_(self.world_size)
        if self.shard_size > 1 and over_gloo:  # its reduce-scatter is an all-reduce too, of a copy, and no limit ends waiting for it
            yield Call(dist.all_reduce(full, group=self._shards, async_op=True), self._shards, (full,))
        elif self.shard_size > 1:
            reduce_scatter(own, full, group=self._shards)
        if self._replicas is not None:
            yield Call(dist.all_reduce(own, group=self._replicas, async_op=over_gloo), self._replicas, (own,))
        return own

    def _goes_over_gloo(self, tensor: Tensor) -> bool:
        """NCCL's collectives are left to the stream."""
        return not (tensor.is_cuda and self._groups is not None and self._groups.uses_nccl)

    def _exchange(self, value: T, name: str, *, is_patient: bool = False) -> list[T]:
        if self._issuer is None:
            return [value]
        values: list[T] = []

        def operation(_: None) -> Calls[None]:
            values.extend((yield from telling(self._group, value)))

        self._ask(Collective(f"comparison of {name}", _NOTHING, operation), Meeting(self._group, is_patient=is_patient)).wait()
        return values

    def _begin_cells(self, mine: Tensor, name: str) -> tuple[Tensor, Work]:
        """[world_size] from everybody's [1], by rank, once the work is over."""
        if self._issuer is None:
            return mine, COMPLETED
        cells = torch.zeros(self.world_size, dtype=mine.dtype)

        def operation(_: None) -> Calls[None]:
            yield Call(all_gather(cells, mine, group=self._group, async_op=True), self._group, (cells, mine))

        return cells, self._ask(Collective(name, cells, operation))

    def _union(self, members: frozenset[int], count: int) -> Calls[frozenset[int]]:
        mask = torch.zeros(count, dtype=torch.uint8)
        mask[sorted(members)] = 1
        yield Call(dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group, async_op=True), self._group, (mask,))
        return frozenset(mask.nonzero().flatten().tolist())

    def _ask(self, collective: Collective, meeting: Meeting | None = None) -> Work:
        """Of all ranks, if nothing else is said."""
        if self._issuer is None:
            return COMPLETED
        return self._issuer.ask([collective], meeting or Meeting(self._group))[0]


def join_ranks(device: str, *, timeout_s: float, timeline: Timeline, shard_group: int | None = None) -> Ranks:
    """The ranks of this job, as `join_groups` finds them; alone where there are none."""
    groups = join_groups(device, timeout_s=timeout_s, shard_group=shard_group)
    if groups is None:
        return Ranks(timeout_s=timeout_s, timeline=timeline)
    try:
        return Ranks(timeout_s=timeout_s, timeline=timeline, groups=groups, store=dist.distributed_c10d._get_default_store())
    except BaseException:
        groups.close()
        raise


ALONE = Ranks(timeout_s=0.0, timeline=Timeline())
"""A process without others."""


def _digest(members: frozenset[int]) -> int:
    """64 bits with a sign, the same in every process; of Python's own hashes of small sets some are equal."""
    return int.from_bytes(blake2b(repr(sorted(members)).encode(), digest_size=8).digest(), "little", signed=True)


def _slice(run: Interval) -> slice:
    return slice(run.start, run.stop)
