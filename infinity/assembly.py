"""From a model and a configuration to the parts of an engine, in the order in which they are built; undone in reverse when one fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from infinity import checkpoint, native
from infinity.alike import check_alike
from infinity.config import Config
from infinity.device import tier_of
from infinity.errors import ConfigError
from infinity.kinds import Group, Tier
from infinity.optim.adamw import CpuKernel
from infinity.optim.chunks import trainable_chunks
from infinity.optim.exchange import Exchange
from infinity.optim.gpu_adamw import GpuKernel
from infinity.optim.grads import Grads
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import TieredAdamW, names_of
from infinity.optim.pipeline import Pipeline, buffer_count
from infinity.planner.plan import Plan
from infinity.planner.working import ACTIVATIONS, LIVE, ON_THEIR_WAY, upload_buffers
from infinity.preparation import Model, ParamGroups, Prepared, adam_threads, addresses_of, aio_options, defaults, prepare, shard_group
from infinity.run_state import check_fits
from infinity.runtime.adopt import Adoption
from infinity.runtime.arguments import move_arguments
from infinity.runtime.compute_clock import ComputeClock
from infinity.runtime.descent import Descent
from infinity.runtime.hooks import Hooks
from infinity.runtime.movers import Movers
from infinity.runtime.origin import OnRead, Origin
from infinity.runtime.scheduler import Scheduler
from infinity.runtime.states import States, held_runs, named_states
from infinity.runtime.units import Unit
from infinity.sharding.ranks import Ranks, join_ranks
from infinity.sharding.share import Share
from infinity.storage.copies import Copies
from infinity.storage.device_limit import DeviceLimit
from infinity.storage.reserve import Reserve
from infinity.storage.rundir import discard, run_files
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Pools, Resumed, Store
from infinity.timeline import Timeline

logger = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where the bytes are."""

    timeline: Timeline
    pools: Pools
    copies: Copies
    store: Store
    states: States
    resumed: Resumed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What turns gradients into new parameters."""

    grads: Grads
    exchange: Exchange
    pipeline: Pipeline
    optimizer: TieredAdamW
    loss_scale: LossScale | None


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything an engine owns. `closers` closes it in reverse order of construction."""

    config: Config
    device: torch.device
    ranks: Ranks
    share: Share
    timeline: Timeline
    model: nn.Module
    units: list[Unit]
    plan: Plan
    pools: Pools
    store: Store
    states: States
    pipeline: Pipeline
    grads: Grads
    exchange: Exchange
    optimizer: TieredAdamW
    loss_scale: LossScale | None
    scheduler: Scheduler
    hooks: Hooks
    resumed: Resumed | None
    closers: ExitStack


def assemble(model: Model, config: Config, param_groups: ParamGroups | None, *, checkpoint_directory: Path | None) -> Parts:
    """Build everything. With a checkpoint, the values in this run's store are replaced by it: they go once it is known to be whole."""
    with ExitStack() as closers:
        timeline = Timeline()
        ranks = join_ranks(config.device, timeout_s=config.zero.timeout_s, timeline=timeline, shard_group=shard_group(config))
        closers.callback(ranks.close)
        pool = native.ThreadPool(adam_threads(config, ranks.here))
        closers.callback(pool.close)
        generator = torch.get_rng_state()
        with ranks.all_or_none("preparing the run"):
            prepared = prepare(model, config, param_groups, pool, ranks, goes_on=checkpoint_directory is None)
        check_alike(ranks, prepared.share, config, prepared.model, [unit.layout for unit in prepared.units], prepared.plan)
        origin = Origin(ranks, _on_read(prepared))
        origin.lead_generator(generator)
        identity = _identity(prepared, origin)
        if checkpoint_directory is not None:
            _make_way(prepared, checkpoint_directory)
        with ranks.all_or_none("opening the run's files"):
            _limit_device(prepared, closers)
            kept = _open_run(prepared, identity, timeline, closers)
        ranks.check_same(
            None if kept.resumed is None else kept.resumed.step,
            "the step that was published last",
            "The job ended while it was published: remove the run with `infinity clean`, or choose another store.run",
        )
        with ranks.as_one("writing the first values"):
            _fill(prepared, kept, origin)
        update = _make_update(prepared, kept, closers)
        scheduler = _make_scheduler(prepared, kept, update, closers)
        hooks = _attach(prepared, update, scheduler, closers)
        return Parts(
            config=config,
            device=prepared.device,
            ranks=ranks,
            share=prepared.share,
            timeline=kept.timeline,
            model=prepared.model,
            units=prepared.units,
            plan=prepared.plan,
            pools=kept.pools,
            store=kept.store,
            states=kept.states,
            pipeline=update.pipeline,
            grads=update.grads,
            exchange=update.exchange,
            optimizer=update.optimizer,
            loss_scale=update.loss_scale,
            scheduler=scheduler,
            hooks=hooks,
            resumed=kept.resumed,
            closers=closers.pop_all(),
        )


