"""What the tests of workloads share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.workload.clone import CloneResult
from infinity.workload.jobfile import read_words
from infinity.workload.run import run_jobs

Run = Callable[..., list[CloneResult]]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def run(disk: Path) -> Run:
    """One job called `a` on the disk, from `--key=value` words; lines for people go to `said`."""

    def run_words(*words: str, said: list[str] | None = None, destroy_data: bool = False) -> list[CloneResult]:
        groups = read_words([f"--directory={disk}", "--name=a", *words])
        return run_jobs(groups, destroy_data=destroy_data, say=(said if said is not None else []).append)

    return run_words


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, unmounted afterwards."""
    mount = shutil.which("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    if mount is None or os.geteuid():
        pytest.skip("mounting a small file system needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)
