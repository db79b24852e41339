"""The units that are live now: fetched when somebody needs them, released when the next one comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from infinity.errors import ClosedError
from infinity.home import Home
from infinity.kinds import Lane
from infinity.runtime.attach import AttachedUnit
from infinity.runtime.cutter import Cutters
from infinity.runtime.parameter import Seat, WakeUp
from infinity.runtime.residency import Residency
from infinity.runtime.saved import LiveStorages
from infinity.runtime.units import Unit
from infinity.timeline import Timeline

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The backward pass that this thread is in, -1 outside of any."""


def plain_tensors() -> AbstractContextManager[object]:
    """Inside `torch.inference_mode`, step out of it: a parameter cannot be a view of an inference tensor."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


class LiveUnits:
    """All units of a model, and which of them are live. Used by one thread at a time, the training thread or autograd's."""

    def __init__(
        self, units: Sequence[Unit], residency: Residency, device: torch.device, wake_up: WakeUp, *, guard: bool, timeline: Timeline | None
    ) -> None:
        cutters = Cutters()
        self.units = [AttachedUnit(unit, residency, cutters, device, wake_up, guard) for unit in units]
        self.residency, self.device = residency, device
        self.storages = LiveStorages()
        self._live: dict[AttachedUnit, None] = {}
        self._timeline = timeline
        self._home = Home()
        self.is_closed = False
        self._owners = {param: unit for unit in self.units for param in unit.unit.params}
        self._link_parents()

    def _link_parents(self) -> None:
        for unit in self.units:
            inside = set(unit.unit.module.modules())
            for other in self.units:
                if other is not unit and other.unit.module in inside and not unit.unit.is_root:
                    other.parents |= {unit}

    def take_over(self) -> None:
        """Every parameter becomes a placeholder."""
        for unit in self.units:
            unit.take_over()

    def fetch(self, unit: AttachedUnit) -> list[Tensor]:
        """Make a unit live; in return release those that nobody needs any more. Raises TraceError when requires_grad was changed."""
        self._home.check()
        if self.is_closed:
            raise ClosedError("the engine is closed: call infinity.initialize again")
        if unit.flats is not None and unit.is_outdated():  # left over from a call that was interrupted
            self.release(unit)
        if unit.flats is None:
            self.release_idle(beside=unit)
            self._live[unit] = None  # first: whoever comes after an interrupt finds all that may be live
            with plain_tensors():
                unit.rise(self.residency.fetch(unit.unit))
            self.storages.add(unit)
            if graph_task() != -1:
                unit.began_ns = time.monotonic_ns()
            if unit.is_regraded():
                self.release(unit)
                raise unit.regraded()
        assert unit.flats is not None
        return unit.flats

    def release_finished(self, beside: AttachedUnit) -> None:
        """Release what `release_idle` would, but for units whose backward is not over: some of their gradients have not arrived."""
        for unit in self._idle(beside):
            if unit.grads.is_full():
                self.release(unit)

    def release_idle(self, beside: AttachedUnit | None = None) -> None:
        """Release what no call in progress needs; `beside` a unit that comes, all but the root, the units around it, and what is kept."""
        for unit in self._idle(beside):
            self.release(unit)

    def _idle(self, beside: AttachedUnit | None) -> list[AttachedUnit]:
        idle = [unit for unit in self._live if unit.users == 0]
        if beside is None or not idle:
            return idle
        return [unit for unit in idle if not (unit.unit.is_root or unit in beside.parents or unit.is_kept())]

    def release(self, unit: AttachedUnit) -> None:
        """A unit is at rest again: new values are committed, gradients that have arrived go down.

        Raises TraceError, after the release, when a parameter was written to in place where that is not allowed, or given another shape.
        """
        flats = unit.flats
        if flats is None:  # an interrupt came before it was live, or when it was at rest again: what the user has changed is given up
            unit.rest()
            unit.is_writable = unit.is_shown = False
            self._live.pop(unit, None)
            return
        is_modified, is_writable, is_shown = unit.is_modified(), unit.is_writable, unit.is_shown
        misfit = unit.absorb() if is_writable else None
        self.storages.remove(unit)
        with plain_tensors():
            is_shared = unit.rest()
            unit.is_writable = unit.is_shown = False
            self._live.pop(unit, None)
            if is_writable and misfit is None:
                self.residency.commit(unit.unit, flats)
                unit.unit.version += is_modified
            del flats
            self.residency.release(unit.unit, is_changed=is_shown or is_writable or is_modified, is_shared=is_shared)
            unit.grads.hand_down()
        if self._timeline is not None and unit.began_ns:
            self._timeline.record(Lane.GPU, f"{unit.unit.name} backward", unit.began_ns, time.monotonic_ns())
            unit.began_ns = 0
        if misfit is not None:
            raise misfit
        if is_modified and not is_writable:
            raise unit.modified()

    def drop_grads(self) -> None:
        """Forget what a backward pass that broke off has left: gradients in a flat buffer, and on a parameter itself."""
        for unit in self.units:
            unit.grads.drop()
            for seat in unit.seats:
                seat.take_grad()

    def hand_down(self) -> None:
        """Backward is over: every gradient that has arrived goes down."""
        for unit in self.units:
            unit.grads.hand_down()

    def with_params(self, params: Iterable[nn.Parameter]) -> list[AttachedUnit]:
        """The units that own any of `params`."""
        return list(dict.fromkeys(self._owners[param] for param in params if param in self._owners))

    def wake(self, seats: Sequence[Seat]) -> None:
        """Make the units of these parameters live."""
        for unit in self.with_params(seat.param for seat in seats):
            self.fetch(unit)

    def close(self) -> None:
        """Nothing is live any more, whoever used it; values that were changed and gradients that had not gone down are lost."""
        self.is_closed = True
        for unit in self.units:
            unit.grads.drop()
        while self._live:
            unit, _ = self._live.popitem()
            self.storages.remove(unit)
            with plain_tensors():
                unit.rest()

    def leave(self, device: torch.device) -> None:
        """Unit by unit, give the parameters values of their own on `device`. No unit is live."""
        self._home.check()
        for unit in self.units:
            with torch.no_grad():
                unit.leave(self.residency.fetch(unit.unit), device)
                self.residency.release(unit.unit, is_changed=False, is_shared=False)
            unit.unit.version += 1
