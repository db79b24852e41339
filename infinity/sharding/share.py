"""Which elements of the model's states one rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.kinds import Group
from infinity.sharding.layout import FlatLayout, Interval
from infinity.sharding.stages import STAGES, Stage


@dataclass(frozen=True, slots=True)
class Share:
    """Of a group of states that the stage shards, this rank's part of each flat buffer; of the others everything.

    `rank` and `world_size` are those of the ranks that split a flat buffer between them; so many `replicas` of it are in the job.
    """

    stage: Stage = STAGES[3]
    rank: int = 0
    world_size: int = 1
    replicas: int = 1
    replica: int = 0
    """Which of them this rank belongs to."""

    @property
    def is_alone(self) -> bool:
        """One process trains."""
        return self.world_size == self.replicas == 1

    def is_sharded(self, group: Group) -> bool:
        """Whether other ranks keep what is missing here."""
        return self.world_size > 1 and group in self.stage.sharded

    def is_exchanged(self, group: Group) -> bool:
        """Whether every rank has all of it, and ranks pass it between them around an update: gradients to average, parameters to gather."""
        if self.is_alone or group is Group.OPTIMIZER or self.is_sharded(group):
            return False
        return group is Group.GRAD or self.is_sharded(Group.OPTIMIZER)

    def run(self, flat: FlatLayout, group: Group) -> Interval:
        """What is kept of a full flat buffer."""
        return flat.shard(self.rank) if self.is_sharded(group) else Interval(0, flat.numel)

    def part(self, flat: FlatLayout) -> Interval:
        """A run of a full flat buffer whose states are kept here, whatever the group: those of all ranks are the whole, without overlap."""
        shard = flat.shard(self.rank)
        start, stop = (shard.start + len(shard) * replica // self.replicas for replica in (self.replica, self.replica + 1))
        return Interval(start, stop)

    def chunks(self, flat: FlatLayout, group: Group, chunk_numel: int) -> list[tuple[int, Interval]]:
        """The chunks of that run: the index of each in the flat buffer, and where it lies there."""
        chunks = flat.chunks(chunk_numel)
        if not self.is_sharded(group):
            return list(enumerate(chunks))
        in_shard = len(chunks) // self.world_size
        first = self.rank * in_shard
        return list(enumerate(chunks[first : first + in_shard], start=first))


ALONE = Share()
"""One process keeps everything."""
