"""All checks, in the order of the screen: torch and GPU, processor, memory, limits, kernel, each path, the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infinity.config import Config
from infinity.doctor import gpu, kernel, limits, model, paths, processor, wear
from infinity.doctor.finding import Finding, ok
from infinity.doctor.system import System
from infinity.planner.plan import Plan

NO_PATHS = "nvme.paths"

SUBJECTS = (
    *(gpu.TORCH, gpu.DEVICE, gpu.HBM, gpu.COPIES),
    *(processor.KERNELS, processor.ARITHMETIC, processor.CORES, processor.NUMA),
    *(limits.MEMORY, limits.CGROUP, limits.LOCKED, limits.DESCRIPTORS),
    *(kernel.HUGE_PAGES, kernel.AIO, kernel.AIO_LIMIT),
    *(paths.DIRECTORY, paths.FILE_SYSTEM, paths.DRIVE, wear.WEAR, paths.DIRECT_IO, paths.SPACE),
    *(paths.SHARED, NO_PATHS, model.IDLE, model.PLAN),
)
"""What findings are about, in their order; those of paths repeat for each path. docs/doctor.md explains each."""


def examine(config: Config, load: model.Load | None = None, system: System | None = None) -> list[Finding]:
    """Look at this machine for a run of `config`; `load` imports what builds its model.

    Reads the kernel's files, opens and closes what a run would open, and writes one nameless sector to each path.
    """
    system = system or System()
    places, unusable = paths.look(config, system)
    device, device_finding = gpu.check_device(config, system)
    plan, plan_finding = (None, None) if load is None or device is None or unusable else model.check_plan(config, load, device)
    findings = [
        gpu.check_torch(),
        device_finding,
        *_of_device(config, device, system),
        *_of_machine(config, device, places, plan, system),
        *unusable,
        *(finding for place in places for finding in paths.check_place(place, config)),
        *paths.check_shared(places),
        None if config.nvme.paths else ok(NO_PATHS, "none: nothing rests on NVMe"),
        *(model.check_keys(config, device) if device is not None else ()),
        plan_finding,
    ]
    return [finding for finding in findings if finding is not None]


def _of_device(config: Config, device: torch.device | None, system: System) -> Iterator[Finding | None]:
    if device is None:
        return
    yield gpu.check_hbm(config, device)
    yield gpu.check_copies(device, system)


def _of_machine(
    config: Config, device: torch.device | None, places: list[paths.Place], plan: Plan | None, system: System
) -> Iterator[Finding | None]:
    yield processor.check_kernels(system)
    yield processor.check_arithmetic(config, device is not None and device.type == "cpu", system)
    yield processor.check_cores(system)
    yield processor.check_numa(system, _homes(device, places, system))
    yield limits.check_memory(config)
    yield limits.check_cgroup(config)
    yield limits.check_memory_lock()
    yield limits.check_descriptors(config, plan)
    yield kernel.check_huge_pages(system)
    yield kernel.check_aio(config)
    yield kernel.check_aio_limit(system, config)


def _homes(device: torch.device | None, places: list[paths.Place], system: System) -> dict[str, int]:
    """Which node each drive and the GPU hang on, where the kernel knows."""
    leaves = [leaf for place in places if place.drive for leaf in place.drive.leaves]
    homes = {leaf.name: leaf.numa_node for leaf in leaves}
    if device is not None and device.type == "cuda":
        homes[str(device)] = processor.pci_node(system, gpu.pci_address(device))
    return {name: node for name, node in homes.items() if node is not None}
