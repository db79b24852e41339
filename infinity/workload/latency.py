"""Latencies without keeping each of them: exact extremes, mean and deviation, and fio's histogram for percentiles.

A bucket of the histogram is at most 1/64 of its value wide, and a percentile is the middle of its bucket: fio's own buckets, so both
tools print the same number for the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BITS = 6
_PER_GROUP = 1 << _BITS
_GROUPS = 29
_BUCKETS = _GROUPS * _PER_GROUP

PERCENTILES = (1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99)
"""fio's list."""


def bucket_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each value of 0 and more; what is too long for the last one goes there."""
    highest = np.maximum(np.frexp(values.astype(np.float64))[1] - 1, 0).astype(np.int64)  # of the bits set; exact below 2**53 ns, 104 days
    dropped = np.maximum(highest - _BITS, 0)
    index = np.where(highest <= _BITS, values, ((dropped + 1) << _BITS) + ((values >> dropped) & (_PER_GROUP - 1)))
    return np.minimum(index, _BUCKETS - 1)


def middle_of(bucket: int) -> int:
    """The value that stands for a bucket."""
    if bucket < 2 * _PER_GROUP:
        return bucket
    dropped = (bucket >> _BITS) - 1
    return (1 << (dropped + _BITS)) + int((bucket % _PER_GROUP + 0.5) * (1 << dropped))


MIDDLES = np.array([middle_of(bucket) for bucket in range(_BUCKETS)], np.int64)


class Latencies:
    """A distribution of times in nanoseconds."""

    def __init__(self) -> None:
        self.count = 0
        self.min_ns = 0
        self.max_ns = 0
        self._mean = 0.0
        self._squares = 0.0  # of the distances from the mean
        self.histogram = np.zeros(_BUCKETS, np.int64)

    def add(self, times_ns: NDArray[np.int64]) -> None:
        """Count more times, all 0 or more."""
        if not len(times_ns):
            return
        mean = float(times_ns.mean())
        self._merge(len(times_ns), mean, float(np.square(times_ns - mean).sum()), int(times_ns.min()), int(times_ns.max()))
        self.histogram += np.bincount(bucket_of(times_ns), minlength=_BUCKETS)

    def merge(self, other: Latencies) -> None:
        """Count all that the other one counted."""
        if other.count:
            self._merge(other.count, other._mean, other._squares, other.min_ns, other.max_ns)
            self.histogram += other.histogram

    def _merge(self, count: int, mean: float, squares: float, low: int, high: int) -> None:
        total = self.count + count
        distance = mean - self._mean
        self._squares += squares + distance * distance * self.count * count / total
        self._mean += distance * count / total
        self.min_ns = min(self.min_ns, low) if self.count else low
        self.max_ns = max(self.max_ns, high)
        self.count = total

    @property
    def mean_ns(self) -> float:
        return self._mean

    @property
    def stdev_ns(self) -> float:
        """Of the sample, as fio has it; 0 for fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def percentiles(self, wanted: Sequence[float] = PERCENTILES) -> dict[float, int]:
        """For each percentage, the time that this share of all times does not exceed; empty without times."""
        if not self.count:
            return {}
        reached = np.cumsum(self.histogram)
        return {percent: int(MIDDLES[int(np.searchsorted(reached, percent / 100 * self.count, side="left"))]) for percent in wanted}
