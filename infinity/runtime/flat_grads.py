"""Gradients of a unit on their way down: each parameter's gradient is moved into the flat gradient as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.runtime.cutter import Cut, Cutter
from infinity.runtime.parameter import Seat
from infinity.runtime.residency import Residency
from infinity.runtime.units import Unit

_MOST_WAITING_BYTES = 4 << 20
"""Gradients that have arrived and are not in their places yet: the small ones of a unit, its norms and biases, go there in one launch."""


@dataclass(slots=True)
class _Filling:
    """A flat gradient that has begun to fill."""

    flat: Tensor
    cut: Cut
    present: set[int] = field(default_factory=set)
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(place, gradient): to be copied on the stream that is current then as now."""
    waiting_bytes: int = 0
    """What they keep from being freed: a gradient may be a small view of a large tensor."""

    def put(self, slot: int, grad: Tensor) -> None:
        """The gradient of a slot, the first; it may wait a while for its copy."""
        self.waiting.append((self.cut.places[slot], grad))
        self.present.add(slot)
        self.waiting_bytes += grad.untyped_storage().nbytes()
        if self.waiting_bytes > _MOST_WAITING_BYTES:
            self.settle()

    def add(self, slot: int, grad: Tensor) -> None:
        """Another gradient of a slot."""
        self.settle()
        self.cut.places[slot].add_(grad)

    def settle(self) -> None:
        """Everything that has arrived is in its place."""
        if self.waiting:
            places, grads = zip(*self.waiting, strict=True)
            torch._foreach_copy_(places, grads)
            self.waiting, self.waiting_bytes = [], 0


class FlatGrads:
    """The flat gradients of one unit. No counting: a gradient comes in one piece, in several, late, or never."""

    def __init__(self, unit: Unit, residency: Residency, cutters: Sequence[Cutter]) -> None:
        self._unit, self._residency, self._cutters = unit, residency, cutters
        self._filling: dict[int, _Filling] = {}

    def arrive(self, seat: Seat, grad: Tensor) -> None:
        """Put one parameter's gradient into its place; what comes again before the hand-over is added, as autograd would."""
        filling = self._filling.get(seat.flat_index) or self._begin(seat.flat_index)
        slot = seat.slot_index
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if slot in filling.present:
            filling.add(slot, grad)
        else:
            filling.put(slot, grad)
        seat.is_held = True

    def _begin(self, index: int) -> _Filling:
        flat = self._residency.grad_buffer(self._unit, index)
        filling = self._filling[index] = _Filling(flat, self._cutters[index].cut(flat))
        return filling

    def is_full(self) -> bool:
        """Whether everything that may come has come."""
        trainable = sum(len(flat.slots) for flat in self._unit.layout.flats if flat.trainable)
        return sum(len(filling.present) for filling in self._filling.values()) == trainable

    def drop(self) -> None:
        """Forget what has arrived."""
        self._filling.clear()

    def hand_down(self) -> None:
        """Pass on what has arrived, zeros elsewhere. What comes later goes into a fresh buffer."""
        for index in self._residency.flats_to_reduce(self._unit, self._filling) if self._filling else ():
            filling = self._filling.get(index) or self._begin(index)
            del self._filling[index]
            layout, flat = self._unit.layout.flats[index], filling.flat
            filling.settle()
            is_full = len(filling.present) == len(layout.slots)
            empty = filling.cut.padding if is_full else [flat[gap.start : gap.stop] for gap in layout.gaps(filling.present)]
            if empty:
                torch._foreach_zero_(empty)
            self._residency.reduce(self._unit, index, flat, frozenset(filling.present))
