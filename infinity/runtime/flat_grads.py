"""Gradients of a unit on their way down: each parameter's gradient is moved into the flat gradient as it arrives."""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.runtime.parameter import Seat
from infinity.runtime.residency import Residency
from infinity.runtime.units import Unit


class FlatGrads:
    """The flat gradients that have begun to fill. No counting: a gradient comes in one piece, in several, late, or never."""

    def __init__(self, unit: Unit, residency: Residency) -> None:
        self._unit, self._residency = unit, residency
        self._filling: dict[int, tuple[Tensor, set[int]]] = {}

    def arrive(self, seat: Seat, grad: Tensor) -> None:
        """Put one parameter's gradient into its place; what comes again before the hand-over is added, as autograd would."""
        if seat.flat_index not in self._filling:
            self._filling[seat.flat_index] = self._residency.grad_buffer(self._unit, seat.flat_index), set()
        flat, present = self._filling[seat.flat_index]
        place = seat.view(flat)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if seat.slot_index in present:
            place.add_(grad)
        else:
            place.copy_(grad)
            present.add(seat.slot_index)
        seat.is_held = True

    def hand_down(self) -> None:
        """Pass on what has arrived, zeros elsewhere. What comes later goes into a fresh buffer."""
        while self._filling:
            index, (flat, present) = self._filling.popitem()
            for gap in self._unit.layout.flats[index].gaps(present):
                flat[gap.start : gap.stop].zero_()
            self._residency.reduce(self._unit, index, flat, frozenset(present))

    def drop(self) -> None:
        """Forget what has arrived."""
        self._filling.clear()
