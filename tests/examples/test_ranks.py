"""The example of several processes runs under torchrun and learns, and its states are published by every rank."""

from __future__ import annotations

import re
from pathlib import Path

from tests.ranks import torchrun

ROOT = Path(__file__).resolve().parents[2]


def run(folder, steps):
    """Losses by step."""
    with torchrun(folder, str(ROOT / "examples" / "ranks.py"), str(folder), str(steps)) as process:
        said, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", said)}


def test_two_ranks_learn(tmp_path):
    losses = run(tmp_path, 6)
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    shards = {path.name for path in tmp_path.rglob("*.safetensors")}
    assert {name.replace("-r0-", "-r1-") for name in shards if "-r0-" in name} == {name for name in shards if "-r1-" in name} != set()
