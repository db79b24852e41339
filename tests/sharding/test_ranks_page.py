"""docs/ranks.md says what the table of stages computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.sharding.stages import MIXED, STAGES, WITHOUT_MASTERS, state_bytes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ranks.md").read_text()


@pytest.mark.parametrize(
    ("name", "numel", "world_size", "element"),
    [
        ("7.5 B on 64", 7_500_000_000, 64, MIXED),
        ("8 B on 5", 8_000_000_000, 5, MIXED),
        ("8 B on 5, without masters", 8_000_000_000, 5, WITHOUT_MASTERS),
    ],
)
def test_bytes_per_rank(name, numel, world_size, element):
    figures = " | ".join(f"{state_bytes(numel, stage, world_size, element) / 1e9:.1f}" for stage in STAGES)
    assert f"| {name} | {figures} |" in PAGE
