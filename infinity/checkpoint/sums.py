"""Checksums of whole tensors, from those of the runs of bytes that ranks wrote or read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from infinity import native
from infinity.sharding.ranks import Ranks


@dataclass(frozen=True, slots=True, order=True)
class Sum:
    """CRC-32C of a run of a tensor's bytes."""

    start: int
    nbytes: int
    crc: int


class Sums:
    """What passed through this rank of each tensor."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Sum]] = {}

    def add(self, key: str, start: int, data: torch.Tensor) -> None:
        """`data` (uint8, CPU) lies at byte `start` of the tensor `key`, and what was added before it lies before it."""
        runs = self._runs.setdefault(key, [])
        if runs and runs[-1].start + runs[-1].nbytes == start:
            last = runs.pop()
            runs.append(Sum(last.start, last.nbytes + data.numel(), native.crc32c(data, last.crc)))
        else:
            runs.append(Sum(start, data.numel(), native.crc32c(data)))

    def whole(self, ranks: Ranks) -> dict[str, Sum | None]:
        """The sum of each tensor that passed through any rank; None where its runs do not lie end to end from its first byte on.

        What several ranks have alike counts once.
        """
        everybodys = ranks.everybodys(self._runs, "the checksums")
        keys = dict.fromkeys(key for runs in everybodys for key in runs)
        return {key: _joined({run for runs in everybodys for run in runs.get(key, ())}) for key in keys}


def _joined(runs: Collection[Sum]) -> Sum | None:
    nbytes = crc = 0
    for run in sorted(runs):
        if run.start != nbytes:
            return None
        nbytes, crc = nbytes + run.nbytes, native.crc32c_combine(crc, run.crc, run.nbytes)
    return Sum(0, nbytes, crc)
