"""A flat buffer cut into its parameters, since it happens for every unit twice a step."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinity.sharding.layout import FlatLayout


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A flat buffer in pieces."""

    places: list[Tensor]
    """`slot.view(flat)` for every slot, in order."""
    padding: list[Tensor]
    """What lies between and behind them."""


class Cutter:
    """Cuts flat buffers of one layout.

    torch's `_unflatten_dense_tensors` makes all views in one go, but knows no padding: that is cut out as pieces of its own.
    """

    def __init__(self, flat: FlatLayout) -> None:
        self._slots = flat.slots
        self._gaps = list(flat.gaps(range(len(flat.slots))))
        element = torch.empty((), dtype=torch.uint8)
        runs = [(slot.start, slot.shape) for slot in self._slots] + [(gap.start, (len(gap),)) for gap in self._gaps]
        order = sorted(range(len(runs)), key=lambda index: runs[index][0])
        self._templates = [element.expand(runs[index][1]) for index in order]
        self._order = sorted(range(len(runs)), key=order.__getitem__)
        """Of the pieces: first the slots', then the gaps'."""
        self._is_plain = all(slot.numel and not slot.is_complex for slot in self._slots)
        self._known: dict[int, tuple[weakref.ref[Tensor], Cut]] = {}
        """By the id of a flat buffer that is alive."""

    def cut(self, flat: Tensor) -> Cut:
        """The flat buffer in pieces, remembered until the tensor `flat` dies: buffers that serve again and again are cut once."""
        known = self._known.get(id(flat))
        if known is None or known[0]() is not flat:  # an interrupt in `_forget` leaves the pieces of a tensor that is dead, and the id to another
            cut = self._cut(flat.data)  # views of `flat` itself would keep it alive, and be kept with it
            known = weakref.ref(flat, partial(self._forget, id(flat))), cut
            self._known[id(flat)] = known
        return known[1]

    def _cut(self, flat: Tensor) -> Cut:
        if not self._is_plain:
            padding = [flat[gap.start : gap.stop] for gap in self._gaps]
            return Cut([slot.view(flat) for slot in self._slots], padding)
        pieces = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        ordered = [pieces[index] for index in self._order]
        return Cut(ordered[: len(self._slots)], ordered[len(self._slots) :])

    def _forget(self, key: int, _: object) -> None:
        self._known.pop(key, None)


class Cutters:
    """One cutter for all flats that are cut alike: the blocks of a model are served by the same buffers in turn."""

    def __init__(self) -> None:
        self._cutters: dict[tuple[int, tuple[tuple[int, tuple[int, ...], bool], ...]], Cutter] = {}

    def of(self, flat: FlatLayout) -> Cutter:
        key = flat.numel, tuple((slot.start, slot.shape, slot.is_complex) for slot in flat.slots)
        if key not in self._cutters:
            self._cutters[key] = Cutter(flat)
        return self._cutters[key]
