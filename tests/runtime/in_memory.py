"""The smallest residency: every unit's values in one list of flat buffers, gradients beside them, and a count of what is live."""

from __future__ import annotations

import torch

from infinity.runtime.hooks import Hooks
from infinity.runtime.units import find_units, make_units


class InMemory:
    """Hands out fresh copies, poisons what comes back, and keeps what the hooks were told."""

    def __init__(self, units):
        self.units = units
        self.device = units[0].params[0].device
        self.values = {unit: [torch.full((flat.numel,), 7.0, device=self.device).to(flat.dtype) for flat in unit.layout.flats] for unit in units}
        for unit in units:
            params = dict(zip(unit.names, unit.params, strict=True))
            for flat, values in zip(unit.layout.flats, self.values[unit], strict=True):
                for slot in flat.slots:
                    slot.view(values).copy_(params[slot.name].detach())
        self.live = {}
        self.live_peak = 0
        self.fetches = []
        self.events = []
        self.grads = {unit: {} for unit in units}
        self.reductions = []
        self.broken = None

    def forward_begins(self):
        self.events.append("forward begins")

    def forward_ends(self):
        self.events.append("forward ends")

    def backward_begins(self):
        self.events.append("backward begins")

    def backward_breaks(self):
        self.events.append("backward breaks")

    def backward_ends(self):
        self.events.append("backward ends")

    def fetch(self, unit):
        assert unit not in self.live, f"{unit} fetched twice"
        if self.broken is unit:
            raise RuntimeError("the disk is gone")
        self.fetches.append(unit.name)
        self.live[unit] = [values.clone() for values in self.values[unit]]
        self.live_peak = max(self.live_peak, len(self.live))
        return self.live[unit]

    def release(self, unit, *, is_changed, is_shared):
        for flat in self.live.pop(unit):
            if not (is_changed or is_shared):
                flat.fill_(7.0)

    def grad_buffer(self, unit, flat):
        layout = unit.layout.flats[flat]
        return torch.full((layout.numel,), float("nan"), dtype=layout.dtype, device=self.device)

    def flats_to_reduce(self, unit, begun):
        return sorted(begun)

    def reduce(self, unit, flat, grad, present):
        layout = unit.layout.flats[flat]
        self.reductions.append((unit.name, flat, present))
        assert layout.trainable and grad.shape == (layout.numel,) and grad.dtype == layout.dtype
        for gap in layout.gaps(present):
            assert not grad[gap.start : gap.stop].any(), "gaps are zero"
        for index in present:
            slot = layout.slots[index]
            arrived = slot.view(grad).clone()
            before = self.grads[unit].get(slot.name)
            self.grads[unit][slot.name] = arrived if before is None else before + arrived

    def commit(self, unit, flats):
        for values, flat in zip(self.values[unit], flats, strict=True):
            values.copy_(flat)
        self.events.append(f"commit {unit.name}")

    def drop_grads(self):
        for grads in self.grads.values():
            grads.clear()

    def grad(self, name):
        """The sum of what has arrived for a parameter, or None."""
        return next((grads[name] for grads in self.grads.values() if name in grads), None)

    def value(self, name):
        for unit in self.units:
            for flat, values in zip(unit.layout.flats, self.values[unit], strict=True):
                for slot in flat.slots:
                    if slot.name == name:
                        return slot.view(values)
        raise KeyError(name)


def attach(model, *, threshold_numel=1 << 30, classes=(), function=None, max_unit_bytes=None, **options):
    """(hooks, residency) over a model whose values move into memory."""
    units = make_units(find_units(model, threshold_numel=threshold_numel, classes=classes, function=function, max_unit_bytes=max_unit_bytes))
    residency = InMemory(units)
    return Hooks(model, units, residency, **options), residency
