"""`infinity.initialize` and what it returns: an engine around an ordinary module, an ordinary optimizer and a store."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from infinity import checkpoint
from infinity.assembly import Parts, assemble
from infinity.config import load_config
from infinity.config.load import Source
from infinity.errors import ClosedError, ConfigError
from infinity.home import Home
from infinity.kinds import Group
from infinity.optim.optimizer import TieredAdamW
from infinity.planner.plan import Plan
from infinity.preparation import Model, ParamGroups, preview
from infinity.run_state import RunState, Stateful
from infinity.sharding.ranks import Ranks
from infinity.storage.work import COMPLETED, Work
from infinity.timeline import Timeline

logger = logging.getLogger("infinity")

_LAST_WAIT_S = 5.0
"""For other ranks, where an engine is never closed: torchrun ends them once this process has failed, and not before."""

_open: dict[Ranks, Home] = {}
"""The ranks of engines that are not closed, and the process that they are of."""


def initialize(
    model: Model,
    config: Source,
    *,
    param_groups: ParamGroups | None = None,
    checkpoint: str | Path | None = None,
) -> Engine:
    """Attach an engine to a model: its parameters move into the tiers, and the module goes on working as before.

    `model` is an nn.Module, or a function that builds one too big to build whole; over ranks its values are rank 0's. `config` is a path
    of a TOML or JSON file, a mapping, or a Config. `param_groups` is what torch.optim.AdamW takes, or a function of `named_parameters()`.
    With `checkpoint` the run starts from that directory (see `Engine.load`), whatever its store holds.

    Raises ConfigError for what cannot work and CapacityError for what does not fit, before anything is written;
    LockError when another job uses the run.
    """
    checked = load_config(config)
    engine = Engine(assemble(model, checked, param_groups, checkpoint_directory=None if checkpoint is None else Path(checkpoint)))
    try:
        if checkpoint is not None:
            engine.load(checkpoint)
        elif engine._parts.resumed is not None:
            engine._resume(engine._parts.resumed.extra)
    except BaseException:
        engine.close(publish=False)
        raise
    return engine


class Engine:
    """One model in training. Close it, or use it as a context manager."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._state = RunState(parts.model, parts.optimizer, parts.loss_scale, parts.device, parts.ranks.rank)
        self._closed = False
        self._home = Home()
        self._is_published = bool(parts.config.nvme.paths) and parts.config.store.resume != "never"
        self._reminder = weakref.finalize(self, _remind, parts.config.store.run, self._home, self._is_published)
        _open[parts.ranks] = self._home
        self._taken_before = 0
        parts.optimizer.register_step_pre_hook(self._before_step)
        parts.optimizer.register_step_post_hook(self._after_step)

    @property
    def model(self) -> nn.Module:
        """The user's module, hooks attached."""
        return self._parts.model

    @property
    def optimizer(self) -> TieredAdamW:
        """A torch.optim.Optimizer over the model's parameters."""
        return self._parts.optimizer

    @property
    def plan(self) -> Plan:
        """Where everything rests and what a step is expected to cost."""
        return self._parts.plan

    @property
    def timeline(self) -> Timeline:
        """What was busy when."""
        return self._parts.timeline

    @property
    def device(self) -> torch.device:
        """Where compute happens."""
        return self._parts.device

    @property
    def rank(self) -> int:
        """This process among the ranks of the job, from 0."""
        return self._parts.ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks train the model together: 1 without torchrun."""
        return self._parts.ranks.world_size

    @property
    def global_step(self) -> int:
        """Optimizer steps taken since the beginning of the run; skipped ones do not count."""
        return self._state.global_step

    def register(self, **objects: Stateful) -> None:
        """Objects with state_dict and load_state_dict (schedulers, loaders): saved and restored with the run."""
        self._state.register(objects)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward()` on: scaled in fp16, itself otherwise."""
        return self._parts.loss_scale.scale(loss) if self._parts.loss_scale else loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the coming step by their global norm, as torch.nn.utils.clip_grad_norm_; returns the norm before."""
        self._check_open()
        return self._parts.optimizer.clip_grad_norm_(max_norm)

    def gathered(self, module: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Real values in the parameters of `module` (the whole model if left out), for reading and changing, inside `with`."""
        self._check_open()
        return self._parts.hooks.gathered(self.model if module is None else module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward passes of all micro-steps but the last, as DistributedDataParallel's: ranks do not talk in them.

        Where gradients are whole on each rank (one process, zero.stage 0 and 1) they never do before the step, so this changes nothing.
        Raises ConfigError at stages 2 and 3: each rank has room for its own part of the gradients only.
        """
        self._check_open()
        if self._parts.share.is_sharded(Group.GRAD):
            stage = self._parts.share.stage.number
            raise ConfigError(
                f"no_sync() keeps whole gradients on each rank, and zero.stage = {stage} makes room for one part in {self.world_size} of them. "
                "Set zero.stage = 1, which reduces once per step, or leave no_sync() out"
            )
        return nullcontext()

    def save(self, directory: str | Path) -> Work:
        """Write a complete checkpoint: weights, moments, step, loss scale, registered objects, generators, buffers.

        It is written when this returns, and appears whole or not at all. Over ranks every rank calls it, with a directory that all share, and
        writes what it holds; any number of ranks can load it. Raises CheckpointError if the directory exists, StorageError when the disk is
        full, RankError for what only another rank could not do.
        """
        self._check_open()
        with self._parts.ranks.all_or_none("beginning to save"):
            self._parts.pipeline.check()
            run = self._state.capture()
        dtypes = {slot.name: flat.dtype for unit in self._parts.units for flat in unit.layout.flats for slot in flat.slots}
        try:
            checkpoint.save(
                Path(directory),
                self._parts.states,
                {"run": run},
                step=self.global_step,
                dtypes=dtypes,
                aliases=self._tied_names(),
                buffers=self._persistent_buffers(),
                ranks=self._parts.ranks,
            )
        finally:
            self._parts.states.flush()  # the next step changes what was read
        return COMPLETED

    def load(self, directory: str | Path) -> None:
        """Put back what `save` wrote, also one made under another placement, other budgets, other paths or by another number of ranks.

        Over ranks every rank calls it. Raises CheckpointError before anything is changed on any rank when parameters, shapes or files do not match.
        """
        self._check_open()
        ranks = self._parts.ranks
        with ranks.all_or_none("beginning to load"):
            self._parts.pipeline.check()
        self._parts.scheduler.invalidate()
        self._parts.optimizer.zero_grad()
        is_changed = False

        def begin() -> None:
            nonlocal is_changed
            is_changed = True

        try:
            extra = checkpoint.load(
                Path(directory), self._parts.states, accept=lambda extra: self._state.check(extra["run"]), begin=begin, ranks=ranks
            )
            with ranks.all_or_none("writing back what was loaded"):
                self._parts.states.flush()
            self._parts.exchange.gather_all()
            with ranks.all_or_none("putting back what belongs to the run"):
                self._new_values()
                self._state.restore(extra["run"])
        except BaseException as error:
            if is_changed:
                self._parts.pipeline.spoil(error)
            raise

    def statistics(self) -> dict[str, Any]:
        """Totals since the start: bytes moved and seconds stalled per lane, and what is and was held in memory."""
        timeline, scheduler, pools = self._parts.timeline, self._parts.scheduler, self._parts.pools
        return {
            "bytes": timeline.moved_bytes(),
            "stalled_s": timeline.stalled_s(),
            "peak_live_bytes": scheduler.peak_bytes,
            "peak_live_units": scheduler.peak_units,
            "cpu_bytes": sum(pool.allocated_bytes for pool in {pools.pinned, pools.plain}),
            "peak_cpu_bytes": sum(pool.peak_bytes for pool in {pools.pinned, pools.plain}),
        }

    def detach(self) -> nn.Module:
        """Give the module its real parameters back, take the hooks off, and close the engine. The values must fit in memory."""
        self._check_open()
        self._parts.hooks.detach()
        self.close()
        return self._parts.model

    def close(self, *, publish: bool | None = None) -> None:
        """Finish what is under way, publish the run so that the next process goes on with it, stop the threads, free everything.

        A run is published where it has a path and store.resume is not "never"; `publish=False` leaves it as it is.
        In a forked child nothing happens: the files are the parent's.
        """
        if self._closed or not self._home.is_here():
            return
        self._closed = True
        self._reminder.detach()
        try:
            if (self._is_published if publish is None else publish) and self._parts.pipeline.is_sound:
                self._parts.scheduler.invalidate()
                self._parts.store.publish(self.global_step, self._extra())
        finally:
            self._parts.closers.close()
            del _open[self._parts.ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an exception nothing is published: schedulers, loaders and generators may be ahead of the last step."""
        self.close(publish=None if kind is None else False)

    def _before_step(self, *_: object) -> None:
        self._check_open()
        self._taken_before = self._parts.optimizer.taken_steps

    def _after_step(self, *_: object) -> None:
        if self._parts.optimizer.taken_steps > self._taken_before:
            self._state.global_step += 1
            self._new_values()
        self._parts.scheduler.warm()

    def _new_values(self) -> None:
        """Backward through anything computed from the old values must raise."""
        for unit in self._parts.units:
            if any(flat.trainable for flat in unit.layout.flats):
                unit.version += 1

    def _extra(self) -> dict[str, Any]:
        """What the store keeps beside the states, as JSON."""
        return {"run": checkpoint.to_json(self._state.capture()), "chunk_numel": self._parts.plan.chunk_numel}

    def _resume(self, extra: Mapping[str, Any]) -> None:
        self._state.restore(checkpoint.from_json(extra["run"]))

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers that torch's state_dict holds too."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self.model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def _tied_names(self) -> dict[str, str]:
        """Every other name of a tied parameter: name -> the name it is stored under."""
        owners = {param: name for unit in self._parts.units for name, param in zip(unit.names, unit.params, strict=True)}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: owners[param] for name, param in every if owners[param] != name}

    def _check_open(self) -> None:
        self._home.check()
        if self._closed:
            raise ClosedError("the engine is closed: call infinity.initialize again")


def _remind(run: str, home: Home, is_published: bool) -> None:
    """The engine is gone, or the interpreter ends, and close() was never called."""
    if home.is_here():
        lost = ": its last steps are not published" if is_published else ""
        logger.warning("the engine of run %r was never closed%s. Use it under `with`, or call close()", run, lost)


@atexit.register
def _leave() -> None:
    """The interpreter ends, after what the program has registered for that. Threads that ranks' groups still have would abort the process."""
    for ranks, home in _open.items():
        if home.is_here():
            ranks.close(_LAST_WAIT_S)


def plan(model: Model, config: Source) -> Plan:
    """What fits where and what a step is expected to cost. No values are made: a builder runs on the meta device.

    A path whose rates are not known yet is measured, for a tenth of a second each way; they are kept in PATH/infinity/rates.json.
    Raises what `initialize` would raise for this configuration on this machine.
    """
    return preview(model, load_config(config)).plan
