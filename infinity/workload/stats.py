"""What a clone of a job has done so far, per direction."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from infinity.native import READ, SYNC, WRITE
from infinity.workload.latency import Latencies

WINDOW_NS = 500_000_000
"""fio's bwavgtime: how long one sample of the rates is."""

DEPTH_BOUNDS = (1, 2, 4, 8, 16, 32, 64)
"""Lower ends of the groups of depths, as fio lists them."""


class Rates:
    """Bytes and blocks in each window of half a second."""

    def __init__(self) -> None:
        self._bytes = np.zeros(0)
        self._ios = np.zeros(0)

    def add(self, windows: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        """Blocks that ended in these windows since the start."""
        if not len(windows):
            return
        size = max(int(windows.max()) + 1, len(self._bytes))
        self._bytes = np.pad(self._bytes, (0, size - len(self._bytes))) + np.bincount(windows, weights=nbytes, minlength=size)
        self._ios = np.pad(self._ios, (0, size - len(self._ios))) + np.bincount(windows, minlength=size)

    def bandwidth(self) -> NDArray[np.float64]:
        """Bytes per second in each window that is whole: not the last one."""
        return np.asarray(self._bytes[:-1] * (1e9 / WINDOW_NS), np.float64)

    def iops(self) -> NDArray[np.float64]:
        return np.asarray(self._ios[:-1] * (1e9 / WINDOW_NS), np.float64)


@dataclass(slots=True)
class DirectionStats:
    """Reads, or writes."""

    nbytes: int = 0
    ios: int = 0
    elapsed_ns: int = 0
    """Time in which this direction was under way; for the rates."""
    submission: Latencies = field(default_factory=Latencies)
    """fio's slat; empty for plain calls, which submit and complete in one."""
    completion: Latencies = field(default_factory=Latencies)
    """fio's clat."""
    total: Latencies = field(default_factory=Latencies)
    """fio's lat."""
    rates: Rates = field(default_factory=Rates)

    @property
    def bandwidth(self) -> float:
        return self.nbytes * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    @property
    def iops(self) -> float:
        return self.ios * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    def merge(self, other: DirectionStats) -> None:
        """Clones run at the same time: amounts add up, the longest time counts."""
        self.nbytes += other.nbytes
        self.ios += other.ios
        self.elapsed_ns = max(self.elapsed_ns, other.elapsed_ns)
        for mine, theirs in ((self.submission, other.submission), (self.completion, other.completion), (self.total, other.total)):
            mine.merge(theirs)


class CloneStats:
    """All of it for one clone of a job."""

    def __init__(self) -> None:
        self.directions = {READ: DirectionStats(), WRITE: DirectionStats()}
        self.syncs = Latencies()
        self.depths = np.zeros(len(DEPTH_BOUNDS), np.int64)
        """Blocks by how many were in flight when they were begun: see DEPTH_BOUNDS."""
        self.depth_sum = 0
        self.deepest = 0

    def add(self, transfers: NDArray[np.void], timings: NDArray[np.void], *, start_ns: int, is_async: bool) -> None:
        """Count transfers that are done. `start_ns` is when windows began."""
        begun, issued, done = timings["begun_ns"], timings["issued_ns"], timings["done_ns"]
        for direction, stats in self.directions.items():
            mine = transfers["direction"] == direction
            if not mine.any():
                continue
            nbytes = transfers["nbytes"][mine].astype(np.int64)
            stats.nbytes += int(nbytes.sum())
            stats.ios += len(nbytes)
            if is_async:
                stats.submission.add(issued[mine] - begun[mine])
            stats.completion.add(done[mine] - issued[mine])
            stats.total.add(done[mine] - begun[mine])
            stats.rates.add((done[mine] - start_ns) // WINDOW_NS, nbytes)
        syncs = transfers["direction"] == SYNC
        self.syncs.add((done - begun)[syncs])
        depths = timings["depth"][~syncs]
        self.depths += np.bincount(np.searchsorted(DEPTH_BOUNDS, depths, side="right") - 1, minlength=len(DEPTH_BOUNDS))
        self.depth_sum += int(depths.sum())
        self.deepest = max(self.deepest, int(depths.max(initial=0)))

    @property
    def mean_depth(self) -> float:
        return self.depth_sum / max(int(self.depths.sum()), 1)

    @property
    def ios(self) -> int:
        return sum(stats.ios for stats in self.directions.values())
