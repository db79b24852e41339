"""A command inside a memory cgroup: held to the limit where that is permitted, run all the same where it is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "cgroup.py"


def run(limit: str, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--limit", limit, "--", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def permitted() -> None:
    said = run("1GiB", "pass").stderr
    if "running without the limit" in said:
        pytest.skip(said.strip())


def test_the_exit_code_is_the_commands():
    assert run("1GiB", "raise SystemExit(7)").returncode == 7
    assert run("1GiB", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == 143


def test_the_peak_is_told(permitted):
    done = run("1GiB", "memory = bytearray(100 << 20)")
    peak, resident = map(int, re.findall(r"(\d+) MiB (?:charged|resident)", done.stderr))
    assert done.returncode == 0
    assert 100 <= peak <= 200 and 100 <= resident <= 200


def test_a_process_over_the_limit_is_killed_and_told(permitted):
    done = run("64MiB", "memory = bytearray(200 << 20)")
    assert done.returncode == 137
    assert "the kernel killed" in done.stderr


def test_nothing_is_left_behind(permitted):
    run("64MiB", "pass")
    assert not list(Path("/sys/fs/cgroup").glob("**/infinity-*"))


def test_a_limit_without_a_unit_is_refused():
    done = run("1024", "pass")
    assert done.returncode == 2
    assert "512MiB" in done.stderr
