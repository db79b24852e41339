"""A flat buffer cut into its parameters in one call, since it happens for every unit twice a step."""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.sharding.layout import FlatLayout


class Cutter:
    """Views of a flat buffer, one per slot.

    torch's `_unflatten_dense_tensors` makes all views in one go, but knows no padding between them: padding is cut out as pieces of
    its own, which are left aside.
    """

    def __init__(self, flat: FlatLayout) -> None:
        self._slots = flat.slots
        self._templates: list[Tensor] = []
        self._wanted: list[int] = []
        element, at = torch.empty((), dtype=torch.uint8), 0
        for slot in flat.slots:
            if slot.start > at:
                self._templates.append(element.expand(slot.start - at))
            self._wanted.append(len(self._templates))
            self._templates.append(element.expand(slot.shape + (2,) if slot.is_complex else slot.shape))
            at = slot.start + slot.numel
        self._is_plain = all(slot.numel and not slot.is_complex for slot in flat.slots)
        self._is_dense = len(self._templates) == len(self._wanted)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """`slot.view(flat)` for every slot, in order."""
        if not self._is_plain:
            return [slot.view(flat) for slot in self._slots]
        pieces: list[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        return pieces if self._is_dense else [pieces[index] for index in self._wanted]
