"""How the I/O engine works on a path: what is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from infinity.config.schema import Nvme
from infinity.sizes import KiB, MiB

MOST_IN_FLIGHT = 128 * MiB
"""Settings that hand the kernel more bytes at once are left out: their buffers would not fit beside a model, and no drive needs them."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Bytes of the largest transfer, transfers in flight per worker, and workers in each direction."""

    block_bytes: int
    depth: int
    workers: int

    @property
    def in_flight(self) -> int:
        """Bytes that one direction keeps with the kernel."""
        return self.block_bytes * self.depth * self.workers

    @property
    def cost(self) -> tuple[int, int, int]:
        """What it takes from others, cheapest first: threads, then memory in flight, then system calls."""
        return self.workers, self.in_flight, -self.block_bytes


DEFAULT = Setting(
    block_bytes=Nvme.model_fields["block_size"].default, depth=Nvme.model_fields["queue_depth"].default, workers=Nvme.model_fields["readers"].default
)
"""What a configuration that says nothing uses."""

BLOCKS = (256 * KiB, 512 * KiB, 1 * MiB, 2 * MiB, 4 * MiB)
DEPTHS = (4, 8, 16, 32, 64)
WORKERS = (1, 2)


def grid(blocks: Sequence[int] = BLOCKS, depths: Sequence[int] = DEPTHS, workers: Sequence[int] = WORKERS) -> tuple[Setting, ...]:
    """All combinations that keep at most MOST_IN_FLIGHT bytes with the kernel."""
    found = (Setting(*one) for one in product(sorted(set(blocks)), sorted(set(depths)), sorted(set(workers))))
    return tuple(setting for setting in found if setting.in_flight <= MOST_IN_FLIGHT)
