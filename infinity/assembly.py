"""From a model and a configuration to the parts of an engine, in the order in which they are built; undone in reverse when one fails."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from infinity import checkpoint, native
from infinity.config import Config
from infinity.errors import ConfigError, StorageError
from infinity.kinds import Group, Tier
from infinity.optim.adamw import CpuKernel, GpuKernel
from infinity.optim.chunks import Address, trainable_chunks
from infinity.optim.grads import Grads
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import TieredAdamW, checked_groups, names_of
from infinity.optim.pipeline import Pipeline
from infinity.planner.hardware import Hardware, choose_device, survey
from infinity.planner.place import Wish
from infinity.planner.plan import Plan, Rates, make_plan
from infinity.planner.working import LIVE, ON_THEIR_WAY, STAGING
from infinity.run_state import check_fits
from infinity.runtime.adopt import Adoption, OnRead, checksum
from infinity.runtime.arguments import move_arguments
from infinity.runtime.builder import build_in
from infinity.runtime.compute_clock import ComputeClock
from infinity.runtime.hooks import Hooks, check_params
from infinity.runtime.scheduler import Movers, Scheduler
from infinity.runtime.spool import SMALLEST_WINDOW_BYTES, WINDOW_BYTES, Spool
from infinity.runtime.states import States, named_states
from infinity.runtime.units import Cast, Unit, find_units, make_units
from infinity.storage import probe
from infinity.storage.copies import Copies
from infinity.storage.reserve import Reserve
from infinity.storage.rundir import discard, find_manifest, run_directory, run_files
from infinity.storage.slabs import SlabPool
from infinity.storage.store import AioOptions, NvmePath, Pools, Resumed, Store
from infinity.timeline import Timeline

Model = nn.Module | Callable[[], nn.Module]
ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Callable[[Iterable[tuple[str, nn.Parameter]]], Any]

logger = logging.getLogger("infinity")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything an engine owns. `closers` closes it in reverse order of construction."""

    config: Config
    device: torch.device
    timeline: Timeline
    model: nn.Module
    units: list[Unit]
    plan: Plan
    pools: Pools
    store: Store
    states: States
    pipeline: Pipeline
    grads: Grads
    optimizer: TieredAdamW
    loss_scale: LossScale | None
    scheduler: Scheduler
    hooks: Hooks
    resumed: Resumed | None
    closers: ExitStack


