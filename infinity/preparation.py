"""What is known before anything is built or written: the device, the paths, the model's units, its parameter groups, the plan."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from infinity import native
from infinity.config import Config
from infinity.errors import ConfigError, StorageError
from infinity.functions import load_function
from infinity.kinds import Tier
from infinity.optim.chunks import Address
from infinity.optim.optimizer import checked_groups
from infinity.planner.hardware import Hardware, choose_device, survey
from infinity.planner.place import Wish
from infinity.planner.plan import Plan, Rates, make_plan
from infinity.runtime.builder import build_in
from infinity.runtime.hollow import build_hollow
from infinity.runtime.hooks import check_params
from infinity.runtime.spool import SMALLEST_WINDOW_BYTES, WINDOW_BYTES, Spool
from infinity.runtime.units import Cast, Unit, find_units, make_units
from infinity.sharding.groups import planned_ranks, ranks_here
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import ALONE, Share
from infinity.sharding.stages import STAGES
from infinity.sizes import format_bytes
from infinity.storage import probe
from infinity.storage.rundir import find_manifest, run_directory, run_files
from infinity.storage.store import AioOptions, NvmePath

Model = nn.Module | Callable[[], nn.Module]
ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Callable[[Iterable[tuple[str, nn.Parameter]]], Any]

logger = logging.getLogger("infinity")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked, planned, and nothing written yet."""

    config: Config
    device: torch.device
    ranks: Ranks
    share: Share
    paths: list[NvmePath]
    pool: native.ThreadPool
    hardware: Hardware
    model: nn.Module
    spool: Spool | None
    """Where a builder's large storages are; None for a module that came as it is."""
    units: list[Unit]
    groups: list[dict[str, Any]]
    plan: Plan


def prepare(model: Model, config: Config, param_groups: ParamGroups | None, pool: native.ThreadPool, ranks: Ranks, *, goes_on: bool) -> Prepared:
    """Build the model, divide it and plan. `goes_on`: a published run keeps its chunks. Raises ConfigError, CapacityError, StorageError."""
    device = choose_device(config.device)
    if device.type == "cuda" and ranks.world_size > 1:
        raise ConfigError(f'device is "{device}": {ranks.world_size} ranks compute on CPUs so far. Start one process, or set device = "cpu"')
    share = share_of(config, ranks.rank, ranks.world_size)
    paths = check_paths(config)
    before = held_now(device)
    hardware = survey(device, pool)
    module, spool = build_model(model, config, paths, rank=ranks.rank)
    units = units_of(module, config, make_cast(config, module), share.world_size)
    groups = checked_groups(group_params(module, param_groups), addresses_of(units), **defaults(config))
    check_params(units)
    plan = plan_units(units, config, hardware, paths, before, goes_on=goes_on, rank=ranks.rank, share=share)
    return Prepared(
        config=config,
        device=device,
        ranks=ranks,
        share=share,
        paths=paths,
        pool=pool,
        hardware=hardware,
        model=module,
        spool=spool,
        units=units,
        groups=groups,
        plan=plan,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a run would be, known from shapes: nothing is built, no state is written."""

    paths: list[NvmePath]
    units: list[Unit]
    plan: Plan


def preview(model: Model, config: Config) -> Preview:
    """As `prepare`, without values: of one rank, where there are several."""
    device = choose_device(config.device)
    paths = check_paths(config)
    share = share_of(config, 0, planned_ranks())
    units = preview_units(model, config, share.world_size)
    with native.ThreadPool(adam_threads(config)) as pool:
        hardware = survey(device, pool)
    plan = plan_units(units, config, hardware, paths, held_now(device), goes_on=True, share=share)
    return Preview(paths=paths, units=units, plan=plan)


def preview_units(model: Model, config: Config, world_size: int = 1) -> list[Unit]:
    """The units alone; those of a builder have shapes and no values."""
    if isinstance(model, nn.Module):
        check_values(model)
        module = model
    else:
        with torch.device("meta"):
            module = model()
    return units_of(module, config, make_cast(config, module), world_size)


def share_of(config: Config, rank: int, world_size: int) -> Share:
    """What one of so many ranks keeps."""
    size = world_size if config.zero.shard_group == "auto" else config.zero.shard_group
    return Share(STAGES[config.zero.stage], rank % size, size, world_size // size, rank // size)


def check_paths(config: Config) -> list[NvmePath]:
    """The configured paths, known to be usable; warnings for what is not a disk."""
    paths = paths_of(config)
    for path in paths:
        found = probe.check_path(path.path)
        if found.warning:
            logger.warning("nvme.paths: %s", found.warning)
    return paths


def build_model(model: Model, config: Config, paths: Sequence[NvmePath], *, rank: int = 0) -> tuple[nn.Module, Spool | None]:
    """A module as it is; a builder's module with its large storages in unlinked files on the first path.

    Values are rank 0's: on others a builder's module has shapes alone, where the builder can do without values.
    """
    if isinstance(model, nn.Module):
        check_values(model)
        return model, None
    if not callable(model):
        raise ConfigError(f"the model is a {type(model).__name__}: give a torch.nn.Module, or a function that builds one")
    if rank > 0 and (hollow := _try_hollow(model)) is not None:
        return hollow, None
    window_bytes = WINDOW_BYTES if config.budgets.cpu == "auto" else min(WINDOW_BYTES, max(SMALLEST_WINDOW_BYTES, int(config.budgets.cpu) // 4))
    with tempfile.TemporaryDirectory(prefix=".infinity-build-", dir=paths[0].path if paths else None) as folder:
        spool = Spool(folder, window_bytes)
        return build_in(spool, model), spool


def _try_hollow(builder: Callable[[], nn.Module]) -> nn.Module | None:
    """The module without values; None, with a warning, for a builder that needs them."""
    generator = torch.get_rng_state()
    try:
        return build_hollow(builder)
    except Exception as error:
        torch.set_rng_state(generator)
        logger.warning(
            "without values, on the meta device, the model builder ended with %s: %s. This rank builds the model with values, as rank 0 does",
            type(error).__name__,
            error,
        )
        return None


def check_values(model: nn.Module) -> None:
    """Raise ConfigError naming a parameter or buffer that is not there yet, or not as plain elements in a row."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name!r} is lazy, it has no shape yet: run one forward of the model before infinity.initialize")
        if tensor.is_meta:
            raise ConfigError(f"{name!r} is on the meta device, it has no values: pass a function that builds the model in place of the model")
    for name, param in model.named_parameters():
        if param.layout is not torch.strided or param.is_quantized:
            kind = "quantized" if param.is_quantized else str(param.layout).removeprefix("torch.")
            raise ConfigError(f"parameter {name!r} is {kind}: the engine holds dense parameters. Convert it, or make it a buffer")


