"""What is known before anything is built or written: the device, the paths, the model's units, its parameter groups, the plan."""

from __future__ import annotations

import fnmatch
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from infinity import native
from infinity.config import Config
from infinity.device import choose_device
from infinity.errors import ConfigError
from infinity.functions import load_function
from infinity.kinds import Tier
from infinity.optim.chunks import Address
from infinity.optim.optimizer import checked_groups
from infinity.planner.hardware import Hardware, survey
from infinity.planner.plan import Plan
from infinity.planning import Site, is_for, plan_units
from infinity.runtime.builder import build_in
from infinity.runtime.hollow import build_hollow_in
from infinity.runtime.hooks import check_params
from infinity.runtime.spool import SMALLEST_WINDOW_BYTES, WINDOW_BYTES, Spool
from infinity.runtime.units import Cast, Unit, find_units, make_units
from infinity.sharding.groups import ALONE_HERE, Here, planned_here, planned_ranks, shard_size
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.sharding.stages import STAGES
from infinity.storage import probe
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
    device = choose_device(config.device) if ranks.world_size == 1 else ranks.device
    share = share_of(config, ranks.rank, ranks.world_size)
    paths = check_paths(config, ranks.here)
    before = held_now(device)
    hardware = survey(device, pool)
    module, spool = build_model(model, config, paths, rank=ranks.rank)
    units = units_of(module, config, make_cast(config, module), share.world_size)
    groups = checked_groups(group_params(module, param_groups), addresses_of(units), **defaults(config))
    check_params(units)
    site = Site(config=config, hardware=hardware, paths=paths, before=before, rank=ranks.rank, share=share, here=ranks.here, on_card=ranks.on_card)
    plan = plan_units(units, site, goes_on=goes_on)
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
    here = planned_here()
    device, share = choose_device(config.device, rank_here=here.rank, ranks_here=here.size), share_of(config, 0, planned_ranks())
    paths = check_paths(config, here)
    units = preview_units(model, config, share.world_size)
    with native.ThreadPool(adam_threads(config, here)) as pool:
        hardware = survey(device, pool)
    site = Site(config=config, hardware=hardware, paths=paths, before=held_now(device), share=share, here=here)
    plan = plan_units(units, site, goes_on=True)
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


def shard_group(config: Config) -> int | None:
    """How many ranks split the states; None is all."""
    return None if config.zero.shard_group == "auto" else config.zero.shard_group


def share_of(config: Config, rank: int, world_size: int) -> Share:
    """What one of so many ranks keeps. Raises ConfigError for a group that does not divide them."""
    size = shard_size(world_size, shard_group(config))
    return Share(STAGES[config.zero.stage], rank % size, size, world_size // size, rank // size)


def check_paths(config: Config, here: Here) -> list[NvmePath]:
    """The paths that this rank uses, known to be usable; warnings for what is not a disk."""
    paths = paths_of(config, here)
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
    window_bytes = WINDOW_BYTES if config.budgets.cpu == "auto" else min(WINDOW_BYTES, max(SMALLEST_WINDOW_BYTES, int(config.budgets.cpu) // 4))
    with tempfile.TemporaryDirectory(prefix=".infinity-build-", dir=paths[0].path if paths else None) as folder:
        spool = Spool(folder, window_bytes)
        hollow = _try_hollow(spool, model) if rank > 0 else None
        return build_in(spool, model) if hollow is None else hollow, spool


def _try_hollow(spool: Spool, builder: Callable[[], nn.Module]) -> nn.Module | None:
    """The module without values; None, with a warning, for a builder that needs them."""
    generator = torch.get_rng_state()
    try:
        return build_hollow_in(spool, builder)
    except Exception as error:
        torch.set_rng_state(generator)
        logger.warning(
            "without values, on the meta device, the model builder ended with %s: %s. This rank builds it with values, in files as rank 0 does",
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


def paths_of(config: Config, here: Here = ALONE_HERE) -> list[NvmePath]:
    """The NVMe paths of one of the ranks on a machine, as the store takes them. Raises ConfigError where all are for others."""
    found = []
    for entry in (entry for entry in config.nvme.paths if is_for(entry, here.rank)):
        rates = None
        if entry.read_rate is not None and entry.write_rate is not None:
            rates = probe.Rates(read=entry.read_rate, write=entry.write_rate)
        found.append(NvmePath(path=Path(entry.path), weight=entry.weight, max_bytes=entry.max_bytes, rates=rates))
    if config.nvme.paths and not found:
        raise ConfigError(f"nvme.paths: all of them are for other ranks of this machine than {here.rank}. Add it to ranks of one, or leave ranks out")
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


def adam_threads(config: Config, here: Here) -> int:
    """As configured, or all cores, less two for the threads that launch compute and I/O where there are enough."""
    if config.optimizer.threads != "auto":
        return config.optimizer.threads
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores if cores <= 4 else cores - 2) // here.size)