def _make_way(prepared: Prepared, checkpoint_directory: Path) -> None:
    """Remove what the run's store holds, once the checkpoint that replaces it is known to be whole and to fit."""
    names, buffers = names_of(prepared.groups, addresses_of(prepared.units)), dict(prepared.model.named_buffers())
    places, run, ranks = [path.path for path in prepared.paths], prepared.config.store.run, prepared.ranks
    checkpoint.verify(
        checkpoint_directory,
        named_states(prepared.units),
        held_runs(prepared.units, prepared.share).__getitem__,
        accept=lambda extra: check_fits(extra["run"], names, buffers),
        thoroughly=any(ranks.everybodys(bool(run_files(places, run).files), "the run's files")),
        ranks=ranks,
    )
    for rank in range(ranks.world_size):  # in turns: ranks may share directories, and who removes locks them
        with ranks.all_or_none("making way for a checkpoint"):
            removed = discard(places, run) if rank == ranks.rank else None
        if removed and removed.files:
            logger.warning("run %r made way for %s: %d bytes of its files were removed", run, checkpoint_directory, removed.nbytes)


def _limit_device(prepared: Prepared, closers: ExitStack) -> None:
    """Hold torch's allocator to the HBM budget. A budget of 0 only says that nothing rests there."""
    plan, budget = prepared.plan, prepared.plan.limits[Tier.HBM]
    if budget:
        limit = DeviceLimit(prepared.device, budget, plan.held_bytes(Tier.HBM) - plan.working_bytes(Tier.HBM, ACTIVATIONS))
        closers.callback(limit.close)


def _open_run(prepared: Prepared, identity: dict[str, str], timeline: Timeline, closers: ExitStack) -> Kept:
    """Open or make the run's files, and take the memory for what rests there."""
    config, plan, rank = prepared.config, prepared.plan, prepared.ranks.rank
    pools = _make_pools(plan, threads=min(8, prepared.hardware.cores))
    closers.callback(pools.pinned.close)
    closers.callback(pools.plain.close)
    copies = Copies(prepared.device, timeline)
    closers.callback(copies.close)
    store = Store(
        paths=prepared.paths,
        run=config.store.run,
        pools=pools,
        copies=copies,
        timeline=timeline,
        aio=aio_options(config),
        rank=rank,
        identity=identity,
    )
    closers.callback(store.close)
    resumed = _open_store(store, plan, prepared.units, config)
    states = States(prepared.units, store, pools.plain, chunk_numel=plan.chunk_numel, deadline_s=config.nvme.deadline_s, share=prepared.share)
    closers.callback(states.close)
    return Kept(timeline=timeline, pools=pools, copies=copies, store=store, states=states, resumed=resumed)


def _fill(prepared: Prepared, kept: Kept, origin: Origin) -> None:
    """Unless the run goes on, the values of rank 0's model become the store's; the model keeps none of them."""
    if kept.resumed is None:
        adoption = Adoption(
            prepared.units,
            kept.store,
            kept.pools.plain,
            chunk_numel=prepared.plan.chunk_numel,
            room_bytes=prepared.plan.working_bytes(Tier.CPU),
            read=origin.pieces,
            share=prepared.share,
        )
        with adoption:
            for unit in prepared.units:
                adoption.take(unit, [param.detach() for param in unit.params])
                _let_go(unit, prepared.device)
    for unit in prepared.units:
        _let_go(unit, prepared.device)
    origin.give_buffers(prepared.model)
    if prepared.spool is not None:
        prepared.spool.flush()
    _move_buffers(prepared.model, prepared.device)


def _make_update(prepared: Prepared, kept: Kept, closers: ExitStack) -> Update:
    """Gradients, the step, and the optimizer that users hold."""
    config, device, deadline_s = prepared.config, prepared.device, prepared.config.nvme.deadline_s
    grad_dtype = torch.float32 if config.train.accumulation > 1 else None
    ranks, share, layouts = prepared.ranks, prepared.share, [unit.layout for unit in prepared.units]
    of_group = partial(trainable_chunks, layouts, prepared.plan.chunk_numel, grad_dtype=grad_dtype, share=share)
    grad_chunks = of_group(group=Group.GRAD)
    grads = Grads(
        grad_chunks,
        store=kept.store,
        copies=kept.copies,
        pool=prepared.pool,
        slabs=kept.pools.pinned,
        timeline=kept.timeline,
        device=device,
        deadline_s=deadline_s,
        busy_paths=prepared.plan.busy_paths,
        total=partial(ranks.total, name="the squares of the gradients", is_sharded=share.is_sharded(Group.OPTIMIZER)),
    )
    closers.callback(grads.close)
    exchange = Exchange(
        layouts,
        grad_chunks,
        share=share,
        chunk_numel=prepared.plan.chunk_numel,
        store=kept.store,
        copies=kept.copies,
        ranks=ranks,
        slabs=kept.pools.plain,
        timeline=kept.timeline,
        deadline_s=deadline_s,
    )
    closers.callback(exchange.close)
    pipeline = Pipeline(
        of_group(group=Group.OPTIMIZER),
        store=kept.store,
        copies=kept.copies,
        cpu_kernel=CpuKernel(prepared.pool),
        gpu_kernel=GpuKernel(),
        pools=kept.pools,
        timeline=kept.timeline,
        device=device,
        deadline_s=deadline_s,
        buffers=buffer_count(prepared.plan.busy_paths),
    )
    closers.callback(pipeline.close)
    loss_scale = _loss_scale(config)
    optimizer = TieredAdamW(
        prepared.groups,
        addresses=addresses_of(prepared.units),
        grads=grads,
        pipeline=pipeline,
        exchange=exchange,
        loss_scale=loss_scale,
        max_grad_norm=config.optimizer.max_grad_norm,
        **defaults(config),
    )
    return Update(grads=grads, exchange=exchange, pipeline=pipeline, optimizer=optimizer, loss_scale=loss_scale)


