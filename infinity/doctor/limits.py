"""What the process may take: descriptors, locked memory, memory under its cgroups."""

from __future__ import annotations

import resource
from collections import Counter

import psutil

from infinity.config import Config
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.kinds import Group, Tier
from infinity.planner.hardware import available_memory, cgroup_limits
from infinity.planner.plan import Plan
from infinity.sizes import format_bytes
from infinity.storage.nvme import SPARE_DESCRIPTORS

DESCRIPTORS = "open files"
LOCKED = "memory lock"
CGROUP = "cgroup memory"
MEMORY = "memory"

LARGE_MODEL_UNITS = 256
"""Twice the 126 blocks of Llama 3 405B (arXiv:2407.21783, table 3): what a model without a plan may come to."""


def check_descriptors(config: Config, plan: Plan | None) -> Finding:
    """RLIMIT_NOFILE, getrlimit(2): each shard file stays open, and the engine raises the soft limit up to the hard one by itself.

    With a plan: fewer than its files and the 128 of the rest of the process is a failure. Without one: too few for a model of
    256 units is a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = len(config.nvme.paths)
    per_unit = len(Group) * paths
    told = f"{_count(soft)} allowed, {_count(hard)} at most (ulimit -n)"
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    wanted = SPARE_DESCRIPTORS + (LARGE_MODEL_UNITS * per_unit if plan is None else count_files(plan, paths))
    way_out = f"ulimit -Hn {wanted} before the run, as root; LimitNOFILE={wanted} in a systemd unit; docker run --ulimit nofile={wanted}"
    if plan is not None:
        found = f"{told}; this model's files and the rest take {wanted}"
        return failure(DESCRIPTORS, found, f"{way_out}; or fewer nvme.paths or larger units") if wanted > most else ok(DESCRIPTORS, found)
    if not per_unit:
        return ok(DESCRIPTORS, told)
    if wanted > most:
        units = max(0, hard - SPARE_DESCRIPTORS) // per_unit
        return warning(DESCRIPTORS, f"{told}: enough for the files of {units} units on {paths} paths", way_out)
    return ok(DESCRIPTORS, told)


def count_files(plan: Plan, paths: int) -> int:
    """The most files that a store of the plan holds open: one per unit, group and path that has a chunk of it.

    States that rest in memory have files too, once they are published; their gradients have none.
    """
    chunks = Counter(
        (spec.key.unit, spec.key.group, spec.tier is Tier.NVME)
        for spec in plan.specs
        if paths and (spec.tier is Tier.NVME or spec.key.group is not Group.GRAD)
    )
    return sum(min(paths, count) for count in chunks.values())


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def check_memory_lock() -> Finding:
    """RLIMIT_MEMLOCK, getrlimit(2). Never in the way: it bounds mlock(2), which nothing here calls.

    Memory for the GPU is pinned by the CUDA driver; whether that works is what `pinned copies` tries.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return ok(LOCKED, f"{allowed} (ulimit -l); not needed: nothing is locked with mlock(2)")


def check_cgroup(config: Config) -> Finding:
    """The tightest memory cgroup above this process against budgets.cpu and what the process holds before the engine comes.

    More than the limit is a failure: the kernel kills the run. Source: memory.max in Documentation/admin-guide/cgroup-v2.rst,
    memory.limit_in_bytes in cgroup-v1/memory.rst.
    """
    limits = cgroup_limits()
    if not limits:
        return ok(CGROUP, "no limit")
    limit, used = min(limits, key=lambda found: found[0] - found[1])
    found = f"{format_bytes(limit)} allowed, {format_bytes(max(0, used))} in use"
    if config.budgets.cpu != "auto" and _needed(config) > limit:
        way_out = _way_out(limit, "the limit (docker run --memory, MemoryMax= of a systemd unit, memory.max)")
        return failure(CGROUP, f"{found}; {_told(config)} is more", way_out)
    return ok(CGROUP, found)


def check_memory(config: Config) -> Finding:
    """MemTotal and what is available, proc_meminfo(5) and the cgroups, against budgets.cpu.

    More than the machine has is a failure; more than is available now is a warning, since others may give it back. "auto" takes
    four fifths of what is available.
    """
    total, available = int(psutil.virtual_memory().total), available_memory()
    found = f"{format_bytes(available)} available of {format_bytes(total)}"
    if config.budgets.cpu == "auto":
        return ok(MEMORY, f'{found}; budgets.cpu = "auto" takes {format_bytes(available * 4 // 5)}')
    found = f"{found}; {_told(config)}"
    if _needed(config) > total:
        return failure(MEMORY, found, _way_out(total, "the machine's memory"))
    if int(config.budgets.cpu) > available:
        return warning(MEMORY, found, f"end what else runs here (ps aux --sort=-rss), or set budgets.cpu to at most {available}")
    return ok(MEMORY, found)


def _needed(config: Config) -> int:
    return int(config.budgets.cpu) + _baseline()


def _baseline() -> int:
    """What the libraries take, which a budget does not count: the doctor has loaded the same ones."""
    return int(psutil.Process().memory_info().rss)


def _told(config: Config) -> str:
    return f"budgets.cpu = {format_bytes(int(config.budgets.cpu))} and {format_bytes(_baseline())} of libraries"


def _way_out(limit: int, what: str) -> str:
    return f"set budgets.cpu to at most {max(0, limit - _baseline())}, or raise {what}"
