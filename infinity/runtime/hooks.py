"""Hooks on a module that make each unit live for its forward and backward, and move its gradients out as they arrive.

A hooked call makes the units it needs live; a unit's own call releases it again. In backward a unit is live from the gradient of its
outputs, or the first tensor of it that autograd unpacks, until the next unit's turn; its gradients go down then. Whether this is forward
or backward is asked of autograd's graph task, never kept in a flag, so that recomputation inside backward is told apart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from infinity.errors import TraceError
from infinity.kinds import Lane
from infinity.runtime.attach import AttachedUnit
from infinity.runtime.calls import Call, Site, running_calls, sites_of
from infinity.runtime.gather import StateDicts, gathered, refuse_moves
from infinity.runtime.live import LiveUnits, graph_task
from infinity.runtime.parameter import Seat, refuse_grad, refuse_use
from infinity.runtime.residency import Residency
from infinity.runtime.saved import Hook, SavedTensors, can_chain, is_checkpoints, is_ours, top_hooks
from infinity.runtime.tensors import tensors_in
from infinity.runtime.units import Unit
from infinity.timeline import Timeline

logger = logging.getLogger("infinity")

_LOOKUPS = (nn.Embedding,)
"""Modules whose backward reads no weights: their unit is not fetched for it."""


class Hooks:
    """A model whose parameters come and go with its calls. Everything is in place after construction, until `detach()`.

    `device` is where the placeholders are, the parameters' own if left out. `guard`: using a parameter at rest outside of forward and
    backward raises. `timeline`: on a CPU device, units' forwards and backwards are recorded there. `state_dict()` of more than
    `gather_limit_bytes` raises CapacityError.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        residency: Residency,
        *,
        device: torch.device | None = None,
        guard: bool = True,
        timeline: Timeline | None = None,
        gather_limit_bytes: int | None = None,
    ) -> None:
        check_params(units)
        device = device or units[0].params[0].device
        timeline = timeline if device.type == "cpu" else None
        self.model, self.residency, self.device = model, residency, device
        self._live = LiveUnits(units, residency, device, self._wake_up, guard=guard, timeline=timeline)
        self._timeline = timeline
        self._calls: list[Call] = []
        self._armed: set[int] = set()
        self._unfinished_passes = 0
        """Backward passes that have begun and not ended, since gradients were last given up. One that breaks off never ends, and may leave some."""
        self._has_warned = self._is_detached = False
        self._handles: list[Any] = StateDicts(model, self._live, gather_limit_bytes).attach()
        self._grad_handles: list[Any] = []
        self._live.take_over()
        self._hook_modules()
        self._hook_grads()
        model.__dict__.update(_apply=refuse_moves(model, self._live), zero_grad=self._zero_grad())

    # -- attach ------------------------------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        for site in sites_of(self.model, self._live.units):
            before, after = self._light(site) if site.within is not None else self._full(site)
            self._handles.append(site.module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(site.module.register_forward_hook(after, always_call=True))

    def _full(self, site: Site) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any) -> None:
            self._enter(site, module)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._leave(site, out)

        return _hidden(before), _hidden(after)

    def _light(self, site: Site) -> tuple[Callable[..., None], Callable[..., None]]:
        """For a module inside a unit's module: nothing to do while the unit is in use. Compiled code sees only that test."""
        within = site.within
        assert within is not None
        enter, leave = self._full(site)

        def before(module: nn.Module, args: Any) -> None:
            if not within.in_use:
                enter(module, args)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            if within.caller is module:
                leave(module, args, out)

        return before, after

    def _hook_grads(self) -> None:
        for unit, seat in self._trained():
            handle = seat.param.register_post_accumulate_grad_hook(self._on_grad(unit, seat))  # type: ignore[no-untyped-call]
            self._grad_handles.append(handle)

    def _trained(self) -> list[tuple[AttachedUnit, Seat]]:
        return [(unit, seat) for unit in self._live.units for seat in unit.seats if seat.trainable]

    # -- forward -----------------------------------------------------------------------------------------------------

    def _enter(self, site: Site, module: nn.Module) -> None:
        """A hooked module is called: make what it needs live. Also runs inside backward, for recomputation."""
        if module is not site.module:
            raise TraceError(
                f"a copy of {site.name or 'the model'!r} was called: torch.nn.DataParallel and other replicas cannot see the engine's values. "
                "Use one process per GPU (torchrun)"
            )
        task = graph_task()
        if task != -1:
            self._arm()
        elif self._calls:
            self._check_nesting(site)
        is_outermost = task == -1 and not self._calls
        call = Call(site, task, threading.get_ident())
        self._calls.append(call)
        if is_outermost:
            self._settle_backward()
            self._warn_autocast()
            self.residency.forward_begins()
        top = top_hooks()
        if self._wants_saved(site, top, is_outermost):
            call.saved = SavedTensors(self._live.storages, self._fetch_saved, top)
            call.saved.open()
        for unit in site.needs:
            unit.use(site.module)
            call.used.append(unit)
            self._live.fetch(unit)
        if self._timeline is not None:
            call.began_ns = time.monotonic_ns()

    def _leave(self, site: Site, out: Any) -> None:
        """A hooked call is over, also when it raised: then `out` is None."""
        call = self._call_of(site)
        if call is None:
            return
        if site.unit is not None and self._timeline is not None:
            self._timeline.record(Lane.GPU, site.unit.unit.name, call.began_ns, time.monotonic_ns())
        is_outermost = call is self._calls[0]
        try:
            self._end_down_to(call)
            if torch.is_grad_enabled() and (site.unit is not None or is_outermost):
                self._watch(out, site.unit)
            if is_outermost and call.task == -1:
                self._live.release_idle()
        finally:
            if is_outermost and call.task == -1:
                self.residency.forward_ends()

    def _call_of(self, site: Site) -> Call | None:
        """The innermost call in progress of this module in this thread."""
        thread = threading.get_ident()
        for call in reversed(self._calls):
            if call.site is site and call.thread == thread:
                return call
        return None

    def _end_down_to(self, call: Call) -> None:
        """End a call, and calls within it that never came to their end."""
        while self._calls:
            if self._end_innermost() is call:
                return

    def _end_innermost(self) -> Call:
        call = self._calls[-1]
        call.close()
        self._calls.pop()  # so far an interrupt leaves it to whoever comes next
        over = call.site.unit
        if over is not None and not over.unit.is_root and call.task == -1:  # during recomputation its backward follows at once
            if over.users == 0 and over.flats is not None:
                self._live.release(over)
        return call

    def _wants_saved(self, site: Site, top: tuple[Hook, Hook] | None, is_outermost: bool) -> bool:
        """Whether this call puts an entry on the stack of saved-tensor hooks: where the one on `top` is not ours.

        Over a checkpoint's it must be the same answer in forward and in its recomputation, or the checkpoint counts different tensors. So
        a call of a whole unit always goes on top; a module inside a unit, which has nothing to do while the unit is in use, never does.
        Where the stack cannot be looked into (torch before 2.8) only the outermost call does: checkpoints within the model work, and
        hooks around the model are blind in it.
        """
        if not can_chain():
            return is_outermost
        return not is_ours(top, self._live.storages) and not (site.within is not None and is_checkpoints(top))

    def _watch(self, out: Any, unit: AttachedUnit | None) -> None:
        """Have backward call `_begin` before it enters what made `out`.

        The graph holds neither these hooks nor the unit: a module may keep a tensor of it, and Python's collector does not look into graphs.
        """
        hooks, its_unit = ref(self), ref(unit) if unit is not None else None

        def begin(grad: Tensor) -> None:
            living = hooks()
            if living is not None:
                living._begin(its_unit() if its_unit is not None else None)

        for tensor in tensors_in(out):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def _check_nesting(self, site: Site) -> None:
        """Find calls that never ended (KeyboardInterrupt passes no hook), and callers in two threads."""
        outermost = self._calls[0]
        is_same = site is outermost.site
        is_inside = outermost.task == -1 and not is_same and site.is_inside(outermost.site)
        if outermost.thread != threading.get_ident():
            raise TraceError(
                f"two threads run the model at once: {outermost.site.name or 'the model'!r} is still in its forward. "
                "Call it from one thread; use one process per GPU instead of torch.nn.DataParallel"
            )
        if not is_inside and running_calls(outermost.site.module) <= is_same:  # the call that is checked here is on the stack already
            self.reset()

    def _warn_autocast(self) -> None:
        if self._has_warned or not torch.is_autocast_enabled(self.device.type):
            return
        for unit in self._live.units:
            if any(flat.dtype is torch.float32 and any(len(slot.shape) > 1 for slot in flat.slots) for flat in unit.unit.layout.flats):
                self._has_warned = True
                logger.warning(
                    "autocast is on over fp32 parameters (unit %r): it keeps a low-precision copy of every weight alive until backward, beyond the "
                    "hbm budget. Set precision.dtype and leave autocast out",
                    unit.unit.name,
                )
                return

    # -- backward ----------------------------------------------------------------------------------------------------

    def _begin(self, unit: AttachedUnit | None) -> None:
        """The gradient of a unit's output is there (None: of an outermost call's)."""
        if self._is_detached:
            return
        self._arm()
        if unit is not None and type(unit.unit.module) not in _LOOKUPS:
            self._live.fetch(unit)
        elif unit is not None:  # nothing is fetched in its place, yet the unit before it is done with, unless this is a lookup within it
            self._live.release_finished(beside=unit)

    def _arm(self) -> None:
        """Have autograd tell when this backward pass is over."""
        task = graph_task()
        if task == -1 or task in self._armed:
            return
        if not self._armed:
            self._unfinished_passes += 1
            self.residency.backward_begins()
        self._armed.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(_Finish(self, task))

    def _fetch_saved(self, unit: AttachedUnit) -> list[Tensor]:
        """A saved tensor of this unit is needed. Outside of backward (a look at grad_fn) nobody keeps the unit live."""
        is_backward = graph_task() != -1
        if is_backward:
            self._arm()
        flats = self._live.fetch(unit)
        if not is_backward and unit.users == 0:
            self._live.release(unit)
        return flats

    def _on_grad(self, unit: AttachedUnit, seat: Seat) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if graph_task() not in self._armed:
                self._arm()
            grad = seat.take_grad()
            if grad is not None:
                unit.grads.arrive(seat, grad.detach() if grad.requires_grad else grad)  # with create_graph it has a graph of its own
                if unit.flats is None and unit.grads.is_full():
                    unit.grads.hand_down()  # a unit at rest has no release to come; what comes in parts waits for the end of backward

        return arrived

    def _finish(self, task: int, *, is_broken: bool = False) -> None:
        """A backward pass is over, or died. The outermost one ends them all; of one that is settled already nothing is left to do."""
        if task in self._armed:
            self._armed.discard(task)
            if not self._armed:
                self._end_backward(is_broken=is_broken)

    def _end_backward(self, *, is_broken: bool) -> None:
        try:
            if is_broken:
                self.residency.backward_breaks()
            self._live.release_idle()
            self._live.hand_down()
            if not is_broken:
                self._unfinished_passes = max(0, self._unfinished_passes - 1)
        finally:
            self.residency.backward_ends()

    def _settle_backward(self) -> None:
        """Backward passes that raised left no word: end them before the next forward."""
        if self._armed and graph_task() == -1:
            self._armed.clear()
            self._end_backward(is_broken=True)

    # -- both --------------------------------------------------------------------------------------------------------

    def _wake_up(self, seats: Sequence[Seat], operation: str) -> None:
        """Parameters at rest are used by name. Inside a forward or backward their units come; outside that is an error."""
        if not self._calls and graph_task() == -1:
            seat = seats[0]
            raise TraceError(
                f"{operation} needs the values of parameter {seat.name!r}, which are with the engine: on the module there is a placeholder of shape "
                f"{tuple(seat.slot.shape)}. Use `with engine.gathered(module):` to read or change values, or model.state_dict() for all"
            )
        self._arm()
        self._live.wake(seats)

    def reset(self) -> None:
        """Forget every call and backward pass in progress: what they had live is released, what arrived goes down."""
        while self._calls:
            self._end_innermost()
        self._settle_backward()
        self._live.release_idle()

    # -- outside of both ---------------------------------------------------------------------------------------------

    def gathered(self, target: nn.Module | Sequence[Unit] | None = None, *, write: bool = True) -> AbstractContextManager[None]:
        """Real values in the parameters of a module, of units, or of the whole model, inside `with`.

        With `write`, what stands in them at the end becomes their value. Units come whole, all at once: they must fit on the device.
        """
        if isinstance(target, nn.Module) or target is None:
            units = self._live.with_params((target or self.model).parameters())
        else:
            units = self._live.with_params(param for unit in target for param in unit.params)
        return gathered(self._live, units, write=write)

    def forget_grads(self) -> None:
        """The engine gave its gradients up (zero_grad): `p.grad` is None again. What an interrupted call left live, or on its way down, goes too."""
        if self._unfinished_passes:
            self._live.drop_grads()
        self.reset()
        self._unfinished_passes = 0
        for unit in self._live.units:
            for seat in unit.seats:
                seat.is_held = False

    def _zero_grad(self) -> Callable[..., None]:
        def zero_grad(set_to_none: bool = True) -> None:
            self.residency.drop_grads()
            self.forget_grads()

        return zero_grad

    def close(self) -> None:
        """The engine ends in the middle of whatever it is: nothing is live any more. The modules' hooks stay, and refuse.

        What autograd holds, hooks and parameters, holds nothing of the engine from here on: such circles Python's collector does not see.
        """
        self._unhook_grads()
        if not self._is_detached:
            for _, seat in self._trained():
                seat.param.register_post_accumulate_grad_hook(refuse_grad)  # type: ignore[no-untyped-call]
        for unit in self._live.units:
            for seat in unit.seats:
                seat.wake_up = refuse_use
        while self._calls:
            self._calls.pop().close()
        self._armed.clear()
        self._live.close()

    def _unhook_grads(self) -> None:
        """Autograd holds these hooks, and with them the model."""
        for handle in self._grad_handles:
            handle.remove()

    def detach(self, device: torch.device | str = "cpu") -> nn.Module:
        """Take every hook off and leave a plain module with real values, parameters and buffers, on `device`. They must fit there."""
        self.reset()
        self._unhook_grads()
        for handle in self._handles:
            handle.remove()
        self._is_detached = True
        del self.model.__dict__["_apply"], self.model.__dict__["zero_grad"]
        self._live.leave(torch.device(device))
        return self.model.to(device)


class _Finish:
    """What autograd calls when a backward pass is over. When the pass dies, autograd drops it uncalled."""

    _was_called = True  # before it is made: an interrupt may come even there

    def __init__(self, hooks: Hooks, task: int) -> None:
        self._hooks, self._task = hooks, task
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._hooks._finish(self._task)

    def __del__(self) -> None:
        if self._was_called:
            return
        try:
            self._hooks._finish(self._task, is_broken=True)
        except Exception:  # the error that ended the pass is on its way already
            logger.debug("cleaning up after a backward pass that raised", exc_info=True)


def _hidden(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile leaves alone."""
    hidden: Callable[..., None] = torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]
    return hidden


def check_params(units: Sequence[Unit]) -> None:
    """Raise TraceError for a parameter that an engine holds already, and for a gradient that would be lost."""
    for unit in units:
        for name, param in zip(unit.names, unit.params, strict=True):
            if "_infinity_seat" in param.__dict__:
                raise TraceError(f"{name!r} is held by another engine: close that one with engine.detach() first")
            if param.grad is not None:
                raise TraceError(f"{name!r} already has a gradient, which the engine would lose: call model.zero_grad() before infinity.initialize")
