"""Which modules are hooked, and the calls of them that are in progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from infinity.runtime.attach import AttachedUnit
from infinity.runtime.saved import SavedTensors


@dataclass(eq=False)
class Site:
    """A hooked module: what a call of it needs live."""

    name: str
    module: nn.Module
    needs: tuple[AttachedUnit, ...]
    unit: AttachedUnit | None
    """The unit whose module this is."""
    within: AttachedUnit | None
    """The one unit that this module lies inside of and needs: while that is in use, a call of this one has nothing to do."""

    def is_inside(self, other: Site) -> bool:
        return not other.name or self.name.startswith(f"{other.name}.")


@dataclass(slots=True, eq=False)
class Call:
    """A call of a site in progress, in the forward (task -1) or inside a backward pass."""

    site: Site
    task: int
    thread: int
    used: list[AttachedUnit] = field(default_factory=list)
    saved: SavedTensors | None = None
    began_ns: int = 0

    def close(self) -> None:
        """It needs nothing any more. An interrupt in the middle leaves the rest to the next time: Python looks for one when it enters a
        function of its own, and after one of C's."""
        while self.used:
            self.used[-1].unuse()
            self.used.pop()
        if self.saved is not None:
            self.saved.close()
            self.saved = None


def sites_of(model: nn.Module, units: Sequence[AttachedUnit]) -> list[Site]:
    """Modules that own a parameter, unit modules, and what contains unit modules, the model first."""
    owner = {param: unit for unit in units for param in unit.unit.params}
    own_unit = {unit.unit.module: unit for unit in units}
    around: dict[nn.Module, AttachedUnit | None] = {}
    sites = []
    for name, module in model.named_modules():
        _mark_around(module, own_unit, around)
        unit = own_unit.get(module)
        contains_units = any(child in own_unit for child in module.modules() if child is not module)
        needs = dict.fromkeys(owner[param] for param in module.parameters(recurse=False))
        if unit is not None:
            needs[unit] = None
        if not needs and not contains_units and module is not model:
            continue
        inner = around[module]
        is_light = unit is None and not contains_units and module is not model and list(needs) == [inner]
        sites.append(Site(name=name, module=module, needs=tuple(needs), unit=unit, within=inner if is_light else None))
    return sites


def _mark_around(module: nn.Module, own_unit: dict[nn.Module, AttachedUnit], around: dict[nn.Module, AttachedUnit | None]) -> None:
    """Note the innermost unit whose module contains `module`, parents before children."""
    around.setdefault(module, own_unit.get(module))
    for child in module.children():
        around.setdefault(child, own_unit.get(child, around[module]))


def running_calls(module: nn.Module) -> int:
    """How many calls of `module` are on this thread's stack. Walks it: for suspicious cases only."""
    count, frame = 0, sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "_wrapped_call_impl" and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
