"""Memory that blocks are read into and written from, of the kind a job asks for, and the pages it turned out to lie on."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from infinity.errors import CapacityError
from infinity.native import Mapping
from infinity.sizes import SECTOR_BYTES, align_up, format_bytes

HUGE_PAGE_BYTES = 2 << 20


class Buffers:
    """`count` buffers of `stride` bytes end to end, on a 4096-byte boundary, filled at random: what drives cannot compress.

    Freed with the last reference: whatever gives the address away keeps this object.
    """

    def __init__(self, kind: str, stride: int, count: int, *, seed: int) -> None:
        """`kind` as in Job.iomem. Raises CapacityError when the system has no more memory."""
        self.stride = stride
        self.nbytes = align_up(stride * count, SECTOR_BYTES)
        if self.nbytes > psutil.virtual_memory().available:
            raise CapacityError(f"{format_bytes(self.nbytes)} for {count} buffers of {format_bytes(stride)} are not free: lower iodepth or bs")
        try:
            self._owner, self.address = _allocate(kind, self.nbytes)
        except (MemoryError, OSError) as error:
            raise CapacityError(f"no {format_bytes(self.nbytes)} for {count} blocks of {format_bytes(stride)}: lower iodepth or bs") from error
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        words = np.frombuffer(np.random.default_rng(seed).bytes(min(self.nbytes, HUGE_PAGE_BYTES)), np.uint8)
        for start in range(0, self.nbytes, len(words)):
            part = self.bytes[start : start + len(words)]
            part[:] = words[: len(part)]

    def page_bytes(self) -> int:
        """The size of the pages that most of this memory lies on now."""
        return _page_bytes(self.address)


def _allocate(kind: str, nbytes: int) -> tuple[object, int]:
    if kind == "mmaphuge":
        mapping = Mapping(nbytes, threads=1)
        return mapping, mapping.address
    if kind == "mmap":
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))
    heap = bytearray(nbytes + SECTOR_BYTES)  # CPython takes this from malloc
    return heap, align_up(ctypes.addressof(ctypes.c_char.from_buffer(heap)), SECTOR_BYTES)


def _page_bytes(address: int) -> int:
    """From /proc/self/smaps: the kernel's page size of the mapping, or a huge page where those hold at least half of what is there."""
    facts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if inside:
                break
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and (fact := re.match(r"(\w+):\s+(\d+) kB", line)):
            facts[fact[1]] = int(fact[2]) * 1024
    is_huge = facts.get("AnonHugePages", 0) * 2 >= max(facts.get("Rss", 0), 1)
    return HUGE_PAGE_BYTES if is_huge else facts.get("KernelPageSize", mmap.PAGESIZE)