def assemble(model: Model, config: Config, param_groups: ParamGroups | None, *, checkpoint_directory: Path | None) -> Parts:
    """Build everything. With a checkpoint, the values in this run's store are replaced by it: they go once it is known to be whole."""
    device = choose_device(config.device)
    paths = check_paths(config)
    before = _held_now(device)
    with ExitStack() as closers:
        pool = native.ThreadPool(_adam_threads())
        closers.callback(pool.close)
        hardware = survey(device, pool)
        module, spool = build_model(model, config, paths)
        on_read: OnRead = spool.visited if spool is not None else lambda piece: None
        timeline = Timeline()
        cast = make_cast(config, module)
        units = _units_of(module, config, cast)
        groups = checked_groups(group_params(module, param_groups), _addresses(units), **_defaults(config))
        check_params(units)
        plan = plan_units(units, config, hardware, paths, before, goes_on=checkpoint_directory is None)
        if checkpoint_directory is not None:
            names, buffers = names_of(groups, _addresses(units)), dict(module.named_buffers())
            places = [path.path for path in paths]
            checkpoint.verify(
                checkpoint_directory,
                named_states(units),
                accept=lambda extra: check_fits(extra["run"], names, buffers),
                thoroughly=bool(run_files(places, config.store.run).files),
            )
            discard(places, config.store.run)
        pools = _make_pools(plan, threads=min(8, hardware.cores))
        closers.callback(pools.pinned.close)
        closers.callback(pools.plain.close)
        copies = Copies(device, timeline)
        closers.callback(copies.close)
        store = Store(
            paths=paths,
            run=config.store.run,
            pools=pools,
            copies=copies,
            timeline=timeline,
            aio=_aio_options(config),
            identity=_identity(config, units, on_read),
        )
        closers.callback(store.close)
        resumed = _open_store(store, plan, units, config)
        deadline_s = config.nvme.deadline_s
        states = States(units, store, pools.plain, chunk_numel=plan.chunk_numel, deadline_s=deadline_s)
        if resumed is None:
            with Adoption(units, store, pools.plain, chunk_numel=plan.chunk_numel, on_read=on_read) as adoption:
                for unit in units:
                    adoption.take(unit, [param.detach() for param in unit.params])
                    _let_go(unit, device)
        for unit in units:
            _let_go(unit, device)
        if spool is not None:
            spool.flush()
        _move_buffers(module, device)
        accumulates = config.train.accumulation > 1
        chunks = trainable_chunks([unit.layout for unit in units], plan.chunk_numel, grad_dtype=torch.float32 if accumulates else None)
        grads = Grads(chunks, store=store, copies=copies, pool=pool, slabs=pools.pinned, timeline=timeline, device=device, deadline_s=deadline_s)
        closers.callback(grads.close)
        pipeline = Pipeline(
            chunks,
            store=store,
            copies=copies,
            cpu_kernel=CpuKernel(pool),
            gpu_kernel=GpuKernel(),
            pools=pools,
            timeline=timeline,
            device=device,
            deadline_s=deadline_s,
        )
        closers.callback(pipeline.close)
        loss_scale = _loss_scale(config)
        optimizer = TieredAdamW(
            groups,
            addresses=_addresses(units),
            grads=grads,
            pipeline=pipeline,
            loss_scale=loss_scale,
            max_grad_norm=config.optimizer.max_grad_norm,
            **_defaults(config),
        )
        movers = Movers(
            store=store,
            copies=copies,
            slabs=pools.pinned,
            staging=_staging(plan, pools),
            grads=grads,
            states=states,
            clock=ComputeClock(timeline, device),
        )
        compute = Tier.HBM if device.type == "cuda" else Tier.CPU
        scheduler = Scheduler(
            units,
            movers,
            device,
            chunk_numel=plan.chunk_numel,
            budget_bytes=plan.working_bytes(compute, LIVE),
            spare_bytes=plan.spare_bytes(compute),
            grad_bytes=plan.working_bytes(compute, ON_THEIR_WAY),
            prefetch_units=config.prefetch.units,
            deadline_s=deadline_s,
        )
        closers.callback(scheduler.close)
        hooks = Hooks(module, units, scheduler, device=device, gather_limit_bytes=plan.spare_bytes(Tier.CPU))
        if device.type != "cpu":
            closers.callback(move_arguments(module, device).remove)
        optimizer.on_cleared = hooks.forget_grads
        return Parts(
            config=config,
            device=device,
            timeline=timeline,
            model=module,
            units=units,
            plan=plan,
            pools=pools,
            store=store,
            states=states,
            pipeline=pipeline,
            grads=grads,
            optimizer=optimizer,
            loss_scale=loss_scale,
            scheduler=scheduler,
            hooks=hooks,
            resumed=resumed,
            closers=closers.pop_all(),
        )


def preview(model: Model, config: Config) -> Plan:
    """The plan alone."""
    device = choose_device(config.device)
    paths = check_paths(config)
    if isinstance(model, nn.Module):
        module = model
    else:
        with torch.device("meta"):
            module = model()
    with native.ThreadPool(_adam_threads()) as pool:
        hardware = survey(device, pool)
    units = _units_of(module, config, make_cast(config, module))
    return plan_units(units, config, hardware, paths, _held_now(device), goes_on=True)


def check_paths(config: Config) -> list[NvmePath]:
    """The configured paths, known to be usable; warnings for what is not a disk."""
    paths = [NvmePath(path=Path(path.path), weight=path.weight, max_bytes=path.max_bytes) for path in config.nvme.paths]
    for path in paths:
        found = probe.check_path(path.path)
        if found.warning:
            logger.warning("nvme.paths: %s", found.warning)
    return paths


