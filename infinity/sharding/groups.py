"""The process groups that an engine's ranks talk in, found or made at the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from infinity.device import choose_device
from infinity.errors import ConfigError
from infinity.sharding.calls import all_gather, finish, reduce_scatter, telling
from infinity.timeline import this_host

logger = logging.getLogger("infinity")

T = TypeVar("T")

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Read when a group is made: 0 turns off that torch ends the process (torch.distributed's documentation)."""

_HOLDS_INTERPRETER = TorchVersion(torch.__version__) < "2.8"
"""Older torch ends a group's threads, at its last reference, with Python's interpreter locked: one that wants it then, to let go of a tensor,
hangs for ever (pytorch pull request 154976)."""

_kept: list[Any] = []
"""Groups that were ended, to the end of the process, with such a torch."""

_FIRST_BYTES = 1 << 20
"""Of each rank in the first collectives."""

_START_S = 120.0
"""For ranks to join, when nobody beats yet: what one imports from a cold disk, another has in memory."""

COLLECTIVE = 2
"""Timeouts after which a collective gives up: by then the watch has named who is dead, also where others have waited for it before it died."""


class Here(NamedTuple):
    """One of the ranks of a machine, which share its memory, cores and disks."""

    rank: int
    size: int


ALONE_HERE = Here(0, 1)
"""The only one."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Of an engine's own: the program's collectives come from other threads, and would come in between."""

    everyone: Any
    """A torch.distributed process group, as are the next two; this one for tensors on the CPU alone."""
    shards: Any
    """The ranks that split every flat buffer between them, in its order."""
    replicas: Any
    """The ranks that keep the same shard; None where each shard is kept once."""
    here: Here
    """This rank among those of its machine."""
    device: torch.device
    """On which it computes. Where that is a GPU, `shards` and `replicas` connect tensors there too."""
    on_card: int
    """How many ranks compute on the same one."""
    uses_nccl: bool

    def abort(self) -> None:
        """End what is queued on GPUs: it waits for a rank that is lost, and every stream behind it waits too. Its results are undefined."""
        backends = [group._get_backend(self.device) for group in (self.shards, self.replicas) if group is not None and self.uses_nccl]
        if len(backends) > 1:
            backends[0]._group_start()  # or the first would wait for what hangs in the second
        for backend in backends:
            backend.abort()
        if len(backends) > 1:
            backends[0]._group_end()

    def close(self) -> None:
        """Nothing is queued any more. Communicators are aborted too: to destroy one waits for its other ranks, without a limit."""
        self.abort()
        _end(group for group in dict.fromkeys((self.shards, self.replicas, self.everyone)) if group is not None)  # in the same order everywhere


def planned_here() -> Here:
    """As torchrun says, before ranks have joined."""
    return Here(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def first_other(values: Sequence[object]) -> int | None:
    """The first rank that has something else than rank 0, of what each has."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


class Difference(NamedTuple):
    """What rank 0 has under a name, and the first rank that has something else."""

    name: str
    mine: str
    other: str
    rank: int


def first_difference(tables: Sequence[Mapping[str, str]], nothing: str) -> Difference | None:
    """Between the tables of all ranks, in the order of their names; `nothing` stands where a name is missing."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, nothing) for table in tables]
        rank = first_other(values)
        if rank is not None:
            return Difference(name, values[0], values[rank], rank)
    return None


def planned_ranks() -> int:
    """How many ranks `join_groups` would find: those of the process group, or of torchrun, or 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def shard_size(world_size: int, shard_group: int | None) -> int:
    """How many of so many ranks split a flat buffer; all where `shard_group` is None. Raises ConfigError for what is not a divisor."""
    if shard_group is None or world_size == 1:
        return world_size
    if world_size % shard_group:
        raise ConfigError(
            f"zero.shard_group = {shard_group} does not divide the {world_size} ranks. Start a multiple of {shard_group}, or choose a divisor"
        )
    return shard_group


def join_groups(device: str, *, timeout_s: float, shard_group: int | None = None) -> Groups | None:
    """The ranks that torchrun started, or those of the process group that the program has made; None in a world of one.

    `device`: as configured, "auto" or a torch.device's name. `shard_group`: how many neighbouring ranks split a flat buffer; all if left
    out. Raises ConfigError where the groups cannot be made.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        _make_world(timeout_s)
    world_size = dist.get_world_size()
    if world_size == 1:
        return None
    size = shard_size(world_size, shard_group)
    limit_s = _START_S + COLLECTIVE * timeout_s
    with ExitStack() as made:
        with _joining(limit_s):
            everyone = _mine([range(world_size)], "gloo", limit_s)
            made.callback(_end, [everyone])
            here = _meet(everyone, size)
            own, backend, on_card = _choose_devices(everyone, device, here)
            if own.type == "cuda":
                torch.cuda.set_device(own)  # of the program's thread: "cuda" is this one from here on
            shards, replicas = everyone, None
            if size < world_size or backend != "gloo":
                shards = _mine([range(start, start + size) for start in range(0, world_size, size)], backend, limit_s)
                made.callback(_end, [shards])
            if size < world_size:
                replicas = _mine([range(start, world_size, size) for start in range(size)], backend, limit_s)
        groups = Groups(everyone, shards, replicas, here, own, on_card, uses_nccl="nccl" in backend)
        made.pop_all()
        made.callback(groups.close)
        _connect(groups)
        made.pop_all()
    return groups


@contextmanager
def _joining(limit_s: float) -> Iterator[None]:
    """torch tells of a rank that does not come by an address, if at all."""
    try:
        yield
    except RuntimeError as error:
        told = f"the ranks have not joined: one has ended, or has not come within {limit_s:g} s. Look at the logs of all"
        raise ConfigError(f"{told}. {error}") from error


def _meet(everyone: Any, size: int) -> Here:
    """Who is on this machine. Raises ConfigError, on all ranks, where they would make different groups."""
    told = _tell(everyone, (this_host(), size))
    hosts, sizes = [host for host, _ in told], [other for _, other in told]
    other = first_other(sizes)
    if other is not None:
        raise ConfigError(f"zero.shard_group differs between ranks: {sizes[0]} on rank 0, {sizes[other]} on rank {other}. Give every rank the same")
    rank = dist.get_rank(everyone)
    return Here(hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]))


