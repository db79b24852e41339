"""Features, cores and nodes, from files that say what this processor may not have."""

from __future__ import annotations

import os

import pytest

from infinity import native
from infinity.config import load_config
from infinity.doctor import processor
from infinity.doctor.finding import Status
from infinity.doctor.system import System, parse_cpus

X86 = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu fma f16c avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu"}
ARM = {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimdhp bf16"}


def test_the_kernel_that_runs_here_is_named():
    found = processor.check_kernels(System())
    best = native.available_isas()[-1]
    assert (found.status is Status.WARNING) == (best == "plain")
    assert best in found.found


def test_a_processor_without_avx2_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(native, "available_isas", lambda: ("plain",))
    found = processor.check_kernels(machine({"proc/cpuinfo": "flags : fma"}))
    assert found.status is Status.WARNING and "(fma)" in found.found and "-cpu host" in found.way_out


@pytest.mark.parametrize(
    ("dtype", "files", "status"),
    [
        ("bf16", X86, "warning"),
        ("bf16", ARM, "ok"),
        ("fp16", ARM, "ok"),
        ("bf16", {"proc/cpuinfo": "flags : amx_bf16"}, "ok"),
        ("fp16", {"proc/cpuinfo": "flags : amx_bf16"}, "warning"),
    ],
)
def test_arithmetic_that_is_emulated_is_a_warning(machine, dtype, files, status):
    found = processor.check_arithmetic(load_config({"precision": {"dtype": dtype}}), True, machine(files))
    assert found is not None and found.status == status


def test_fp32_and_a_gpu_leave_nothing_to_say_of_the_processors_arithmetic(machine):
    assert processor.check_arithmetic(load_config({}), True, machine(X86)) is None
    assert processor.check_arithmetic(load_config({"precision": {"dtype": "bf16"}}), False, machine(X86)) is None


QUOTAS = {
    "v2, the parent is tighter": ({"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/cpu.max": "150000 100000"}, 1.5),
    "v2, none": ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "max 100000"}, None),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": 300000,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
        },
        3.0,
    ),
    "v1, none": (
        {"proc/self/cgroup": "3:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000},
        None,
    ),
    "nothing to read": ({}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_of_the_cgroups(machine, case):
    files, quota = QUOTAS[case]
    assert processor.cpu_quota(machine(files)) == quota


def test_fewer_cores_worth_of_time_than_cores_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}
    found = processor.check_cores(machine(files))
    assert found.status is Status.WARNING and "2.5 cores" in found.found and "taskset -c 4,5 " in found.way_out
    assert processor.check_cores(machine(files | {"sys/fs/cgroup/cpu.max": "400000 100000"})).status is Status.OK


NODES = {"sys/devices/system/node/node0/cpulist": "0-3", "sys/devices/system/node/node1/cpulist": "4-6,7"}


@pytest.mark.parametrize(
    ("cpus", "homes", "status"),
    [({1, 2}, {"nvme0n1": 0}, "ok"), ({1, 4}, {"nvme0n1": 0, "cuda:0": 1}, "ok"), ({4}, {"nvme0n1": 0}, "warning"), ({4}, {}, "ok")],
)
def test_a_device_whose_near_cores_are_forbidden_is_a_warning(machine, monkeypatch, cpus, homes, status):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    found = processor.check_numa(machine(NODES), homes)
    assert found.status == status and "2 nodes" in found.found
    assert status == "ok" or "--cpunodebind=0" in found.way_out


def test_one_node_is_not_worth_more_than_a_word(machine):
    assert processor.check_numa(machine({"sys/devices/system/node/node0/cpulist": "0-63"}), {"vda": 0}).found == "1 node"


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("0,2-3,8", {0, 2, 3, 8})])
def test_lists_of_processors(text, cpus):
    assert parse_cpus(text) == cpus


def test_the_node_of_a_pci_device(machine):
    folder = "sys/bus/pci/devices"
    system = machine({f"{folder}/0000:3b:00.0/numa_node": 1, f"{folder}/0000:5e:00.0/numa_node": -1})
    assert [processor.pci_node(system, address) for address in ("0000:3b:00.0", "0000:5e:00.0", "0000:00:00.0", "")] == [1, None, None, None]
