"""N ranks hold their shares of one model, and working memory that does not grow with it: never N copies, not at the start either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.sizes import MiB
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import ranks_memory  # noqa: E402

LAYERS, WIDTH = 64, 512
PARAM_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)

BEGINNING_BYTES = 16 * MiB
"""Beside what rests: a piece of first values, and the hooks of 64 units. Less than a quarter of a copy of the parameters."""

UNPLANNED_BYTES = 32 * MiB
"""That, gloo's copies of a unit, and what malloc keeps of them. Less than half a copy."""


def weigh(rank, world_size, folder):
    """Bytes above this process's baseline: (the most during initialize, during three steps, at rest by the plan, all that is planned)."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    ranks_memory.run(2, WIDTH, folder)
    before = ranks_memory.status("VmRSS")
    peaks, plan = ranks_memory.run(LAYERS, WIDTH, folder)
    return peaks["initialize"] - before, peaks["train"] - before, plan["resting"], plan["planned"]


def test_a_rank_holds_its_share_and_working_memory_from_the_first_moment_on(tmp_path):
    for initialize, train, resting, planned in run_ranks(weigh, 2, tmp_path):
        assert resting < 1.05 * 5 * PARAM_BYTES / 2, "parameter, gradient, master and two moments, padding apart"
        assert initialize < resting + BEGINNING_BYTES < resting + PARAM_BYTES / 4
        assert train < planned + UNPLANNED_BYTES < planned + PARAM_BYTES / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_ranks_together_hold_a_tenth_more_than_one_at_most(tmp_path):
    """4.1 GB of states in 768 layers: of the tenth 2 % are padding, and 6 % what three more ranks work with and hold of hooks."""
    raw = tmp_path / "raw.json"
    command = [sys.executable, str(ROOT / "bench" / "ranks_memory.py"), "--dir", str(tmp_path), "--json", str(raw), "--counts", "1", "4"]
    subprocess.run(command, check=True)
    found = json.loads(raw.read_text())
    for phase in ranks_memory.PHASES:
        one, four = (sum(rank[phase] for rank in found[ranks]) for ranks in ("1", "4"))
        assert four < 1.1 * one, phase