def make_cast(config: Config, model: nn.Module) -> Cast:
    """precision.dtype for every floating-point parameter that no pattern of precision.keep_fp32 names."""
    dtype, kept = _DTYPES[config.precision.dtype], config.precision.keep_fp32
    names = [name for name, _ in model.named_parameters()]
    idle = [pattern for pattern in kept if not fnmatch.filter(names, pattern)]
    if idle:
        raise ConfigError(f"precision.keep_fp32: no parameter is called {', '.join(idle)}; the first is {names[0] if names else 'none'}")
    return lambda name, _: torch.float32 if any(fnmatch.fnmatchcase(name, pattern) for pattern in kept) else dtype


def units_of(model: nn.Module, config: Config, cast: Cast, world_size: int = 1) -> list[Unit]:
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in (*_DTYPES.values(), torch.complex64):
            raise ConfigError(
                f"parameter {name!r} is trained in {param.dtype}: the engine trains fp32, bf16, fp16 and complex64. Convert it, or freeze it"
            )
    rule = None if config.units.function is None else load_function("units.function", config.units.function, ())
    plans = find_units(model, threshold_numel=config.units.threshold, classes=config.units.classes, function=rule, cast=cast)
    units = make_units(plans, cast=cast, world_size=world_size)
    if not units:
        raise ConfigError("the model has no parameters: there is nothing to train")
    if not any(flat.trainable for unit in units for flat in unit.layout.flats):
        raise ConfigError("no parameter of the model has requires_grad: there is nothing to train")
    return units


def group_params(model: nn.Module, param_groups: ParamGroups | None) -> Any:
    """What the optimizer is given: the trained parameters, the user's groups, or what the user's function makes of the named parameters."""
    if param_groups is None:
        return [param for param in model.parameters() if param.requires_grad]
    return param_groups(model.named_parameters()) if callable(param_groups) else param_groups


def defaults(config: Config) -> dict[str, Any]:
    """What a parameter group that says nothing else is updated with."""
    optimizer = config.optimizer
    return {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}


