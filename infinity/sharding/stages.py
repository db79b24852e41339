"""ZeRO's stages as a table: which states are sharded, what one rank holds, what passes between ranks (Rajbhandari et al., arXiv:1910.02054)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from infinity.kinds import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One row of the table."""

    number: int
    sharded: frozenset[Group]
    """Every rank keeps one part in world_size of these, and all of the others."""

    @property
    def passes(self) -> int:
        """How many elements pass each rank in a micro-step that ends in an update, in units of the model's elements.

        A reduce-scatter of the gradients and an all-gather of the parameters are one each; an all-reduce is both. Parameters that are
        sharded are gathered for forward and again for backward, and not after the update; a unit for which there is room stays in between.
        """
        return 3 if Group.PARAM in self.sharded else 2


def _stage(number: int, sharded: Collection[Group]) -> Stage:
    return Stage(number=number, sharded=frozenset(sharded))


STAGES = (
    _stage(0, ()),
    _stage(1, (Group.OPTIMIZER,)),
    _stage(2, (Group.OPTIMIZER, Group.GRAD)),
    _stage(3, (Group.OPTIMIZER, Group.GRAD, Group.PARAM)),
)
"""By number. 0 is plain data parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes at rest of one trained element, by what they are for."""

    param: int = 2
    grad: int = 2
    optimizer: int = 12
    """Two fp32 moments, and the fp32 master where there is one."""

    def of(self, group: Group) -> int:
        return {Group.PARAM: self.param, Group.GRAD: self.grad, Group.OPTIMIZER: self.optimizer}[group]


MIXED = ElementBytes()
"""bf16 or fp16 training with fp32 masters: 16 bytes."""

WITHOUT_MASTERS = ElementBytes(optimizer=8)
"""The moments alone: 12 bytes."""


def state_bytes(numel: int, stage: Stage, world_size: int, element: ElementBytes = MIXED) -> float:
    """What one rank keeps of a model of `numel` trained elements, padding aside."""
    return sum(numel * element.of(group) / (world_size if group in stage.sharded else 1) for group in Group)
