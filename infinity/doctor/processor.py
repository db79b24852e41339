"""The processor: which kernels it runs, what arithmetic it has, its cores and where they sit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from infinity import native
from infinity.config import Config
from infinity.doctor.finding import Finding, ok, warning
from infinity.doctor.system import System, parse_cpus, read_field, read_number, read_text

KERNELS = "CPU features"
ARITHMETIC = "CPU arithmetic"
CORES = "cores"
NUMA = "NUMA"

_FEATURES = ("fma", "f16c", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
"""What the kernels and torch look for, as flags of proc_cpuinfo(5) call them."""

_ARITHMETIC = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Any of these multiplies in the dtype; the last of each is arm64's (Documentation/arch/arm64/elf_hwcaps.rst)."""


def check_kernels(system: System) -> Finding:
    """CPUID and XGETBV, as native/cpu.c asks: AVX-512 wants F, BW, VL and DQ, AVX2 wants FMA and F16C beside it.

    Neither is a warning: the update then runs on the plain loops of native/plain.c, at a fraction of memory's bandwidth.
    """
    best = native.available_isas()[-1]
    has = [name for name in _FEATURES if name in _flags(system)]
    if best == "plain":
        way_out = "use a processor with AVX2; in a virtual machine let the guest see it (qemu -cpu host)"
        return warning(KERNELS, f"no AVX2 ({', '.join(has) or 'none of the flags looked for'}): Adam runs on plain loops", way_out)
    return ok(KERNELS, f"Adam runs with {best} ({', '.join(has)})")


def check_arithmetic(config: Config, computes_on_cpu: bool, system: System) -> Finding | None:
    """Whether precision.dtype is one that a model on the CPU can multiply in; None where nothing is to say. Emulated, a warning."""
    dtype = config.precision.dtype
    if not computes_on_cpu or dtype == "fp32":
        return None
    has = sorted(_ARITHMETIC[dtype] & _flags(system))
    if has:
        return ok(ARITHMETIC, f"precision.dtype = {dtype!r} runs on {', '.join(has)}")
    found = f"precision.dtype = {dtype!r}, which this processor emulates through fp32"
    return warning(ARITHMETIC, found, 'set precision.dtype = "fp32", or use a GPU')


def _flags(system: System) -> set[str]:
    """`flags` on x86, `Features` on arm64."""
    cpuinfo = system.proc / "cpuinfo"
    return set((read_field(cpuinfo, "flags") or read_field(cpuinfo, "Features")).split())


def check_cores(system: System) -> Finding:
    """sched_getaffinity(2) against the CPU quota of the cgroup.

    Threads are made for the cores that the affinity allows, so a quota for fewer is a warning: the kernel stops all of them for the
    rest of each period. Source: cpu.max in Documentation/admin-guide/cgroup-v2.rst, cpu.cfs_quota_us in scheduler/sched-bwc.rst.
    """
    allowed, quota = os.sched_getaffinity(0), cpu_quota(system)
    found = f"{len(allowed)} of {os.cpu_count()} for this process"
    if quota is not None and quota < len(allowed):
        few = ",".join(map(str, sorted(allowed)[: max(1, int(quota))]))
        way_out = f"taskset -c {few} infinity train CONFIG, or raise the quota (docker run --cpus, CPUQuota= of a systemd unit, cpu.max)"
        return warning(CORES, f"{found}, but a cgroup stops them after {quota:.1f} cores' worth of time", way_out)
    return ok(CORES, found)


def cpu_quota(system: System) -> float | None:
    """Cores' worth of time that the tightest cgroup above this process gives it; None without a limit."""
    found = []
    for line in read_text(system.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = system.sys / "fs" / "cgroup"
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = root / "cpu" if controllers else root
        folder = root / path.lstrip("/")
        found += [quota for place in (folder, *folder.parents) if place.is_relative_to(root) and (quota := _quota(place)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    """`200000 100000` -> 2.0, `max 100000` -> None; v1 has the two numbers in two files, and -1 for none."""
    words = read_text(folder / "cpu.max").split() or [read_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if not words[0].isdigit() or not words[1].isdigit():
        return None
    return int(words[0]) / int(words[1])


def check_numa(system: System, homes: Mapping[str, int]) -> Finding:
    """Nodes that this process may run on, against those that its drives and GPU hang on (`homes`: name, node).

    A device all of whose near cores are forbidden is a warning: each of its bytes crosses the link between sockets.
    Source: numa(7), cpuset(7), Documentation/ABI/stable/sysfs-devices-node.
    """
    nodes = _nodes(system)
    allowed = os.sched_getaffinity(0)
    mine = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    found = f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}"
    if len(nodes) > 1:
        found += f", this process runs on {', '.join(map(str, mine))}"
    found += "".join(f"; {name} is on {node}" for name, node in homes.items()) if len(nodes) > 1 else ""
    far = {name: node for name, node in homes.items() if node in nodes and node not in mine}
    if far:
        name, node = next(iter(far.items()))
        return warning(NUMA, found, f"run near {name}: numactl --cpunodebind={node} --preferred={node} infinity train CONFIG")
    return ok(NUMA, found)


def _nodes(system: System) -> dict[int, set[int]]:
    folders = (system.sys / "devices" / "system" / "node").glob("node[0-9]*")
    return {int(folder.name.removeprefix("node")): parse_cpus(read_text(folder / "cpulist")) for folder in folders}


def pci_node(system: System, address: str) -> int | None:
    """The node of a PCI device, such as 0000:3b:00.0; None where the kernel does not know."""
    node = read_number(system.sys / "bus" / "pci" / "devices" / address / "numa_node")
    return node if node is not None and node >= 0 else None