class _Found(NamedTuple):
    """The device of one rank, or why it has none."""

    kind: str
    card: str
    """Of a GPU: which one in the world."""
    error: str


def _choose_devices(everyone: Any, name: str, here: Here) -> tuple[torch.device, str, int]:
    """Where this rank computes, torch's name for what connects tensors there, and how many ranks compute on it.

    Raises ConfigError, on all ranks, where one has no such device, or another kind than the others.
    """
    device = torch.device("cpu")
    try:
        device = choose_device(name, rank_here=here.rank, ranks_here=here.size)
        found = _Found(device.type, _card(device), "")
    except Exception as error:  # of the driver too: the others wait
        found = _Found("", "", str(error))
    told = _tell(everyone, found)
    errors = [f"{other.error} (rank {rank})" for rank, other in enumerate(told) if other.error]
    if errors:
        raise ConfigError(errors[0])
    other = first_other([found.kind for found in told])
    if other is not None:
        raise ConfigError(f'device = "{name}" is {told[0].kind} on rank 0 and {told[other].kind} on rank {other}. Write "cpu", or "cuda"')
    if device.type == "cpu":
        return device, "gloo", 1
    cards = [found.card for found in told]
    twins = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
    if twins:
        logger.warning("ranks %s compute on one GPU: they exchange tensors through CPU memory, slowly. Start one process per GPU", twins)
    return device, f"cpu:gloo,cuda:{'gloo' if twins else 'nccl'}", cards.count(found.card)


def _card(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _tell(group: Any, mine: T) -> list[T]:
    """What each rank has; waits for gloo as long as it does."""
    return finish(telling(group, mine), lambda _, work: work.wait())


def _mine(members: Sequence[Sequence[int]], backend: str, limit_s: float) -> Any:
    """Of these groups, which every rank makes in the same order, the one that this rank is in."""
    with _without_watchdog():
        groups = [dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=limit_s)) for ranks in members]
    mine = next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    names[_Lasting(mine)] = names.pop(mine)
    return mine


class _Lasting:
    """In torch's list of names it has the place of a group that outlives the program's destroy_process_group(), which shuts down all of the list.
    It is equal to the group, by which torch goes on finding the name.

    Communicators that are shut down under a gather which the next forward is to find leave the GPU with illegal memory accesses.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __eq__(self, other: object) -> bool:
        return other is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    def shutdown(self) -> None:
        """The engine ends it."""

    abort = shutdown

    def _get_backend(self, device: torch.device) -> Any:
        """What torch before 2.7 shuts down, or aborts: nothing."""
        raise RuntimeError("the engine ends it")


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL's groups that are made here leave errors to the engine: torch's own watchdog would end the process before anybody is named."""
    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        os.environ.pop(_WATCHDOG)
        if before is not None:
            os.environ[_WATCHDOG] = before


def _end(groups: Iterable[Any]) -> None:
    """gloo's threads end with the last reference to their group, where torch can end them."""
    for group in groups:
        if _HOLDS_INTERPRETER:
            _kept.append(group)
        with suppress(ValueError):  # unknown to torch since the program has destroyed its own; it goes with its last reference
            dist.destroy_process_group(group)


def _connect(groups: Groups) -> None:
    """GPUs are connected by the first collectives of a kind, which take memory there: now, before anybody asks how much is free."""
    if groups.uses_nccl:
        for group in filter(None, (groups.shards, groups.replicas)):
            full = torch.zeros(dist.get_world_size(group), _FIRST_BYTES, dtype=torch.uint8, device=groups.device)
            own = full[dist.get_rank(group)]
            all_gather(full, own, group=group)
            reduce_scatter(own, full, group=group)
            dist.all_reduce(own, group=group)
        torch.cuda.synchronize(groups.device)


def _make_world(timeout_s: float) -> None:
    wanted = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise ConfigError(f"WORLD_SIZE is {wanted['WORLD_SIZE']}, but {', '.join(missing)} is not set: start the ranks with torchrun")
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=_START_S + timeout_s))
    except Exception as error:
        raise ConfigError(f"no process group of {wanted['WORLD_SIZE']} ranks at {wanted['MASTER_ADDR']}:{wanted['MASTER_PORT']}: {error}") from error


def leave_world(world: Any) -> None:
    """Destroy the process group that `join_groups` has made for the program: torch warns of one that is left at the end.

    Not where it is another one by now, or other groups are left: torch shuts down all of them with it, and NCCL's wait for other ranks without
    a limit.
    """
    if dist.group.WORLD is not world or len(dist.distributed_c10d._world.pg_map) > 1:
        return
    try:
        dist.destroy_process_group()
    except Exception:  # what the program was for has been done
        logger.debug("destroying the process group at the end", exc_info=True)
