"""The plan of a run: the model's units, and what the machine and the configuration give them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.config import Config
from infinity.config.schema import NvmePath as PathEntry
from infinity.errors import ConfigError, StorageError
from infinity.kinds import Tier
from infinity.planner.hardware import Hardware
from infinity.planner.place import Wish
from infinity.planner.plan import Plan, Rates, make_plan
from infinity.runtime.units import Unit
from infinity.sharding.groups import ALONE_HERE, Here
from infinity.sharding.share import ALONE, Share
from infinity.sizes import format_bytes
from infinity.storage import probe
from infinity.storage.rundir import find_manifest, run_directory, run_files
from infinity.storage.store import NvmePath

logger = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a plan is made for: a machine, what the configuration wants of it, and which of the ranks this is."""

    config: Config
    hardware: Hardware
    paths: Sequence[NvmePath]
    """Those that this rank uses."""
    before: Mapping[Tier, int]
    """What the process holds before the engine comes."""
    rank: int = 0
    share: Share = ALONE
    here: Here = ALONE_HERE
    on_card: int = 1
    """How many ranks compute on this one's GPU."""


def plan_units(units: Sequence[Unit], site: Site, *, goes_on: bool) -> Plan:
    """The plan for these units there; `goes_on`: a published run keeps its chunks. Raises CapacityError or ConfigError."""
    plan = place_units(units, site, goes_on=goes_on)
    if not plan.resting(Tier.NVME):
        return plan
    measured = [path.known_rates() for path in site.paths]
    rates = replace(plan.rates, nvme_read=sum(rate.read for rate in measured), nvme_write=sum(rate.write for rate in measured))
    return replace(plan, rates=rates)


def place_units(units: Sequence[Unit], site: Site, *, goes_on: bool) -> Plan:
    """As `plan_units`, with the rates of the paths unknown: nothing is measured and nothing written."""
    config, hardware, paths = site.config, site.hardware, site.paths
    placement = config.placement
    for key, reason in idle_keys(config, hardware.device):
        logger.warning("%s has no effect: %s", key, reason)
    kept = _published_chunk_numel(config, paths, site.rank) if goes_on else None
    wish = Wish(
        hbm_limit=None if config.budgets.hbm == "auto" else int(config.budgets.hbm),
        cpu_limit=None if config.budgets.cpu == "auto" else int(config.budgets.cpu),
        activation_bytes=None if config.budgets.activations == "auto" else int(config.budgets.activations),
        param=_tier(placement.param),
        grad=_tier(placement.grad),
        optimizer=_tier(placement.optimizer),
        chunk_numel=kept or config.optimizer.chunk_size // 4,
        is_cut=kept is not None,
        prefetch_units=None if config.prefetch.units == "auto" else config.prefetch.units,
        accumulates=config.train.accumulation > 1,
    )
    rates = Rates(upload=hardware.upload_rate, adam=hardware.adam_rate)
    plan = make_plan(
        [unit.layout for unit in units],
        wish,
        hardware.device,
        hbm_free=hardware.hbm_free // site.on_card,
        cpu_available=hardware.cpu_available // site.here.size,
        rates=rates,
        around=_around(units),
        num_paths=len(paths),
        share=site.share,
    )
    if plan.resting(Tier.NVME):
        if not paths:
            needed = plan.resting(Tier.NVME)
            raise ConfigError(
                f"nvme.paths is empty, but {needed} bytes of state do not fit in budgets.cpu and budgets.hbm. Name a directory on a disk there"
            )
        if kept is None:
            _check_room(plan, site)
    return replace(plan, baseline=site.before)


def idle_keys(config: Config, device: torch.device) -> Iterator[tuple[str, str]]:
    """(key, reason): a key that is ignored is not ignored in silence."""
    budgets, precision = config.budgets, config.precision
    if device.type == "cpu" and budgets.hbm not in ("auto", 0):
        yield f"budgets.hbm = {format_bytes(int(budgets.hbm))}", "the model computes on the cpu"
    if budgets.activations not in ("auto", 0) and (device.type == "cpu" or budgets.hbm == 0):
        yield "budgets.activations", "it is a part of budgets.hbm, which is 0"
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        if precision.dtype != "fp16" and getattr(precision, name) != type(precision).model_fields[name].default:
            yield f"precision.{name}", f"only fp16 scales the loss, and precision.dtype is {precision.dtype!r}"


def _check_room(plan: Plan, site: Site) -> None:
    """Raise StorageError (ENOSPC) when the paths together cannot hold a new run; the store looks at each path when it makes the files.

    Ranks of this machine that have no other paths need as much each. What the run has left there makes way for it.
    """
    paths = site.paths
    needed = _ranks_within(site) * sum(spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME)
    found = [(path, probe.facts(path.path).free_bytes) for path in paths]
    free = _room(found) + run_files([path.path for path in paths], site.config.store.run).nbytes
    if needed > free:
        told = "; ".join(f"{path.path} has {free} bytes free" + (f", max_bytes {path.max_bytes}" if path.max_bytes else "") for path, free in found)
        hint = f"{told}. Add a path, raise max_bytes, or raise budgets.cpu so that less lives on NVMe"
        raise StorageError(errno.ENOSPC, str(paths[0].path), 0, needed, hint)


def _ranks_within(site: Site) -> int:
    """How many ranks of this machine use no path but this one's."""
    others = [entry for entry in site.config.nvme.paths if not is_for(entry, site.here.rank)]
    return sum(not any(is_for(entry, rank) for entry in others) for rank in range(site.here.size))


def is_for(entry: PathEntry, rank: int) -> bool:
    """Whether that rank of a machine uses the path."""
    return entry.ranks is None or rank in entry.ranks


def _room(found: Sequence[tuple[NvmePath, int]]) -> int:
    """What paths with so many free bytes hold together: those on one file system share its bytes."""
    rooms: dict[int, int] = {}
    limits: dict[int, int] = {}
    for path, free in found:
        device = path.path.stat().st_dev
        rooms[device] = free
        limits[device] = limits.get(device, 0) + (free if path.max_bytes is None else path.max_bytes)
    return sum(min(free, limits[device]) for device, free in rooms.items())


def _published_chunk_numel(config: Config, paths: Sequence[NvmePath], rank: int) -> int | None:
    """How the files of the run that these paths hold are cut, whatever the configuration has become since."""
    if config.store.resume == "never":
        return None
    found = find_manifest([run_directory(path.path, config.store.run) for path in paths], rank)
    kept = found[0].extra.get("chunk_numel") if found else None
    if kept is not None and kept != config.optimizer.chunk_size // 4:
        logger.info("run %r goes on with its chunks of %d elements: optimizer.chunk_size is for new runs", config.store.run, kept)
    return None if kept is None else int(kept)


def _around(units: Sequence[Unit]) -> list[int]:
    """The units that stay live beside others: the root, and those whose module contains another unit's."""
    modules = {unit.module for unit in units}
    return [unit.index for unit in units if unit.is_root or len(modules.intersection(unit.module.modules())) > 1]


def _tier(place: str) -> Tier | None:
    return None if place == "auto" else Tier(place)
