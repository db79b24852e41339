"""Segments cover exactly the parameters that have a rule, and the padding between neighbours."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.optim.chunks import Rule, segments, trainable_chunks
from infinity.sharding.layout import Interval, ParamSpec, layout_unit

RULE = Rule(1e-3, 0.9, 0.999, 1e-8, 0.01, 1)


@given(
    numels=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    kinds=st.lists(st.sampled_from([None, RULE, RULE._replace(step=2)]), min_size=8, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_segments_cover_every_ruled_element_with_its_rule_and_no_other_parameter(numels, kinds, dtype):
    unit = layout_unit(0, "unit", [ParamSpec(name=f"p{i}", shape=(n,), dtype=dtype, trainable=True) for i, n in enumerate(numels)])
    rules = {i: rule for i, rule in enumerate(kinds[: len(numels)]) if rule is not None}
    covered: dict[int, tuple] = {}
    for chunk in trainable_chunks([unit], 2048):
        runs = segments(chunk, rules)
        assert all(a.stop <= b.start for a, b in zip(runs, runs[1:], strict=False))
        for run in runs:
            for element in range(run.start + chunk.interval.start, run.stop + chunk.interval.start):
                covered[element] = run[2:]
    for i, slot in enumerate(unit.flats[0].slots):
        for element in range(slot.interval.start, slot.interval.stop):
            assert covered.get(element) == (tuple(rules[i]) if i in rules else None)


def test_neighbours_of_one_rule_are_one_segment():
    unit = layout_unit(0, "unit", [ParamSpec(name=n, shape=(100,), dtype=torch.float32, trainable=True) for n in "abcd"])
    (chunk,) = trainable_chunks([unit], 2048)
    (run,) = segments(chunk, dict.fromkeys(range(4), RULE))
    assert (run.start, run.stop) == (0, 3 * 128 + 100)
    assert len(segments(chunk, {0: RULE, 1: RULE, 3: RULE})) == 2
    assert len(segments(chunk, dict.fromkeys(range(4), RULE._replace(eps=0.0)))) == 4, "0 / (sqrt(0) + 0) would put a nan into the padding"


def test_chunks_are_in_forward_order_and_leave_frozen_parameters_out():
    specs = [
        ParamSpec(name="w", shape=(5000,), dtype=torch.bfloat16, trainable=True),
        ParamSpec(name="f", shape=(9,), dtype=torch.bfloat16, trainable=False),
    ]
    chunks = trainable_chunks([layout_unit(i, f"u{i}", specs) for i in range(2)], 2048, grad_dtype=torch.float32)
    assert [(chunk.unit, chunk.flat, chunk.index) for chunk in chunks] == [(u, 0, c) for u in range(2) for c in range(3)]
    assert chunks[1].interval == Interval(2048, 4096) and chunks[1].pieces == ((0, Interval(0, 2048)),)
    assert chunks[0].dtype is torch.bfloat16 and chunks[0].grad_dtype is torch.float32
