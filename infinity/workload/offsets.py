"""Which block comes next: in order or at random, reads and writes mixed, over one file or several in turn.

A pass covers the job's files once. At random every block of a file comes once a pass, as fio's random map has it, in an order that is
computed and not stored; where block sizes differ, the file is cut into blocks of the sizes drawn, and those come in random order.
In order, reads and writes of a mixed job have a place each, as in fio, and a pass ends when both together have moved a file's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infinity.native import READ, SYNC, TRANSFER, WRITE
from infinity.workload.job import FULL_PERCENT, Blocks, Job

Ints = NDArray[np.int64]


class Permutation:
    """The numbers [0, n) in a random order, any part of it on demand: four rounds of operations that can be undone on k-bit numbers."""

    def __init__(self, n: int, rng: np.random.Generator) -> None:
        self.n = n
        bits = max(n - 1, 1).bit_length()
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64(max(bits // 2, 1))
        self._rounds = [tuple(np.uint64(word) for word in rng.integers(0, 1 << 63, 2, dtype=np.uint64)) for _ in range(4)]

    def at(self, start: int, stop: int) -> Ints:
        """Numbers `start` to `stop` of the order."""
        found = self._mix(np.arange(start, stop, dtype=np.uint64))
        while (outside := found >= self.n).any():  # walk on along the cycle: it comes back to [0, n), and to each of its numbers once
            found[outside] = self._mix(found[outside])
        return found.astype(np.int64)

    def _mix(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor, term in self._rounds:
            x = ((x + term) * (factor | np.uint64(1))) & self._mask
            x ^= x >> self._shift
        return x


class _Mix:
    """Draws directions and block sizes."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        self._share = job.rwmixread / FULL_PERCENT if job.reads and job.writes else float(job.reads)
        self._blocks = job.blocks
        self._rng = rng
        same = all(blocks.sizes == job.blocks[READ].sizes and len(blocks.sizes) == 1 for blocks in job.blocks)
        self.only_size = job.blocks[READ].sizes[0] if same else None

    @property
    def mean(self) -> float:
        means = [float(np.dot(blocks.sizes, blocks.weights)) for blocks in self._blocks]
        return self._share * means[READ] + (1 - self._share) * means[WRITE]

    def directions(self, count: int) -> Ints:
        if self._share in (0.0, 1.0):
            return np.full(count, READ if self._share else WRITE, np.int64)
        return np.where(self._rng.random(count) < self._share, READ, WRITE).astype(np.int64)

    def sizes(self, directions: Ints) -> Ints:
        if self.only_size is not None:
            return np.full(len(directions), self.only_size, np.int64)
        drawn = [self._draw(blocks, len(directions)) for blocks in self._blocks]
        return np.where(directions == READ, drawn[READ], drawn[WRITE])

    def _draw(self, blocks: Blocks, count: int) -> Ints:
        if len(blocks.sizes) == 1:
            return np.full(count, blocks.sizes[0], np.int64)
        return self._rng.choice(np.array(blocks.sizes, np.int64), count, p=blocks.weights)


Piece = tuple[Ints, Ints, Ints]
"""Offsets, sizes and directions, one of each per block."""


class _FilePass(Protocol):
    """One pass over one file; a piece shorter than asked for is its last."""

    def take(self, count: int) -> Piece: ...


class _InOrder:
    def __init__(self, nbytes: int, mix: _Mix) -> None:
        self._nbytes = nbytes
        self._mix = mix
        self._moved = 0
        self._places = {READ: 0, WRITE: 0}

    def take(self, count: int) -> Piece:
        directions = self._mix.directions(count)
        sizes = self._mix.sizes(directions)
        fits = int(np.searchsorted(np.cumsum(sizes), self._nbytes - self._moved, side="right"))
        directions, sizes = directions[:fits], sizes[:fits]
        self._moved += int(sizes.sum())
        offsets = np.empty(len(sizes), np.int64)
        for direction, place in self._places.items():
            mine = directions == direction
            ends = np.cumsum(sizes[mine])
            offsets[mine] = place + ends - sizes[mine]
            self._places[direction] = place + (int(ends[-1]) if len(ends) else 0)
        return offsets, sizes, directions


