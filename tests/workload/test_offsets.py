"""Where blocks go: every block once a pass, in fio's orders, with its mix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.native import READ, SYNC, WRITE
from infinity.workload.job import Job
from infinity.workload.offsets import Pattern, Permutation


def one_pass(pattern: Pattern, count: int = 50) -> np.ndarray:
    parts = []
    while len(part := pattern.take(count)):
        parts.append(part)
    return np.concatenate(parts)


def job(**settings: object) -> Job:
    return Job.model_validate({"name": "x", **settings})


@given(st.integers(1, 5000), st.integers(0, 100))
def test_a_permutation_has_every_number_once(n, seed):
    order = Permutation(n, np.random.default_rng(seed))
    cut = n // 3
    assert sorted([*order.at(0, cut), *order.at(cut, n)]) == list(range(n))


@given(st.integers(1, 300), st.sampled_from(["read", "write", "randread", "randwrite", "randrw"]), st.integers(1, 64), st.integers(0, 4095))
def test_a_pass_covers_every_block_of_one_size_once(blocks, rw, count, tail):
    found = one_pass(Pattern(job(rw=rw), [blocks * 4096 + tail]), count)
    assert sorted(found["offset"]) == [index * 4096 for index in range(blocks)]
    assert (found["nbytes"] == 4096).all() and (found["buffer"] == np.where((found["direction"] == WRITE) & (rw == "randrw"), -2, -1)).all()
    if "rand" not in rw:
        assert (np.diff(found["offset"]) > 0).all()


@given(st.integers(1, 1 << 20), st.sampled_from(["read", "randread", "randrw"]))
def test_blocks_of_several_sizes_do_not_overlap_and_leave_less_than_one(extra, rw):
    nbytes = 65536 + extra
    found = one_pass(Pattern(job(rw=rw, bssplit="512/50:4k/30:64k/20"), [nbytes]))
    order = np.argsort(found["offset"])
    ends = found["offset"][order] + found["nbytes"][order].astype(np.int64)
    assert found["offset"][order][0] == 0
    assert (found["offset"][order][1:] == ends[:-1]).all()
    assert nbytes - 65536 < ends[-1] <= nbytes
    assert set(found["nbytes"]) <= {512, 4096, 65536}


def test_several_files_are_used_in_turn():
    found = one_pass(Pattern(job(rw="read"), [40960, 40960]), 6)
    assert (found["file"] == np.tile([0, 1], 10)).all()
    assert (found["offset"][found["file"] == 1] == np.arange(10) * 4096).all()


def test_files_of_different_sizes_are_each_covered():
    found = one_pass(Pattern(job(rw="randread"), [4096, 409600, 81920]), 7)
    assert [int((found["file"] == index).sum()) for index in range(3)] == [1, 100, 20]


def test_a_mixed_job_in_order_has_a_place_for_each_direction():
    """As fio has it: reads and writes each go on where the last of their kind ended."""
    found = one_pass(Pattern(job(rw="rw"), [4096 * 1000]))
    assert len(found) == 1000
    for direction in (READ, WRITE):
        mine = found[found["direction"] == direction]
        assert (mine["offset"] == np.arange(len(mine)) * 4096).all()


@pytest.mark.parametrize("percent", [0, 1, 30, 99, 100])
@pytest.mark.parametrize("rw", ["rw", "randrw"])
def test_the_mix_is_the_percentage(rw, percent):
    found = one_pass(Pattern(job(rw=rw, rwmixread=percent), [4096 * 20000]), 1000)
    share = (found["direction"] == READ).mean()
    spread = 6 * np.sqrt(percent / 100 * (1 - percent / 100) / 20000)
    assert abs(share - percent / 100) <= spread


def test_sizes_are_drawn_by_their_weights_for_each_direction():
    found = one_pass(Pattern(job(rw="randrw", bssplit="4k/80:8k/20,16k/100"), [1 << 28]), 4000)
    reads = found[found["direction"] == READ]
    assert (found["nbytes"][found["direction"] == WRITE] == 16384).all()
    assert abs((reads["nbytes"] == 4096).mean() - 0.8) < 0.02


def test_a_new_pass_has_another_order_and_a_clone_too_but_a_run_repeats():
    pattern = Pattern(job(rw="randread"), [4096 * 256])
    first = one_pass(pattern)
    pattern.restart()
    second, other, again = (
        one_pass(pattern),
        one_pass(Pattern(job(rw="randread"), [4096 * 256], clone=1)),
        one_pass(Pattern(job(rw="randread"), [4096 * 256])),
    )
    assert sorted(first["offset"]) == sorted(second["offset"])
    assert (first["offset"] != second["offset"]).any() and (first["offset"] != other["offset"]).any()
    assert (first == again).all()


@given(st.integers(1, 9), st.integers(1, 40))
def test_a_sync_follows_every_nth_write(every, count):
    found = one_pass(Pattern(job(rw="rw", fsync=every), [4096 * 100, 4096 * 100]), count)
    writes = 0
    for index, row in enumerate(found):
        if row["direction"] == WRITE:
            writes += 1
            due = writes % every == 0
            after = found[index + 1] if index + 1 < len(found) else None
            assert (after is not None and after["direction"] == SYNC and after["file"] == row["file"] and after["nbytes"] == 0) == due
    assert (found["direction"] == SYNC).sum() == writes // every
