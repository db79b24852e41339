"""The table of ZeRO's stages gives the figures of its paper."""

from __future__ import annotations

import pytest

from infinity.kinds import Group
from infinity.sharding.stages import MIXED, STAGES, WITHOUT_MASTERS, state_bytes

G = 10**9


def test_each_stage_shards_what_the_one_before_does_and_one_group_more():
    assert [len(stage.sharded) for stage in STAGES] == [0, 1, 2, 3] and [stage.number for stage in STAGES] == [0, 1, 2, 3]
    assert all(before.sharded < after.sharded for before, after in zip(STAGES, STAGES[1:], strict=False))
    assert STAGES[3].sharded == set(Group)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
def test_bytes_are_the_papers_formulas(world_size):
    psi = 7 * 10**6
    wanted = [16 * psi, 4 * psi + 12 * psi / world_size, 2 * psi + 14 * psi / world_size, 16 * psi / world_size]
    assert [state_bytes(psi, stage, world_size) for stage in STAGES] == pytest.approx(wanted)


def test_the_papers_example_of_64_ranks():
    found = [state_bytes(int(7.5 * G), stage, 64) / G for stage in STAGES]
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


@pytest.mark.parametrize(("element", "wanted"), [(WITHOUT_MASTERS, [96, 44.8, 32, 19.2]), (MIXED, [128, 51.2, 38.4, 25.6])])
def test_8_b_on_5_ranks_with_masters_and_without(element, wanted):
    assert [state_bytes(8 * G, stage, 5, element) / G for stage in STAGES] == pytest.approx(wanted)


def test_elements_that_pass_a_rank():
    assert [stage.passes for stage in STAGES] == [2, 2, 2, 3]
