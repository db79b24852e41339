"""The benches run from end to end at toy size; their figures mean nothing there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / script), "--toy", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_beyond_memory_tells_what_was_resident(tmp_path: Path) -> None:
    out = run("beyond_memory.py", "--dir", str(tmp_path), "--only", "clipped", "--json", str(tmp_path / "raw.json"))
    assert "clipped" in out and "resident at most" in out
    (result,) = json.loads((tmp_path / "raw.json").read_text())
    assert len(result["losses"]) == 3 and result["held"] <= result["planned"]
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"], "nothing is left on the drive"


def test_soak_tells_slopes(tmp_path: Path) -> None:
    result = json.loads(run("soak.py", "--dir", str(tmp_path)).splitlines()[-1])
    assert set(result["samples"]) >= {"resident bytes", "descriptors", "threads", "slab bytes"}


def test_copies_run_both_ways() -> None:
    result = json.loads(run("copies.py").splitlines()[-1])
    assert all(len(result[direction]["infinity"]) == 1 for direction in ("upload", "download"))


def test_paths_are_measured_one_and_several_at_a_time(tmp_path: Path) -> None:
    try:
        result = json.loads(run("paths.py", "--dir", str(tmp_path)).splitlines()[-1])
    except AssertionError as error:
        if "not permitted" in str(error):
            pytest.skip(str(error))
        raise
    assert set(result["rates"]) == {"1", "2"} and not list(tmp_path.iterdir())


def test_the_way_to_hbm_is_measured_beside_its_stages(tmp_path: Path) -> None:
    result = json.loads(run("hbm.py", "--dir", str(tmp_path)).splitlines()[-1])
    assert all(len(result[rw]) == 3 for rw in ("read", "write")) and not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_each_kind_of_job_is_measured_beside_fio(tmp_path: Path) -> None:
    lines = run("fio.py", "--dir", str(tmp_path)).splitlines()
    assert [line.split("|")[1].strip() for line in lines if " depth " in line] == ["read 64k depth 4", "rw 64k depth 4"]
    assert lines[-1].endswith("of 6 figures missed") and not list(tmp_path.iterdir())