def addresses_of(units: Sequence[Unit]) -> dict[Tensor, Address]:
    addresses: dict[Tensor, Address] = {}
    for unit in units:
        params = dict(zip(unit.names, unit.params, strict=True))
        for f, flat in enumerate(unit.layout.flats):
            if flat.trainable:
                for s, slot in enumerate(flat.slots):
                    addresses[params[slot.name]] = Address(slot.name, unit.layout.index, f, s)
    return addresses


def plan_units(
    units: Sequence[Unit],
    config: Config,
    hardware: Hardware,
    paths: Sequence[NvmePath],
    before: dict[Tier, int],
    *,
    goes_on: bool,
    rank: int = 0,
    share: Share = ALONE,
) -> Plan:
    """The plan for these units on this machine; `goes_on`: a published run keeps its chunks. Raises CapacityError or ConfigError."""
    plan = place_units(units, config, hardware, paths, before, goes_on=goes_on, rank=rank, share=share)
    if not plan.resting(Tier.NVME):
        return plan
    measured = [path.known_rates() for path in paths]
    rates = replace(plan.rates, nvme_read=sum(rate.read for rate in measured), nvme_write=sum(rate.write for rate in measured))
    return replace(plan, rates=rates)


def place_units(
    units: Sequence[Unit],
    config: Config,
    hardware: Hardware,
    paths: Sequence[NvmePath],
    before: dict[Tier, int],
    *,
    goes_on: bool,
    rank: int = 0,
    share: Share = ALONE,
) -> Plan:
    """As `plan_units`, with the rates of the paths unknown: nothing is measured and nothing written."""
    placement = config.placement
    for key, reason in idle_keys(config, hardware.device):
        logger.warning("%s has no effect: %s", key, reason)
    kept = _published_chunk_numel(config, paths, rank) if goes_on else None
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
        hbm_free=hardware.hbm_free,
        cpu_available=hardware.cpu_available // ranks_here(),
        rates=rates,
        around=_around(units),
        num_paths=len(paths),
        share=share,
    )
    if plan.resting(Tier.NVME):
        if not paths:
            needed = plan.resting(Tier.NVME)
            raise ConfigError(
                f"nvme.paths is empty, but {needed} bytes of state do not fit in budgets.cpu and budgets.hbm. Name a directory on a disk there"
            )
        if kept is None:
            _check_room(plan, config, paths)
    return replace(plan, baseline=before)


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


def _check_room(plan: Plan, config: Config, paths: Sequence[NvmePath]) -> None:
    """Raise StorageError (ENOSPC) when the paths together cannot hold a new run; the store looks at each path when it makes the files.

    What the run has left there makes way for it.
    """
    needed = ranks_here() * sum(spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME)
    found = [(path, probe.facts(path.path).free_bytes) for path in paths]
    free = _room(found) + run_files([path.path for path in paths], config.store.run).nbytes
    if needed > free:
        told = "; ".join(f"{path.path} has {free} bytes free" + (f", max_bytes {path.max_bytes}" if path.max_bytes else "") for path, free in found)
        hint = f"{told}. Add a path, raise max_bytes, or raise budgets.cpu so that less lives on NVMe"
        raise StorageError(errno.ENOSPC, str(paths[0].path), 0, needed, hint)


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


def paths_of(config: Config) -> list[NvmePath]:
    """The NVMe paths as the store takes them."""
    found = []
    for entry in config.nvme.paths:
        rates = None
        if entry.read_rate is not None and entry.write_rate is not None:
            rates = probe.Rates(read=entry.read_rate, write=entry.write_rate)
        found.append(NvmePath(path=Path(entry.path), weight=entry.weight, max_bytes=entry.max_bytes, rates=rates))
    return found


def aio_options(config: Config) -> AioOptions:
    """How each path is read and written, as the store takes it."""
    nvme = config.nvme
    return AioOptions(
        block_bytes=nvme.block_size, queue_depth=nvme.queue_depth, readers=nvme.readers, writers=nvme.writers, deadline_s=nvme.deadline_s
    )


def held_now(device: torch.device) -> dict[Tier, int]:
    """What the process holds before the engine comes."""
    held = {Tier.CPU: int(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held[Tier.HBM] = total - free
    return held


def adam_threads(config: Config) -> int:
    """As configured, or all cores, less two for the threads that launch compute and I/O where there are enough."""
    if config.optimizer.threads != "auto":
        return config.optimizer.threads
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores if cores <= 4 else cores - 2) // ranks_here())
