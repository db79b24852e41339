"""verify=crc32c: each block begins with a header that says where it belongs, which pass wrote it and the checksum of all the rest."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.errors import StorageError
from infinity.native import READ, WRITE, crc32c
from infinity.storage.work import COMPLETED, Work
from infinity.workload.job import Job
from infinity.workload.layout import Place
from infinity.workload.memory import Buffers
from infinity.workload.pump import Rows

_HEADER = struct.Struct("<8sQQII")  # magic, offset, pass, bytes, clone; behind it comes the checksum of these and of what follows it
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"infverif"
_BODY = _HEADER.size + _CHECKSUM.size
_SECTOR_WORDS = 512 // 8


class Verifier:
    """The stage of a job that verifies: seals what is written, and checks what was read."""

    def __init__(self, job: Job, buffers: Buffers, places: Sequence[Place], clone: int) -> None:
        self._buffers, self._places, self._clone = buffers, places, clone
        self._pass = int.from_bytes(os.urandom(4), "little") << 16  # no other run writes the same
        self._checks_any = not job.writes
        self._is_reading_back = False
        self._written: list[Rows] = []

    def restart(self) -> None:
        """What was written so far does not count: the next pass begins."""
        self._written = []
        self._pass += 1

    @contextmanager
    def reading_back(self) -> Iterator[list[Rows]]:
        """What this pass has written: inside, reads must find it. Then the next pass begins."""
        written, self._written = self._written, []
        self._is_reading_back = True
        yield written
        self._is_reading_back = False
        self._pass += 1

    def before(self, transfers: Rows) -> Work:
        for row in transfers[transfers["direction"] == WRITE]:
            seal(self._block(row), int(row["offset"]), self._pass, self._clone)
        return COMPLETED

    def after(self, transfers: Rows) -> Work:
        """Raises StorageError for the first block that is not what was written."""
        if not self._is_reading_back and len(written := transfers[transfers["direction"] == WRITE]):
            self._written.append(written)
        if self._is_reading_back or self._checks_any:
            for row in transfers[transfers["direction"] == READ]:
                self._check(row)
        return COMPLETED

    def _check(self, row: np.void) -> None:
        if wrong := flaw(self._block(row), int(row["offset"]), self._pass if self._is_reading_back else None):
            path = self._places[int(row["file"])].target.path
            raise StorageError(errno.EBADMSG, str(path), int(row["offset"]), int(row["nbytes"]), f"verify: {wrong}")

    def _block(self, row: np.void) -> NDArray[np.uint8]:
        start = int(row["buffer"]) * self._buffers.stride
        return self._buffers.bytes[start : start + int(row["nbytes"])]


def seal(block: NDArray[np.uint8], offset: int, number: int, clone: int) -> None:
    """Make a block ready to be written at `offset` by pass `number` of a clone; sectors differ from those of every other block."""
    words = block[: len(block) // 8 * 8].view(np.uint64)
    words[::_SECTOR_WORDS] = np.arange(len(words[::_SECTOR_WORDS]), dtype=np.uint64) + np.uint64(offset)
    block[: _HEADER.size] = np.frombuffer(_HEADER.pack(_MAGIC, offset, number, len(block), clone), np.uint8)
    block[_HEADER.size : _BODY] = np.frombuffer(_CHECKSUM.pack(_checksum(block)), np.uint8)


def flaw(block: NDArray[np.uint8], offset: int, number: int | None) -> str:
    """What is wrong with a block read from `offset`, "" when nothing is. `number` is the pass that wrote it, None for any."""
    magic, where, wrote, nbytes, _ = _HEADER.unpack(block[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        return "The block has no verify header: it was not written with verify=crc32c, or it was overwritten"
    if nbytes != len(block):
        return f"The block was written with {nbytes} bytes: verify with the block size that it was written with"
    if _CHECKSUM.unpack(block[_HEADER.size : _BODY].tobytes())[0] != _checksum(block):
        return "The block does not have the crc32c that it was written with"
    if where != offset:
        return f"The block belongs to byte {where}: a write or read went to the wrong place"
    if number is not None and wrote != number:
        return f"The block is that of pass {wrote}, pass {number} wrote it since: a write was lost"
    return ""


def _checksum(block: NDArray[np.uint8]) -> int:
    tensor = torch.from_numpy(block)
    return crc32c(tensor[_BODY:], crc32c(tensor[: _HEADER.size]))
