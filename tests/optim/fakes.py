"""A store in plain memory that keeps the Store's promises, and a clock that only moves when somebody waits."""

from __future__ import annotations

import torch

from infinity.kinds import Group, Tier
from infinity.storage.chunks import ChunkKey
from infinity.storage.work import COMPLETED, Work


class MemoryStore:
    """What optim asks of a Store: `tier`, `resident`, `fetch`, `write_back`. NVMe chunks are bytes that are copied when the motion starts."""

    def __init__(self, tiers: dict[ChunkKey, Tier], nbytes: dict[ChunkKey, int]) -> None:
        self._tiers = tiers
        self.chunks = {key: torch.zeros(n, dtype=torch.uint8) for key, n in nbytes.items()}
        self.reads: list[ChunkKey] = []
        self.writes: list[ChunkKey] = []

    def tier(self, key: ChunkKey) -> Tier:
        return self._tiers[key]

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        return None if self._tiers[key] is Tier.NVME else self.chunks[key]

    def whole(self, unit: int, flat: int, group: Group) -> torch.Tensor | None:
        return None  # every chunk has memory of its own here

    def fetch(self, key: ChunkKey, into: torch.Tensor) -> Work:
        self.reads.append(key)
        into[: self.chunks[key].numel()] = self.chunks[key]
        return self.motion("read", key)

    def write_back(self, key: ChunkKey, source: torch.Tensor) -> Work:
        self.writes.append(key)
        self.chunks[key].copy_(source[: self.chunks[key].numel()])
        return self.motion("write", key)

    def motion(self, kind: str, key: ChunkKey) -> Work:
        return COMPLETED


class FakeClock:
    """Seconds that pass only when something waits or computes."""

    def __init__(self) -> None:
        self.now = 0.0


class ClockWork:
    """A motion that is over at `at`; waiting for it moves the clock there."""

    def __init__(self, clock: FakeClock, at: float) -> None:
        self._clock, self._at = clock, at

    def wait(self, timeout_s: float | None = None) -> None:
        self._clock.now = max(self._clock.now, self._at)

    def is_completed(self) -> bool:
        return self._clock.now >= self._at


class ClockStore(MemoryStore):
    """Reads and writes take their time, one after another within each kind."""

    def __init__(self, tiers: dict[ChunkKey, Tier], nbytes: dict[ChunkKey, int], clock: FakeClock, *, read_s: float, write_s: float) -> None:
        super().__init__(tiers, nbytes)
        self._clock = clock
        self._cost_s = {"read": read_s, "write": write_s}
        self._busy_until = {"read": 0.0, "write": 0.0}

    def motion(self, kind: str, key: ChunkKey) -> Work:
        start = max(self._clock.now, self._busy_until[kind])
        self._busy_until[kind] = start + self._cost_s[kind]
        return ClockWork(self._clock, self._busy_until[kind])


class ClockKernel:
    """A kernel that only takes time."""

    def __init__(self, clock: FakeClock, adam_s: float) -> None:
        self._clock, self._adam_s = clock, adam_s

    def update(self, states, grad, param_out, segments, grad_scale) -> None:
        self._clock.now += self._adam_s


class FailedWork:
    """A motion that went wrong."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return True
