"""Real values for reading and changing outside of forward and backward: `gathered`, `state_dict`, `load_state_dict`, moves refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import CapacityError, ClosedError, TraceError
from infinity.runtime.attach import AttachedUnit
from infinity.runtime.live import LiveUnits
from infinity.sizes import format_bytes


@contextmanager
def gathered(live: LiveUnits, units: Sequence[AttachedUnit], *, write: bool) -> Iterator[None]:
    """The units' parameters have real values inside; with `write` they are committed at the end, also when the body raised.

    Raises ClosedError at the end when the engine was closed inside.
    """
    entered: list[AttachedUnit] = []
    try:
        for unit in units:
            unit.use(unit.unit.module)
            entered.append(unit)
            live.fetch(unit)
            unit.show()
        yield
    finally:
        for unit in entered:
            unit.unuse()
        for unit in entered:
            if unit.flats is not None and unit.users == 0:
                unit.is_writable = write
                live.release(unit)
        if live.is_closed and write:
            raise ClosedError("the engine was closed inside gathered(): what was changed there is lost. Close it after the block")


class StateDicts:
    """`state_dict()` gathers unit by unit into CPU copies; `load_state_dict()` writes into the units and commits them."""

    def __init__(self, model: nn.Module, live: LiveUnits, limit_bytes: int | None) -> None:
        self._model, self._live, self._limit_bytes = model, live, limit_bytes
        self._outermost: nn.Module | None = None
        self._copies: weakref.WeakValueDictionary[nn.Parameter, Tensor] = weakref.WeakValueDictionary()
        self._destination: Callable[[], Any] = lambda: None

    def attach(self) -> list[Any]:
        """Hook every module, since any of them can be asked. Returns the handles."""
        handles: list[Any] = []
        for module in self._model.modules():
            handles.append(module.register_state_dict_pre_hook(self._before_state_dict))  # type: ignore[no-untyped-call]
            handles.append(module._register_state_dict_hook(self._after_state_dict))  # type: ignore[no-untyped-call]
            handles.append(module._register_load_state_dict_pre_hook(self._before_load, with_module=True))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_post_hook(self._after_load))  # type: ignore[no-untyped-call]
        return handles

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise TraceError("state_dict(keep_vars=True) would hand out parameters whose values are with the engine: leave keep_vars out")
        if self._outermost is None:
            self._outermost = module
            self._check_limit(module)
        self._fetch(module)

    def _after_state_dict(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if self._destination() is not state:
            self._copies = weakref.WeakValueDictionary()
            self._destination = weakref.ref(state) if hasattr(state, "__weakref__") or type(state).__name__ == "OrderedDict" else lambda: None
        for name, param in module.named_parameters(recurse=False):
            key = prefix + name
            if key in state:
                copied = self._copies.get(param)
                if copied is None:
                    copied = state[key].to("cpu", copy=True)
                    self._copies[param] = copied
                state[key] = copied
        self._leave(module)

    def _before_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise TraceError("load_state_dict(assign=True) would replace parameters that the engine holds: leave assign out, values are copied in")
        if self._outermost is None:
            self._outermost = module
        for unit in self._fetch(module):
            unit.is_writable = True

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        self._leave(module)

    def _fetch(self, module: nn.Module) -> list[AttachedUnit]:
        units = self._live.with_params(module.parameters(recurse=False))
        for unit in units:
            self._live.fetch(unit)
        return units

    def _leave(self, module: nn.Module) -> None:
        if module is self._outermost:
            self._outermost = None
            self._live.release_idle()

    def _check_limit(self, module: nn.Module) -> None:
        needed = sum(unit.unit.layout.nbytes for unit in self._live.with_params(module.parameters()))
        if self._limit_bytes is not None and needed > self._limit_bytes:
            raise CapacityError(
                f"state_dict() would copy {format_bytes(needed)} of parameters into CPU memory, but {format_bytes(self._limit_bytes)} are free in "
                "its budget. Save with engine.save(path), and write one file for other programs with `infinity export`"
            )


def refuse_moves(model: nn.Module, live: LiveUnits) -> Callable[..., nn.Module]:
    """What takes the place of `model._apply`: conversions that would change a parameter raise, others reach the buffers alone."""

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        dtypes = {seat.placeholder.dtype for unit in live.units for seat in unit.seats}
        for dtype in dtypes:
            probe = torch.empty(0, dtype=dtype, device=live.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise TraceError(
                    f"the model cannot be converted from {probe.dtype} on {probe.device} to {moved.dtype} on {moved.device}: the engine holds its "
                    "parameters. Set precision.dtype and device in the configuration, or call engine.detach() first"
                )
        for module in model.modules() if recurse else (model,):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return model

    return apply
