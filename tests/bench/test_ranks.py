"""What bench/ranks.py computes from spans."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_lanes_are_busy_together_where_each_has_a_span_and_no_time_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import ranks

    second = 10**9
    spans = [
        ("gpu", 0, 4 * second),
        ("gpu", 3 * second, 6 * second),
        ("comm", second, 2 * second),
        ("comm", 5 * second, 9 * second),
        ("adam", 0, 9 * second),
    ]
    assert ranks.busy_together(spans, ("comm", "gpu")) == 2.0
    assert ranks.busy_together(spans, ("comm", "gpu", "adam")) == 2.0
    assert ranks.busy_together(spans, ("comm", "gpu", "download")) == 0.0
