"""What the hooks ask of whoever holds the parameters: the seam between the running model and the moving bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from infinity.runtime.units import Unit


class Residency(Protocol):
    """Brings units up and takes gradients down. Called from the training and the autograd threads, never from two at once."""

    def forward_begins(self) -> None:
        """An outermost hooked call starts outside of backward."""

    def fetch(self, unit: Unit) -> list[Tensor]:
        """One full flat buffer [flat.numel] per `unit.layout.flats` on the compute device, usable by the current stream. Blocks."""

    def release(self, unit: Unit, *, is_changed: bool, is_shared: bool) -> None:
        """The hooks dropped their references to what `fetch` gave; the current stream used the buffers last.

        `is_changed`: the values may not be those that were fetched. `is_shared`: a view of the buffers is left that somebody might still read.
        """

    def forward_ends(self) -> None:
        """That call is over, also when it raised."""

    def backward_begins(self) -> None:
        """The first gradient of a backward pass is on its way."""

    def grad_buffer(self, unit: Unit, flat: int) -> Tensor:
        """A fresh buffer [flat.numel] of the flat's dtype on the compute device, contents undefined."""

    def flats_to_reduce(self, unit: Unit, begun: Collection[int]) -> Sequence[int]:
        """Which flat gradients of a unit go down now, in order: those in `begun`, which have something, and maybe others, of zeros."""

    def reduce(self, unit: Unit, flat: int, grad: Tensor, present: frozenset[int]) -> None:
        """Take over a full flat gradient. Slots that are not in `present`, and padding, are zero. May come several times per backward."""

    def backward_breaks(self) -> None:
        """The pass has raised. What is handed down from here to its end is a part of what it would have been."""

    def backward_ends(self) -> None:
        """No more gradients of this pass, also when it raised."""

    def commit(self, unit: Unit, flats: Sequence[Tensor]) -> None:
        """The full flat buffers hold new parameter values: make them the unit's values."""

    def drop_grads(self) -> None:
        """`model.zero_grad()` was called: forget every gradient handed down so far."""
