"""A long run stays as it began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_steps_leave_memory_descriptors_and_threads_as_they_were(tmp_path):
    """With evaluation, generation, saves, a load, and two DataLoader workers. After the warm-up less than 2 KiB a step.

    What is resident goes up and down by 6 MB as pages come back: over 700 steps alone that can look like 2 KiB a step.
    """
    command = [sys.executable, str(ROOT / "bench/soak.py"), "--steps", "2000", "--warm-up", "500", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["losses"][1] < 0.5 < result["losses"][0]
    samples = result["samples"]
    assert samples["resident bytes"]["slope"] < 2048, samples
    assert samples["resident bytes"]["most"] - samples["resident bytes"]["first"] < 6 << 20, samples
    for name in ("descriptors", "threads", "python threads"):
        assert samples[name]["least"] == samples[name]["most"], f"{name}: {samples[name]}"
    assert samples["slab bytes"]["most"] - samples["slab bytes"]["first"] < 1 << 20, samples
