"""What the scheduler moves bytes with, in one table."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.runtime.compute_clock import ComputeClock
from infinity.runtime.descent import Descent
from infinity.runtime.states import States
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.storage.copies import Copies
from infinity.storage.reserve import Reserve
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Movers:
    """Each has its own thread, stream or budget, and its own closer; the scheduler uses them."""

    store: Store
    copies: Copies
    slabs: SlabPool
    staging: Reserve | None
    """Pinned buffers of one parameter chunk each; None on a CPU device, where reads land in the unit's own buffer."""
    descent: Descent
    states: States
    clock: ComputeClock
    ranks: Ranks
    share: Share
