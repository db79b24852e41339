"""The example of several processes runs under torchrun and learns, and its states are published by every rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(folder, steps):
    """Losses by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "ranks.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(folder), str(steps)], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


def test_two_ranks_learn(tmp_path):
    losses = run(tmp_path, 6)
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    shards = {path.name for path in tmp_path.rglob("*.safetensors")}
    assert {name.replace("-r0-", "-r1-") for name in shards if "-r0-" in name} == {name for name in shards if "-r1-" in name} != set()