class _AtRandom:
    """Blocks of one size."""

    def __init__(self, nbytes: int, mix: _Mix, rng: np.random.Generator) -> None:
        assert mix.only_size is not None
        self._mix = mix
        self._order = Permutation(nbytes // mix.only_size, rng)
        self._at = 0

    def take(self, count: int) -> Piece:
        stop = min(self._at + count, self._order.n)
        directions = self._mix.directions(stop - self._at)
        sizes = self._mix.sizes(directions)
        offsets = self._order.at(self._at, stop) * sizes
        self._at = stop
        return offsets, sizes, directions


class _AtRandomOfManySizes:
    """The file is cut in order, the blocks come at random: 17 bytes of memory for each while the pass lasts."""

    def __init__(self, nbytes: int, mix: _Mix, rng: np.random.Generator) -> None:
        cutter = _InOrder(nbytes, mix)
        pieces = []
        while len((piece := cutter.take(1 << 16))[0]):
            pieces.append(piece[1:])
        self._sizes, self._directions = (np.concatenate(column) for column in zip(*pieces, strict=True))
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._order = Permutation(len(self._sizes), rng)
        self._at = 0

    def take(self, count: int) -> Piece:
        chosen = self._order.at(self._at, stop := min(self._at + count, self._order.n))
        self._at = stop
        return self._offsets[chosen], self._sizes[chosen], self._directions[chosen]


class Pattern:
    """The transfers of one clone of a job over its files, pass after pass. Clones and passes differ at random, runs of one job do not."""

    def __init__(self, job: Job, file_bytes: Sequence[int], *, clone: int = 0) -> None:
        self._job = job
        self._file_bytes = tuple(file_bytes)
        self._rng = np.random.default_rng([0x696E66, clone])
        self._mix = _Mix(job, self._rng)
        self._writes = 0
        self._write_buffer = -2 if job.reads and job.writes else -1
        self.restart()

    def restart(self) -> None:
        """The next pass, from the start."""
        self._open = {index: self._begin(nbytes) for index, nbytes in enumerate(self._file_bytes)}

    def _begin(self, nbytes: int) -> _FilePass:
        if not self._job.is_random:
            return _InOrder(nbytes, self._mix)
        return (_AtRandom if self._mix.only_size else _AtRandomOfManySizes)(nbytes, self._mix, self._rng)

    def take(self, count: int) -> NDArray[np.void]:
        """About `count` TRANSFERs; none when the pass is over. A mixed job's writes have buffers apart, or they would write what was read."""
        share = max(count // max(len(self._open), 1), 1)
        parts = []
        for index in list(self._open):
            offsets, sizes, directions = self._open[index].take(share)
            if len(offsets) < share:
                del self._open[index]
            parts.append(_transfers(offsets, sizes, directions, index, self._write_buffer))
        if not parts:
            return np.zeros(0, TRANSFER)
        turns = np.concatenate([np.arange(len(part)) for part in parts])
        found: NDArray[np.void] = np.concatenate(parts)[np.argsort(turns, kind="stable")] if len(parts) > 1 else parts[0]
        return self._with_syncs(found) if self._job.fsync and len(found) else found

    def _with_syncs(self, transfers: NDArray[np.void]) -> NDArray[np.void]:
        """After every `fsync`-th write, a sync of the file it went to."""
        numbers = self._writes + np.cumsum(transfers["direction"] == WRITE)
        self._writes = int(numbers[-1])
        after = np.flatnonzero((transfers["direction"] == WRITE) & (numbers % self._job.fsync == 0))
        syncs = np.zeros(len(after), TRANSFER)
        syncs["direction"], syncs["buffer"], syncs["file"] = SYNC, -1, transfers["file"][after]
        return np.insert(transfers, after + 1, syncs)


def _transfers(offsets: Ints, sizes: Ints, directions: Ints, file: int, write_buffer: int) -> NDArray[np.void]:
    found = np.zeros(len(offsets), TRANSFER)
    found["offset"], found["nbytes"], found["direction"], found["file"] = offsets, sizes, directions, file
    found["buffer"] = np.where(directions == READ, -1, write_buffer)
    return found
