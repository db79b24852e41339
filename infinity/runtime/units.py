"""Units: which parameters are gathered, used and released together. Found from the model's structure, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import CapacityError, ConfigError
from infinity.sharding.layout import ParamSpec, UnitLayout, layout_unit
from infinity.sizes import format_bytes

Cast = Callable[[str, torch.dtype], torch.dtype]
"""(parameter name, its dtype in the model) -> its dtype in the engine."""

ROOT = "root"
"""The name of the unit that holds what no other unit does; its module is the model itself."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so that nothing could make them live."""


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """A unit before layout: a module and the parameters it owns, in registration order. A tied parameter stands once, in its first user."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    names: tuple[str, ...]


@dataclass(eq=False)
class Unit:
    """The parameters of one module that are gathered, used and released together."""

    index: int
    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    layout: UnitLayout
    version: int = 0
    """Counts updates of the values: whoever changes them adds one, and backward through an older version raises."""

    @property
    def is_root(self) -> bool:
        return self.name == ROOT

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {len(self.params)} parameters, {format_bytes(self.layout.nbytes)})"


def keep_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The cast that changes nothing."""
    return dtype


def make_units(plans: Sequence[UnitPlan], *, cast: Cast = keep_dtype, world_size: int = 1) -> list[Unit]:
    """Lay the plans out as flat buffers in the engine's dtypes. Floating-point parameters alone are cast."""
    units = []
    for index, plan in enumerate(plans):
        specs = [
            ParamSpec(name=name, shape=tuple(param.shape), dtype=_cast_dtype(name, param, cast), trainable=param.requires_grad)
            for name, param in zip(plan.names, plan.params, strict=True)
        ]
        layout = layout_unit(index, plan.name, specs, world_size)
        units.append(Unit(index=index, name=plan.name, module=plan.module, params=plan.params, names=plan.names, layout=layout))
    return units


def find_units(
    model: nn.Module,
    *,
    threshold_numel: int,
    classes: Collection[str] = (),
    function: Callable[[str, nn.Module], bool] | None = None,
    max_unit_bytes: int | None = None,
    cast: Cast = keep_dtype,
) -> list[UnitPlan]:
    """Split the model's parameters into units, in registration order with the root unit last.

    Without `classes` or `function`, units are the elements of repeated module lists (the outermost list whose elements fit in
    `max_unit_bytes`), and any other module that directly owns more than `threshold_numel` elements. `classes` replaces the lists by
    modules of those class names; `function(name, module)` decides alone. What is left is the root unit; a model without leftovers has
    none. Sizes count `cast` dtypes. Raises ConfigError for a class that the model lacks, CapacityError for a unit above `max_unit_bytes`.
    """
    finder = _Finder(model, threshold_numel, max_unit_bytes, cast)
    if function is not None:
        chosen = {module: name for name, module in model.named_modules() if name and function(name, module)}
    elif classes:
        chosen = finder.of_classes(classes)
    else:
        chosen = finder.automatic()
    plans = _assign(model, chosen)
    if max_unit_bytes is not None:
        _check_sizes(plans, max_unit_bytes, cast)
    return plans


