"""Two disks, one twice as fast: what `infinity tune` writes, and how a run deals its chunks by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from disks import throttled_disks
from engines import settings, step
from models import tiny_gpt

import infinity
from infinity.config import load_config
from infinity.sizes import MiB

FAST, SLOW = 200_000_000, 100_000_000


@pytest.mark.slow
def test_weights_follow_bandwidth_and_chunks_follow_weights(tmp_path):
    output = tmp_path / "tuned.toml"
    with throttled_disks(tmp_path, {"fast": FAST, "slow": SLOW}, 320 * MiB) as (points, processes):
        options = ["--size=128m", "--runtime=1s", "--bs=1m", "--iodepth=4,16", "--workers=1", "--rounds=2", f"--output={output}"]
        command = [sys.executable, "-m", "infinity", "tune", *map(str, points), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, preexec_fn=lambda: processes.write_text(str(os.getpid())))
        assert done.returncode == 0, done.stdout + done.stderr
        fast, slow = load_config(output).nvme.paths
        assert fast.weight / slow.weight == pytest.approx(FAST / SLOW, rel=0.1)
        assert (fast.read_rate, slow.write_rate) == (pytest.approx(FAST, rel=0.1), pytest.approx(SLOW, rel=0.1))

        config = settings("unused", nvme={"paths": [entry.model_dump(exclude_none=True) for entry in (fast, slow)]})
        torch.manual_seed(0)
        with infinity.initialize(tiny_gpt(dim=64, layers=4), config) as engine:
            step(engine, 2)
            held = Counter()
            for _, slot in engine._parts.store._nvme.slots():
                held[next(point for point in points if slot.directory.is_relative_to(point))] += slot.nbytes
            rates = engine.plan.rates
    dealt = [held[point] for point in points]
    largest = max(spec.padded_nbytes for spec in engine.plan.specs)
    share = fast.weight / (fast.weight + slow.weight)
    assert abs(dealt[0] - share * sum(dealt)) <= 3 * largest, "each path holds its share, to within a chunk of each group"
    assert rates.nvme_read == fast.read_rate + slow.read_rate, "the plan counts on what was measured"
