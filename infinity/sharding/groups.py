"""The process groups that an engine's ranks talk in, found or made at the start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from infinity.errors import ConfigError
from infinity.timeline import this_host

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
    """torch.distributed process groups, as are the next two."""
    shards: Any
    """The ranks that split every flat buffer between them, in its order."""
    replicas: Any
    """The ranks that keep the same shard; None where each shard is kept once."""
    here: Here
    """This rank among those of its machine."""


def planned_here() -> Here:
    """As torchrun says, before ranks have joined."""
    return Here(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def first_other(values: Sequence[object]) -> int | None:
    """The first rank that has something else than rank 0, of what each has."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


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
        _make_world(device, timeout_s)
    world_size = dist.get_world_size()
    if world_size == 1:
        return None
    size = shard_size(world_size, shard_group)
    limit = timedelta(seconds=COLLECTIVE * timeout_s)
    everyone = dist.new_group(backend="gloo", timeout=limit)
    here = _meet(everyone, size)
    if size == world_size:
        return Groups(everyone, everyone, None, here)
    shards = _mine([range(start, start + size) for start in range(0, world_size, size)], limit)
    replicas = _mine([range(start, world_size, size) for start in range(size)], limit)
    return Groups(everyone, shards, replicas, here)


def _meet(everyone: Any, size: int) -> Here:
    """Who is on this machine. Raises ConfigError, on all ranks, where they would make different groups."""
    mine, told = this_host(), [("", 0)] * dist.get_world_size(everyone)
    dist.all_gather_object(told, (mine, size), group=everyone)
    hosts, sizes = [host for host, _ in told], [other for _, other in told]
    other = first_other(sizes)
    if other is not None:
        raise ConfigError(f"zero.shard_group differs between ranks: {sizes[0]} on rank 0, {sizes[other]} on rank {other}. Give every rank the same")
    return Here(hosts[: dist.get_rank(everyone)].count(mine), hosts.count(mine))


def _mine(members: Sequence[Sequence[int]], limit: timedelta) -> Any:
    """Of these groups, which every rank makes in the same order, the one that this rank is in."""
    groups = [dist.new_group(list(ranks), backend="gloo", timeout=limit) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)


def _make_world(device: str, timeout_s: float) -> None:
    wanted = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise ConfigError(f"WORLD_SIZE is {wanted['WORLD_SIZE']}, but {', '.join(missing)} is not set: start the ranks with torchrun")
    try:
        uses_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        dist.init_process_group("nccl" if uses_cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    except Exception as error:
        raise ConfigError(f"no process group of {wanted['WORLD_SIZE']} ranks at {wanted['MASTER_ADDR']}:{wanted['MASTER_PORT']}: {error}") from error
