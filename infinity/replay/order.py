"""In which order a step comes to the units, and when a unit's gradients are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.runtime.units import Unit

Around = Mapping[Unit, Sequence[Unit]]
"""Unit -> the units whose module contains its own, outermost first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A unit's turn in backward."""

    unit: Unit
    finished: tuple[Unit, ...]
    """Whose gradients go down after it: its own, unless the next unit lies within it, and those of units around it that have no more to come."""


def forward_order(units: Sequence[Unit]) -> list[Unit]:
    """The root unit first, which a call of the model needs, then each unit after those around it, as they are registered."""
    return sorted(units, key=lambda unit: (not unit.is_root, unit.index))


def backward_turns(units: Sequence[Unit]) -> list[Turn]:
    """The forward backwards, but that a unit comes before those within it: the gradient of its output is there first.

    So the root unit is the first to come, and its gradients are the last to go down.
    """
    forward = forward_order(units)
    around = units_around(forward)
    place = {unit: -at for at, unit in enumerate(forward)}
    backward = sorted(forward, key=lambda unit: [place[other] for other in (*around[unit], unit)])
    turns, unfinished = [], []
    for at, unit in enumerate(backward):
        unfinished.append(unit)
        going_on = around[backward[at + 1]] if at + 1 < len(backward) else ()
        finished = []
        while unfinished and unfinished[-1] not in going_on:
            finished.append(unfinished.pop())
        turns.append(Turn(unit, tuple(finished)))
    return turns


def units_around(units: Sequence[Unit]) -> Around:
    """`units` in forward order."""
    inside = {unit: set(unit.module.modules()) for unit in units}
    return {unit: [other for other in units if other is not unit and unit.module in inside[other]] for unit in units}
