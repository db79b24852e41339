"""verify=crc32c: each block begins with a header that says where it belongs, which pass wrote it and the checksum of all the rest."""

from __future__ import annotations

import struct

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.native import crc32c

_HEADER = struct.Struct("<8sQQII")  # magic, offset, pass, bytes, clone; behind it comes the checksum of these and of what follows it
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"infverif"
_BODY = _HEADER.size + _CHECKSUM.size
_SECTOR_WORDS = 512 // 8


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
