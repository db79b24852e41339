"""A flat buffer cut into its parameters, since it happens for every unit twice a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from infinity.sharding.layout import FlatLayout, Slot


class Cutter:
    """Views of flat buffers, one per slot of their layout.

    torch's `_unflatten_dense_tensors` makes all views in one go, but knows no padding between them: padding is cut out as pieces of
    its own, which are left aside.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = tuple(slots)
        self._templates: list[Tensor] = []
        self._wanted: list[int] = []
        element, at = torch.empty((), dtype=torch.uint8), 0
        for slot in self._slots:
            if slot.start > at:
                self._templates.append(element.expand(slot.start - at))
            self._wanted.append(len(self._templates))
            self._templates.append(element.expand(slot.shape + (2,) if slot.is_complex else slot.shape))
            at = slot.start + slot.numel
        self._is_plain = all(slot.numel and not slot.is_complex for slot in self._slots)
        self._is_dense = len(self._templates) == len(self._wanted)
        self._known: dict[int, tuple[weakref.ref[Tensor], list[Tensor]]] = {}
        """By the id of a flat buffer that is alive."""

    def cut(self, flat: Tensor) -> list[Tensor]:
        """`slot.view(flat)` for every slot, in order."""
        if not self._is_plain:
            return [slot.view(flat) for slot in self._slots]
        pieces: list[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        return pieces if self._is_dense else [pieces[index] for index in self._wanted]

    def places(self, flat: Tensor) -> list[Tensor]:
        """`cut(flat)`, remembered until the tensor `flat` dies: buffers that serve again and again are cut once."""
        known = self._known.get(id(flat))
        if known is None:
            pieces = [piece.data for piece in self.cut(flat)]  # views would keep `flat` alive, and themselves with it
            known = weakref.ref(flat, partial(self._forget, id(flat))), pieces
            self._known[id(flat)] = known
        return known[1]

    def _forget(self, key: int, _: object) -> None:
        del self._known[key]


class Cutters:
    """One cutter for all flats that are cut alike: the blocks of a model are served by the same buffers in turn."""

    def __init__(self) -> None:
        self._cutters: dict[tuple[tuple[int, tuple[int, ...], bool], ...], Cutter] = {}

    def of(self, flat: FlatLayout) -> Cutter:
        key = tuple((slot.start, slot.shape, slot.is_complex) for slot in flat.slots)
        if key not in self._cutters:
            self._cutters[key] = Cutter(flat.slots)
        return self._cutters[key]
