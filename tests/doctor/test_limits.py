"""Descriptors against what the plan's store opens, budgets against what there is."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from infinity.config import load_config
from infinity.doctor import limits
from infinity.doctor.finding import Status
from infinity.kinds import Group, Tier
from infinity.planner.plan import Plan, Rates
from infinity.sizes import GiB, MiB
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part
from infinity.storage.nvme import SPARE_DESCRIPTORS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import cgroup  # noqa: E402

PATHS = load_config({"nvme": {"paths": ["/a", "/b"]}})


def plan_of(*rows: tuple[int, Group, Tier, int]) -> Plan:
    """(unit, group, tier, chunks) rows."""
    part = (Part("some", torch.float32, 1024),)
    specs = [ChunkSpec(ChunkKey(unit, 0, group, chunk), 4096, tier, part) for unit, group, tier, chunks in rows for chunk in range(chunks)]
    sizes = {"chunk_numel": 2048, "num_params": 0, "prefetch_units": 1}
    return Plan(device=torch.device("cpu"), specs=tuple(specs), working=(), limits={}, traffic={}, rates=Rates(), **sizes)


PLAN = plan_of(
    (0, Group.PARAM, Tier.CPU, 3),  # has files once it is published: two paths
    (0, Group.GRAD, Tier.CPU, 3),  # never has any
    (0, Group.OPTIMIZER, Tier.NVME, 5),  # on both paths
    (1, Group.PARAM, Tier.NVME, 1),  # on one
    (1, Group.GRAD, Tier.NVME, 1),
)
FILES = 2 + 0 + 2 + 1 + 1


def test_the_files_of_a_plan_are_counted_per_unit_group_and_path():
    assert limits.count_files(PLAN, paths=2) == FILES
    assert limits.count_files(PLAN, paths=1) == 4
    assert limits.count_files(PLAN, paths=0) == 0


@pytest.mark.parametrize(("hard", "status"), [(SPARE_DESCRIPTORS + FILES, "ok"), (SPARE_DESCRIPTORS + FILES - 1, "failure")])
def test_the_hard_limit_has_to_hold_the_plan(monkeypatch, hard, status):
    """The soft one does not: the engine raises it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    found = limits.check_descriptors(PATHS, PLAN)
    assert found.status == status
    assert status == "ok" or f"ulimit -Hn {SPARE_DESCRIPTORS + FILES}" in found.way_out


def test_without_a_plan_a_large_model_has_to_find_room(monkeypatch):
    units = 40
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, SPARE_DESCRIPTORS + units * len(Group) * 2 + 5))
    found = limits.check_descriptors(PATHS, None)
    assert found.status is Status.WARNING and f"{units} units on 2 paths" in found.found
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    assert limits.check_descriptors(PATHS, None).found.startswith("64 allowed, unlimited at most")


@pytest.mark.parametrize(("hard", "code"), [(SPARE_DESCRIPTORS + 256 * 3, 0), (SPARE_DESCRIPTORS + 256 * 3 - 1, 1)])
def test_a_child_with_few_descriptors_is_warned(tmp_path, hard, code):
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))

    program = (
        "import sys; from infinity.config import load_config; from infinity.doctor import limits, exit_status;"
        f"found = limits.check_descriptors(load_config({{'nvme': {{'paths': [{str(tmp_path)!r}]}}}}), None); sys.exit(exit_status([found]))"
    )
    assert subprocess.run([sys.executable, "-c", program], preexec_fn=lower).returncode == code


def test_locked_memory_is_told_and_never_in_the_way(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    found = limits.check_memory_lock()
    assert found.status is Status.OK and found.found.startswith("64.00 KiB")


def budget(nbytes: int | str):
    return load_config({"budgets": {"cpu": nbytes}})


@pytest.fixture
def libraries(monkeypatch):
    """The process holds 1 GiB, the machine has 16 GiB, 8 of them available."""
    monkeypatch.setattr(limits, "_baseline", lambda: GiB)
    monkeypatch.setattr(limits, "available_memory", lambda: 8 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 16 * GiB, "available": 8 * GiB})())


@pytest.mark.parametrize(
    ("cpu", "status", "way_out"),
    [
        ("auto", "ok", ""),
        (8 * GiB, "ok", ""),
        (8 * GiB + 1, "warning", f"budgets.cpu to at most {8 * GiB}"),
        (15 * GiB, "warning", f"budgets.cpu to at most {8 * GiB}"),
        (15 * GiB + 1, "failure", f"budgets.cpu to at most {15 * GiB}"),
    ],
)
def test_a_budget_above_what_is_available_warns_and_above_the_machine_fails(libraries, cpu, status, way_out):
    found = limits.check_memory(budget(cpu))
    assert found.status == status and way_out in found.way_out


@pytest.mark.parametrize(("cpu", "status"), [("auto", "ok"), (3 * GiB, "ok"), (3 * GiB + 1, "failure")])
def test_a_budget_and_the_libraries_have_to_fit_the_tightest_cgroup(libraries, monkeypatch, cpu, status):
    monkeypatch.setattr(limits, "cgroup_limits", lambda: [(32 * GiB, GiB), (4 * GiB, GiB)])
    found = limits.check_cgroup(budget(cpu))
    assert found.status == status and "4.00 GiB allowed, 1.00 GiB in use" in found.found
    assert status == "ok" or f"at most {3 * GiB}" in found.way_out


def test_inside_a_real_cgroup():
    try:
        group = cgroup.MemoryCgroup(1024 * MiB)
    except cgroup.NotPermittedError as reason:
        pytest.skip(f"no memory cgroup can be made here: {reason}")
    program = (
        "from infinity.config import load_config; from infinity.doctor import limits;"
        "print(*[limits.check_cgroup(load_config({'budgets': {'cpu': cpu}})) for cpu in ('64MiB', '1GiB')], sep='\\n')"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, preexec_fn=group.enter)
    finally:
        group.close()
    small, large = done.stdout.splitlines()
    assert "1.00 GiB allowed" in small and "Status.OK" in small
    assert "Status.FAILURE" in large and "memory.max" in large