class _Finder:
    """Walks the model once and chooses the modules that become units: {module: name}."""

    def __init__(self, model: nn.Module, threshold_numel: int, max_unit_bytes: int | None, cast: Cast) -> None:
        self._model, self._threshold_numel, self._max_unit_bytes, self._cast = model, threshold_numel, max_unit_bytes, cast
        self._chosen: dict[nn.Module, str] = {}

    def automatic(self) -> dict[nn.Module, str]:
        self._visit("", self._model)
        return self._chosen

    def of_classes(self, classes: Collection[str]) -> dict[nn.Module, str]:
        present = {type(module).__name__ for module in self._model.modules()}
        missing = sorted(set(classes) - present)
        if missing:
            raise ConfigError(
                f"units.classes names {', '.join(missing)}, which the model does not contain. Its classes are: {', '.join(sorted(present))}"
            )
        for name, module in self._model.named_modules():
            if name and type(module).__name__ in classes:
                self._chosen[module] = name
        inside = {child for module in self._chosen for child in module.modules()}
        for name, module in self._model.named_modules():
            if name and module not in inside and self._is_large(module):
                self._chosen[module] = name
        return self._chosen

    def _visit(self, name: str, module: nn.Module) -> None:
        if name and module not in self._chosen and self._is_large(module):
            self._chosen[module] = name
        elements = _elements(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if child in elements and self._is_block(child, elements):
                self._chosen.setdefault(child, path)
                if self._is_oversize(child):
                    self._visit(path, child)
            else:
                self._visit(path, child)

    def _is_block(self, element: nn.Module, elements: Sequence[nn.Module]) -> bool:
        """Whether a list's element is a unit: it can be called, and is not itself a list of blocks that stands alone among others."""
        if isinstance(element, _CONTAINERS):
            return False
        is_repeated = sum(type(other) is type(element) for other in elements) > 1
        return is_repeated or not any(_is_repeated(_elements(inner)) for inner in element.modules())

    def _is_oversize(self, module: nn.Module) -> bool:
        if self._max_unit_bytes is None:
            return False
        return sum(_nbytes(name, param, self._cast) for name, param in module.named_parameters()) > self._max_unit_bytes

    def _is_large(self, module: nn.Module) -> bool:
        """Whether the module's own parameters, without its children's, are worth a unit."""
        if isinstance(module, _CONTAINERS):
            return False
        return sum(param.numel() for param in module.parameters(recurse=False)) > self._threshold_numel


def _elements(module: nn.Module) -> list[nn.Module]:
    """The elements that own parameters, of a list with at least two such; else nothing."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    owning = [child for child in module.children() if any(True for _ in child.parameters())]
    return owning if len(owning) > 1 else []


def _is_repeated(elements: Sequence[nn.Module]) -> bool:
    return len({type(element) for element in elements}) < len(elements)


def _assign(model: nn.Module, chosen: dict[nn.Module, str]) -> list[UnitPlan]:
    """Give each parameter to the innermost chosen module around its first user; the rest to the root."""
    owned: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {module: [] for _, module in model.named_modules() if module in chosen}
    owned[model] = []
    seen: set[nn.Parameter] = set()
    for name, module, owner in _owners("", model, model, chosen, set()):
        for param_name, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                owned[owner].append((f"{name}.{param_name}" if name else param_name, param))
    root = owned.pop(model)
    plans = [_plan(chosen[module], module, items) for module, items in owned.items() if items]
    return [*plans, _plan(ROOT, model, root)] if root else plans


def _owners(
    name: str, module: nn.Module, owner: nn.Module, chosen: dict[nn.Module, str], done: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name, module, the unit's module around it) for each module once, in registration order."""
    if module in done:
        return
    done.add(module)
    owner = module if module in chosen else owner
    yield name, module, owner
    for child_name, child in module.named_children():
        yield from _owners(f"{name}.{child_name}" if name else child_name, child, owner, chosen, done)


def _plan(name: str, module: nn.Module, items: Sequence[tuple[str, nn.Parameter]]) -> UnitPlan:
    return UnitPlan(name=name, module=module, params=tuple(param for _, param in items), names=tuple(name for name, _ in items))


def _check_sizes(plans: Sequence[UnitPlan], max_unit_bytes: int, cast: Cast) -> None:
    sizes = {plan.name: sum(_nbytes(name, param, cast) for name, param in zip(plan.names, plan.params, strict=True)) for plan in plans}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if largest and sizes[largest] > max_unit_bytes:
        kind = next(type(plan.module).__name__ for plan in plans if plan.name == largest)
        raise CapacityError(
            f"unit {largest!r} ({kind}) has {format_bytes(sizes[largest])} of parameters, but a unit may have {format_bytes(max_unit_bytes)}. "
            f"The smallest budget that works is {sizes[largest]} bytes per unit; or name smaller modules in units.classes."
        )


def _nbytes(name: str, param: nn.Parameter, cast: Cast) -> int:
    return param.numel() * _cast_dtype(name, param, cast).itemsize


def _cast_dtype(name: str, param: nn.Parameter, cast: Cast) -> torch.dtype:
    return cast(name, param.dtype) if param.is_floating_point() else param.dtype
