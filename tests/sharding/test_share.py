"""What a rank keeps: every element of every group somewhere, and once where it is sharded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.kinds import Group
from infinity.preparation import share_of
from infinity.sharding.layout import ParamSpec, layout_unit
from infinity.sharding.share import ALONE


def config(stage=3, shard_group="auto"):
    return load_config({"device": "cpu", "zero": {"stage": stage, "shard_group": shard_group}})


@given(stage=st.integers(0, 3), size=st.integers(1, 4), replicas=st.integers(1, 3), numel=st.integers(1, 40_000), chunk=st.integers(1, 9000))
def test_all_ranks_keep_everything_and_chunks_have_one_name(stage, size, replicas, numel, chunk):
    flat = layout_unit(0, "u", [ParamSpec(name="p", shape=(numel,), dtype=torch.float32, trainable=True)], size).flats[0]
    shares = [share_of(config(stage, size), rank, size * replicas) for rank in range(size * replicas)]
    for group in Group:
        named = [share.chunks(flat, group, chunk) for share in shares]
        kept = [sum(len(run) for _, run in chunks) for chunks in named]
        assert set(kept) == {flat.numel // size if group in shares[0].stage.sharded else flat.numel}
        assert {name for chunks in named for name in chunks} == set(enumerate(flat.chunks(chunk)))
        assert all(run.overlap(share.run(flat, group)) == run for share, chunks in zip(shares, named, strict=True) for _, run in chunks)
    parts = sorted(share.part(flat) for share in shares)
    assert parts[0].start == 0 and parts[-1].stop == flat.numel
    assert all(one.stop == two.start for one, two in zip(parts, parts[1:], strict=False))


def test_one_process_keeps_everything_whatever_its_group():
    assert share_of(config(shard_group=4), 0, 1).is_alone and share_of(config(), 0, 1) == ALONE


def test_a_group_divides_the_ranks():
    with pytest.raises(ConfigError, match="zero.shard_group = 4 does not divide the 6 ranks"):
        share_of(config(shard_group=4), 0, 6)
