"""What a process may still take is what its memory cgroups leave, whichever is tightest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infinity.planner import hardware
from infinity.sizes import GiB, MiB

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import cgroup  # noqa: E402

TREES = {
    "v1": (
        "12:memory:/job/step\n3:cpu,cpuacct:/elsewhere\n",
        {
            "memory/memory.limit_in_bytes": str(1 << 62),
            "memory/memory.usage_in_bytes": str(50 * GiB),
            "memory/job/memory.limit_in_bytes": str(2 * GiB),
            "memory/job/memory.usage_in_bytes": str(GiB + 300 * MiB),
            "memory/job/memory.stat": f"cache 1\ntotal_inactive_file {300 * MiB}\n",
            "memory/job/step/memory.limit_in_bytes": str(4 * GiB),
            "memory/job/step/memory.usage_in_bytes": str(GiB),
        },
    ),
    "v2": (
        "0::/job/step\n",
        {
            "job/memory.max": str(2 * GiB),
            "job/memory.current": str(GiB + 300 * MiB),
            "job/memory.stat": f"anon 1\ninactive_file {300 * MiB}\n",
            "job/step/memory.max": "max",
            "job/step/memory.current": str(GiB),
        },
    ),
}


@pytest.mark.parametrize("version", TREES)
def test_the_tightest_cgroup_above_counts_less_its_idle_page_cache(tmp_path, monkeypatch, version):
    mine, files = TREES[version]
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    read = hardware._lines
    monkeypatch.setattr(hardware, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(hardware, "_lines", lambda path: mine.splitlines() if path == Path("/proc/self/cgroup") else read(path))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GiB})())
    assert hardware.available_memory() == GiB


def test_without_a_limit_it_is_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(hardware, "cgroup_limits", list)
    assert abs(hardware.available_memory() - psutil.virtual_memory().available) < GiB


def test_inside_a_real_cgroup():
    try:
        group = cgroup.MemoryCgroup(512 * MiB)
    except cgroup.NotPermittedError as reason:
        pytest.skip(f"no memory cgroup can be made here: {reason}")
    program = "from infinity.planner.hardware import available_memory; print(available_memory())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, preexec_fn=group.enter)
    finally:
        group.close()
    assert 0 < int(done.stdout) < 512 * MiB