def _make_scheduler(prepared: Prepared, kept: Kept, update: Update, closers: ExitStack) -> Scheduler:
    """What moves units, within the shares of the budget that the plan set aside."""
    plan, device = prepared.plan, prepared.device
    compute = tier_of(device)
    clock = ComputeClock(kept.timeline, device)
    descent = Descent(
        update.grads,
        prepared.ranks,
        prepared.share,
        kept.store,
        kept.pools.pinned,
        clock,
        device,
        budget_bytes=plan.working_bytes(compute, ON_THEIR_WAY),
        deadline_s=prepared.config.nvme.deadline_s,
    )
    movers = Movers(
        store=kept.store,
        copies=kept.copies,
        slabs=kept.pools.pinned,
        staging=_staging(plan, kept.pools),
        descent=descent,
        states=kept.states,
        clock=clock,
        ranks=prepared.ranks,
        share=prepared.share,
    )
    scheduler = Scheduler(
        prepared.units,
        movers,
        device,
        chunk_numel=plan.chunk_numel,
        budget_bytes=plan.working_bytes(compute, LIVE),
        spare_bytes=plan.spare_bytes(compute),
        prefetch_units=plan.prefetch_units,
        deadline_s=prepared.config.nvme.deadline_s,
    )
    closers.callback(scheduler.close)
    return scheduler


def _attach(prepared: Prepared, update: Update, scheduler: Scheduler, closers: ExitStack) -> Hooks:
    """Hooks on the model: from here on its parameters come and go."""
    hooks = Hooks(prepared.model, prepared.units, scheduler, device=prepared.device, gather_limit_bytes=prepared.plan.spare_bytes(Tier.CPU))
    closers.callback(hooks.close)
    if prepared.device.type != "cpu":
        closers.callback(move_arguments(prepared.model, prepared.device).remove)
    update.optimizer.on_update = scheduler.invalidate
    update.optimizer.on_progress = partial(scheduler.warm_updated, update.pipeline.is_updated)
    update.optimizer.on_cleared = hooks.forget_grads
    return hooks


def _on_read(prepared: Prepared) -> OnRead:
    """What was read of a built model may leave memory."""
    return prepared.spool.visited if prepared.spool is not None else lambda piece: None


def _let_go(unit: Unit, device: torch.device) -> None:
    """The values rest in the store from here on."""
    for param in unit.params:
        param.data = torch.empty((), dtype=param.dtype, device=device).expand(param.shape)


def _make_pools(plan: Plan, threads: int) -> Pools:
    """Without a GPU nothing is pinned, and all CPU memory comes from one pool that grows no further than the plan."""
    if plan.device.type == "cuda":
        return Pools(pinned=SlabPool(pin=True, threads=threads), plain=SlabPool(pin=False, threads=threads))
    pool = SlabPool(pin=False, threads=threads, limit_bytes=plan.held_bytes(Tier.CPU))
    return Pools(pinned=pool, plain=pool)


def _identity(prepared: Prepared, origin: Origin) -> dict[str, str]:
    """What must be equal to go on with a run, beside the layout."""
    config, world_size = prepared.config, prepared.ranks.world_size
    identity = {"optimizer": "adamw", "precision": config.precision.dtype}
    if world_size > 1:
        identity["ranks"] = f"{world_size}, zero.stage {config.zero.stage}, zero.shard_group {prepared.ranks.shard_size}"
    if config.nvme.paths and config.store.resume != "never":
        identity["initial weights"] = origin.checksum(prepared.units)
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


def _staging(plan: Plan, pools: Pools) -> Reserve | None:
    """Pinned buffers between NVMe reads and uploads, where a GPU's parameters rest on NVMe."""
    sizes = [spec.padded_nbytes for spec in plan.specs if spec.tier is Tier.NVME and spec.key.group is Group.PARAM]
    if plan.device.type != "cuda" or not sizes:
        return None
    return Reserve(pools.pinned, max(sizes), upload_buffers(plan.busy_paths), "upload staging")
