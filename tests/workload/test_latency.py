"""Latencies: exact where they can be, and fio's buckets where not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.workload.latency import PERCENTILES, Latencies, bucket_of, middle_of

TIMES = st.lists(st.integers(0, 1 << 34), min_size=1, max_size=200)


def of(*parts: list[int]) -> Latencies:
    found = Latencies()
    for part in parts:
        found.add(np.array(part, np.int64))
    return found


@given(TIMES, TIMES)
def test_summary_equals_numpys_however_the_times_came(first, second):
    both, merged, all_at_once = of(first, second), of(first), np.array(first + second)
    merged.merge(of(second))
    for found in (both, merged):
        assert (found.count, found.min_ns, found.max_ns) == (len(all_at_once), all_at_once.min(), all_at_once.max())
        assert found.mean_ns == pytest.approx(all_at_once.mean())
        assert found.stdev_ns == pytest.approx(all_at_once.std(ddof=1), rel=1e-6, abs=1e-3)
        assert found.percentiles() == both.percentiles()


@given(TIMES)
def test_a_percentile_is_within_a_sixtyfourth_of_the_time_at_its_rank(times):
    ranked = sorted(times)
    for percent, value in of(times).percentiles().items():
        exact = ranked[max(int(np.ceil(percent / 100 * len(ranked))) - 1, 0)]
        assert abs(value - exact) <= exact / 64 + 1


@given(st.integers(0, 1 << 34))
def test_a_bucket_holds_its_middle(value):
    bucket = int(bucket_of(np.array([value]))[0])
    assert int(bucket_of(np.array([middle_of(bucket)]))[0]) == bucket


def test_values_that_fio_prints():
    """Of a fio report: its percentiles are middles of these buckets."""
    for value in (33024, 43776, 5275648, 1269760):
        assert middle_of(int(bucket_of(np.array([value]))[0])) == value


def test_nothing_measured_is_nothing():
    found = Latencies()
    found.add(np.zeros(0, np.int64))
    found.merge(Latencies())
    assert (found.count, found.min_ns, found.mean_ns, found.stdev_ns, found.percentiles()) == (0, 0, 0.0, 0.0, {})
    assert PERCENTILES[0] == 1.0 and PERCENTILES[-1] == 99.99