def build_model(model: Model, config: Config, paths: Sequence[NvmePath]) -> tuple[nn.Module, Spool | None]:
    """A module as it is; a builder's module with its large storages in unlinked files on the first path."""
    if isinstance(model, nn.Module):
        return model, None
    window_bytes = WINDOW_BYTES if config.budgets.cpu == "auto" else min(WINDOW_BYTES, max(SMALLEST_WINDOW_BYTES, int(config.budgets.cpu) // 4))
    with tempfile.TemporaryDirectory(prefix=".infinity-build-", dir=paths[0].path if paths else None) as folder:
        spool = Spool(folder, window_bytes)
        return build_in(spool, model), spool


def _let_go(unit: Unit, device: torch.device) -> None:
    """The values rest in the store from here on."""
    for param in unit.params:
        param.data = torch.empty(1, dtype=param.dtype, device=device).expand(param.shape)


def make_cast(config: Config, model: nn.Module) -> Cast:
    """precision.dtype for every floating-point parameter that no pattern of precision.keep_fp32 names."""
    dtype, kept = _DTYPES[config.precision.dtype], config.precision.keep_fp32
    names = [name for name, _ in model.named_parameters()]
    idle = [pattern for pattern in kept if not fnmatch.filter(names, pattern)]
    if idle:
        raise ConfigError(f"precision.keep_fp32: no parameter is called {', '.join(idle)}; the first is {names[0] if names else 'none'}")
    return lambda name, _: torch.float32 if any(fnmatch.fnmatchcase(name, pattern) for pattern in kept) else dtype


def _units_of(model: nn.Module, config: Config, cast: Cast) -> list[Unit]:
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype not in (*_DTYPES.values(), torch.complex64):
            raise ConfigError(
                f"parameter {name!r} is trained in {param.dtype}: the engine trains fp32, bf16, fp16 and complex64. Convert it, or freeze it"
            )
    units = make_units(find_units(model, threshold_numel=config.units.threshold, classes=config.units.classes, cast=cast), cast=cast)
    if not units:
        raise ConfigError("the model has no parameters: there is nothing to train")
    return units


def plan_units(
    units: Sequence[Unit], config: Config, hardware: Hardware, paths: Sequence[NvmePath], before: dict[Tier, int], *, goes_on: bool
) -> Plan:
    """The plan for these units on this machine; `goes_on`: a published run keeps its chunks. Raises CapacityError or ConfigError."""
    placement = config.placement
    kept = _published_chunk_numel(config, paths) if goes_on else None
    wish = Wish(
        hbm_limit=None if config.budgets.hbm == "auto" else int(config.budgets.hbm),
        cpu_limit=None if config.budgets.cpu == "auto" else int(config.budgets.cpu),
        param=_tier(placement.param),
        grad=_tier(placement.grad),
        optimizer=_tier(placement.optimizer),
        chunk_numel=kept or config.optimizer.chunk_size // 4,
        is_cut=kept is not None,
        prefetch_units=config.prefetch.units,
        accumulates=config.train.accumulation > 1,
    )
    rates = Rates(upload=hardware.upload_rate, adam=hardware.adam_rate)
    plan = make_plan(
        [unit.layout for unit in units],
        wish,
        hardware.device,
        hbm_free=hardware.hbm_free,
        cpu_available=hardware.cpu_available,
        rates=rates,
        around=_around(units),
    )
    if plan.resting(Tier.NVME):
        if not paths:
            needed = plan.resting(Tier.NVME)
            raise ConfigError(
                f"nvme.paths is empty, but {needed} bytes of state do not fit in budgets.cpu and budgets.hbm. Name a directory on a disk there"
            )
        if kept is None:
            _check_room(plan, paths)
        measured = [probe.rates(path.path) for path in paths]
        rates = replace(rates, nvme_read=sum(rate.read for rate in measured), nvme_write=sum(rate.write for rate in measured))
    return replace(plan, rates=rates, baseline=before)


def _check_room(plan: Plan, paths: Sequence[NvmePath]) -> None:
    """Raise StorageError (ENOSPC) when the paths together cannot hold a new run; the store looks at each path when it makes the files."""
    needed = sum(spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME)
    found = [(path, probe.facts(path.path).free_bytes) for path in paths]
    free = sum(free if path.max_bytes is None else min(free, path.max_bytes) for path, free in found)
    if needed > free:
        told = "; ".join(f"{path.path} has {free} bytes free" + (f", max_bytes {path.max_bytes}" if path.max_bytes else "") for path, free in found)
        hint = f"{told}. Add a path, raise max_bytes, or raise budgets.cpu so that less lives on NVMe"
        raise StorageError(errno.ENOSPC, str(paths[0].path), 0, needed, hint)


def _published_chunk_numel(config: Config, paths: Sequence[NvmePath]) -> int | None:
    """How the files of the run that these paths hold are cut, whatever the configuration has become since."""
    if config.store.resume == "never":
        return None
    found = find_manifest([run_directory(path.path, config.store.run) for path in paths], rank=0)
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


def _held_now(device: torch.device) -> dict[Tier, int]:
    """What the process holds before the engine comes."""
    held = {Tier.CPU: int(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held[Tier.HBM] = total - free
    return held


def _adam_threads() -> int:
    """All cores, less two for the threads that launch compute and I/O where there are enough."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 4 else cores - 2


def _make_pools(plan: Plan, threads: int) -> Pools:
    """Without a GPU nothing is pinned, and all CPU memory comes from one pool that grows no further than the plan."""
    if plan.device.type == "cuda":
        return Pools(pinned=SlabPool(pin=True, threads=threads), plain=SlabPool(pin=False, threads=threads))
    pool = SlabPool(pin=False, threads=threads, limit_bytes=plan.held_bytes(Tier.CPU))
    return Pools(pinned=pool, plain=pool)


def _aio_options(config: Config) -> AioOptions:
    nvme = config.nvme
    return AioOptions(
        block_bytes=nvme.block_size, queue_depth=nvme.queue_depth, readers=nvme.readers, writers=nvme.writers, deadline_s=nvme.deadline_s
    )


def _identity(config: Config, units: Sequence[Unit], on_read: OnRead) -> dict[str, str]:
    """What must be equal to go on with a run, beside the layout."""
    identity = {"optimizer": "adamw", "precision": config.precision.dtype}
    if config.nvme.paths and config.store.resume != "never":
        identity["initial weights"] = checksum(units, on_read)
    return identity


def _open_store(store: Store, plan: Plan, units: Sequence[Unit], config: Config) -> Resumed | None:
    names = [unit.name for unit in units]
    resumed = store.reopen(plan.specs, names) if config.nvme.paths and config.store.resume != "never" else None
    if resumed is None:
        if config.store.resume == "must":
            raise ConfigError(
                f'store.resume = "must", but run {config.store.run!r} has never been published on these paths. Set it to "auto" to start it'
            )
        store.build(plan.specs, names)
    return resumed


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _loss_scale(config: Config) -> LossScale | None:
    precision = config.precision
    if precision.dtype != "fp16":
        return None
    return LossScale(
        initial=precision.init_scale, growth=precision.growth_factor, backoff=precision.backoff_factor, growth_interval=precision.growth_interval
    )


def group_params(model: nn.Module, param_groups: ParamGroups | None) -> Any:
    """What the optimizer is given: the trained parameters, the user's groups, or what the user's function makes of the named parameters."""
    if param_groups is None:
        return [param for param in model.parameters() if param.requires_grad]
    return param_groups(model.named_parameters()) if callable(param_groups) else param_groups


def _defaults(config: Config) -> dict[str, Any]:
    """What a parameter group that says nothing else is updated with."""
    optimizer = config.optimizer
    return {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}


def _addresses(units: Sequence[Unit]) -> dict[Tensor, Address]:
    addresses: dict[Tensor, Address] = {}
    for unit in units:
        params = dict(zip(unit.names, unit.params, strict=True))
        for f, flat in enumerate(unit.layout.flats):
            if flat.trainable:
                for s, slot in enumerate(flat.slots):
                    addresses[params[slot.name]] = Address(slot.name, unit.layout.index, f, s)
    return addresses


def _staging(plan: Plan, pools: Pools) -> Reserve | None:
    """Pinned buffers between NVMe reads and uploads, where a GPU's parameters rest on NVMe."""
    sizes = [spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME and spec.key.group is Group.PARAM]
    if plan.device.type != "cuda" or not sizes:
        return None
    return Reserve(pools.pinned, max(sizes), STAGING, "upload staging")
