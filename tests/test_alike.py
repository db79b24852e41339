"""What ranks of one job must have in common, where it follows from a plan and not from the configuration."""

from __future__ import annotations

from dataclasses import replace

import torch

from infinity.alike import _meetings
from infinity.kinds import Group, Tier
from infinity.planner.place import Wish
from infinity.planner.plan import Rates, make_plan
from infinity.sharding.layout import ParamSpec, layout_unit
from infinity.sharding.share import Share
from infinity.sharding.stages import STAGES
from infinity.sizes import GiB, MiB


def meetings(stage, change):
    """Where a flat buffer of two chunks is exchanged, with the tiers of its gradients as `change` says."""
    layouts = [layout_unit(0, "h", [ParamSpec(name="h.w", shape=(1 << 17,), dtype=torch.bfloat16, trainable=True)], 2)]
    share = Share(STAGES[stage], rank=0, world_size=2)
    wish = Wish(
        hbm_limit=256 * MiB, cpu_limit=256 * MiB, chunk_numel=1 << 16, prefetch_units=2, accumulates=False, param=Tier.CPU, grad=Tier.CPU, is_cut=True
    )
    device = torch.device("cuda", 0)
    plan = make_plan(layouts, wish, device, hbm_free=GiB, cpu_available=GiB, rates=Rates(), around=(), share=share)
    specs = tuple(replace(spec, tier=change.get(spec.key.chunk, spec.tier)) if spec.key.group is Group.GRAD else spec for spec in plan.specs)
    return dict(_meetings(share, layouts, replace(plan, specs=specs)))


def test_what_rests_in_one_piece_in_memory_meets_in_hbm_and_all_else_in_cpu_memory():
    in_hbm = {"grad of h": "in HBM", "param of h": "in HBM"}
    assert meetings(1, {}) == in_hbm
    assert meetings(1, {0: Tier.HBM, 1: Tier.HBM}) == in_hbm, "a rank whose gradients rest in HBM meets one with its own in CPU memory"
    assert meetings(1, {1: Tier.NVME}) == {**in_hbm, "grad of h": "in CPU memory"}
    assert meetings(1, {1: Tier.HBM}) == {**in_hbm, "grad of h": "in CPU memory"}, "in two places"


def test_stages_differ_in_what_is_exchanged():
    assert [sorted(meetings(stage, {})) for stage in range(4)] == [["grad of h"], ["grad of h", "param of h"], ["param of h"], []]
