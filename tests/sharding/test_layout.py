"""Layouts cover every element once, on the boundaries that files and kernels need."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.sharding.layout import CHUNK_GRANULE, Interval, ParamSpec, layout_unit

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int8])
specs = st.lists(st.tuples(shapes, dtypes, st.booleans()), max_size=12)


def layout(raw, world_size=1):
    params = [ParamSpec(name=f"p{i}", shape=shape, dtype=dtype, trainable=train) for i, (shape, dtype, train) in enumerate(raw)]
    return layout_unit(0, "unit", params, world_size)


@given(specs, st.integers(1, 5))
def test_slots_are_aligned_disjoint_and_shards_are_equal_and_whole_sectors(raw, world_size):
    for flat in layout(raw, world_size).flats:
        at = 0
        for slot in flat.slots:
            assert slot.start >= at and slot.start * flat.dtype.itemsize % 256 == 0
            at = slot.interval.stop
        assert at <= flat.numel
        assert flat.shard_numel * world_size == flat.numel
        assert flat.shard_numel * flat.dtype.itemsize % 4096 == 0
        assert [flat.shard(r).start for r in range(world_size)] == list(range(0, flat.numel, flat.shard_numel))


@given(specs, st.integers(1, 3 * CHUNK_GRANULE))
def test_chunks_and_pieces_cover_each_parameter_once(raw, chunk_numel):
    for flat in layout(raw).flats:
        covered = dict.fromkeys(range(len(flat.slots)), 0)
        chunks = flat.chunks(chunk_numel)
        assert chunks[0].start == 0 and chunks[-1].stop == flat.shard_numel
        assert all(left.stop == right.start for left, right in zip(chunks, chunks[1:], strict=False))
        for chunk in chunks:
            for index, run in flat.pieces(chunk):
                assert 0 <= run.start < run.stop <= len(chunk)
                covered[index] += len(run)
        assert covered == {i: slot.numel for i, slot in enumerate(flat.slots)}


@given(specs, st.sets(st.integers(0, 11)))
def test_gaps_and_present_slots_partition_the_flat(raw, wanted):
    for flat in layout(raw).flats:
        present = {i for i in wanted if i < len(flat.slots)}
        marks = torch.zeros(flat.numel, dtype=torch.int32)
        for gap in flat.gaps(present):
            marks[gap.start : gap.stop] += 1
        for i in present:
            marks[flat.slots[i].start : flat.slots[i].interval.stop] += 1
        assert bool((marks == 1).all())


def test_views_give_back_shape_and_values_also_for_complex():
    unit = layout([((2, 3), torch.complex64, True), ((5,), torch.complex64, True)])
    (flat,) = unit.flats
    buffer = torch.zeros(flat.numel, dtype=flat.dtype)
    value = torch.randn(2, 3, dtype=torch.complex64)
    flat.slots[0].view(buffer).copy_(value)
    assert torch.equal(flat.slots[0].view(buffer), value)
    assert not flat.slots[1].view(buffer).abs().any()


def test_interval_overlap_is_empty_when_apart():
    assert len(Interval(0, 4).overlap(Interval(6, 9))) == 0
