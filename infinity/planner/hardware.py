"""What this machine offers one rank: memory under its cgroup, free HBM, cores, and rates measured in a moment."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from infinity import native
from infinity.sizes import MiB
from infinity.storage.slabs import SlabPool

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Bytes and bytes per second as this process can have them."""

    device: torch.device
    hbm_free: int
    """Free bytes of GPU memory now; 0 without CUDA."""
    cpu_available: int
    """MemAvailable, or what the memory cgroup leaves, whichever is less."""
    cores: int
    upload_rate: float
    """Bytes per second from pinned memory; 0 without CUDA."""
    adam_rate: float
    """Elements per second that the CPU kernel updates."""


def survey(device: torch.device, pool: native.ThreadPool) -> Hardware:
    """Look, and measure for some tens of milliseconds."""
    cuda = device.type == "cuda"
    return Hardware(
        device=device,
        hbm_free=torch.cuda.mem_get_info(device)[0] if cuda else 0,
        cpu_available=available_memory(),
        cores=len(os.sched_getaffinity(0)),
        upload_rate=measure_copies(device).upload if cuda else 0.0,
        adam_rate=_measure_adam(pool),
    )


def available_memory() -> int:
    """Bytes this process may still take: MemAvailable, capped by every memory cgroup above it (v1 and v2)."""
    free = int(psutil.virtual_memory().available)
    for limit, usage in cgroup_limits():
        free = min(free, max(0, limit - usage))
    return free


def cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use) in bytes of every limited memory cgroup above this process; page cache that the kernel can drop is not use."""
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, stat_key = _CGROUP_ROOT, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name, stat_key = _CGROUP_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                found.append((limit, usage - _stat(folder / "memory.stat", stat_key)))
            if folder == root:
                break
            folder = folder.parent
    return found


def _stat(path: Path, key: str) -> int:
    """A line of memory.stat, 0 where it has none."""
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{key} ")), 0)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second between pinned memory and a GPU, each way alone."""

    upload: float
    download: float


def measure_copies(device: torch.device) -> CopyRates:
    """Copy 64 MiB up and down, three times each: some tens of milliseconds. Raises CapacityError when memory cannot be pinned."""
    with closing(SlabPool(pin=True, threads=4)) as slabs:  # torch's own pinned memory would never go back to the system
        pinned = slabs.take(64 * MiB)
        resident = torch.empty_like(pinned, device=device)
        return CopyRates(upload=_measure_copy(pinned, resident), download=_measure_copy(resident, pinned))


def _measure_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(2):
        target.copy_(source, non_blocking=True)
    stop.record()
    stop.synchronize()
    return 2 * source.numel() / (float(start.elapsed_time(stop)) / 1e3)


def _measure_adam(pool: native.ThreadPool) -> float:
    numel = 1 << 20
    segments = [native.AdamSegment(0, numel, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1)]
    best = float("inf")
    with closing(SlabPool(pin=False, threads=1)) as slabs:
        master, exp_avg, exp_avg_sq, grad = slabs.take(4 * numel * torch.float32.itemsize).view(torch.float32).fill_(1).view(4, numel)
        for _ in range(4):
            start = time.perf_counter()
            native.adamw(pool, master, exp_avg, exp_avg_sq, grad, None, segments)
            best = min(best, time.perf_counter() - start)
    return numel / best
