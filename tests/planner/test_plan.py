"""What fits where: budgets are kept to the byte, what is worth most rests highest, and a budget that is too small names one that works."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.kinds import Group, Lane, Tier
from infinity.planner.place import Wish
from infinity.planner.plan import Plan, Rates, make_plan
from infinity.sharding.layout import ParamSpec, UnitLayout, layout_unit
from infinity.sizes import GiB, KiB, MiB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PINNED = {"param": Tier.NVME, "grad": Tier.NVME, "optimizer": Tier.NVME}


def model(*units: int, dtype: torch.dtype = torch.float32, frozen: bool = False) -> list[UnitLayout]:
    """One parameter per unit, of so many elements."""
    return [layout_unit(u, f"h.{u}", [ParamSpec(name=f"h.{u}.w", shape=(n,), dtype=dtype, trainable=not frozen)]) for u, n in enumerate(units)]


def plan(
    layouts: list[UnitLayout],
    cpu: int,
    *,
    hbm: int | None = None,
    device: torch.device = CPU,
    chunk: int = 1 << 16,
    prefetch: int | None = 2,
    paths: int = 1,
    accumulates: bool = False,
    around: tuple[int, ...] = (),
    activations: int | None = None,
    hbm_free: int = 0,
    is_cut: bool = False,
    **tiers: Tier,
) -> Plan:
    limits = {"hbm_limit": hbm, "cpu_limit": cpu, "activation_bytes": activations}
    wish = Wish(**limits, chunk_numel=chunk, is_cut=is_cut, prefetch_units=prefetch, accumulates=accumulates, **tiers)
    return make_plan(layouts, wish, device, hbm_free=hbm_free, cpu_available=8 * GiB, rates=Rates(), around=around, num_paths=paths)


def tiers_of(made: Plan, group: Group) -> list[Tier]:
    return [spec.tier for spec in made.specs if spec.key.group is group]


def test_what_fits_rests_whole_and_needs_nothing_but_room_for_gradients():
    made = plan(model(100_000, 100_000), 64 * MiB)
    assert {spec.tier for spec in made.specs} == {Tier.CPU}
    assert {spec.key.chunk for spec in made.specs} == {0}, "one chunk per flat buffer: nothing is staged"
    assert {item.name for item in made.working} <= {"gradients being filled", "gradients on their way", "rounding to whole pages"}


def test_parameters_rest_before_gradients_and_those_before_optimizer_states():
    layouts = model(*[1 << 18] * 8)  # a MiB each
    seen = []
    for limit in range(12 * MiB, 48 * MiB, MiB):
        made = plan(layouts, limit)
        param, grad, states = ([tier is Tier.CPU for tier in tiers_of(made, group)] for group in (Group.PARAM, Group.GRAD, Group.OPTIMIZER))
        assert all(param) or not any(grad), f"at {limit} bytes"
        assert all(grad) or not any(states), f"at {limit} bytes"
        seen.append(sum(param) + sum(grad) + sum(states))
    assert seen[0] < 64 and seen[-1] == 24, "from a part of the parameters to everything, in whole flat buffers"


sizes = st.lists(st.integers(1, 400_000), min_size=1, max_size=6)
places = st.sampled_from([None, Tier.CPU, Tier.NVME])


@given(units=sizes, limit=st.integers(256 * KiB, 48 * MiB), prefetch=st.integers(0, 3), accumulates=st.booleans(), root=st.booleans(),
       param=places, grad=places, optimizer=places, dtype=st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_a_plan_stays_inside_its_budget_or_names_one_that_works(units, limit, prefetch, accumulates, root, param, grad, optimizer, dtype):
    options = {"chunk": 1 << 20, "prefetch": prefetch, "accumulates": accumulates, "param": param, "grad": grad, "optimizer": optimizer}
    layouts, around = model(*units, dtype=dtype), (len(units) - 1,) if root else ()
    try:
        made = plan(layouts, limit, around=around, **options)
    except CapacityError as error:
        named = int(re.search(r"minimum of (\d+) bytes", str(error))[1])
        assert named > limit
        limit = named
        made = plan(layouts, limit, around=around, **options)
    assert made.held_bytes(Tier.CPU) <= limit and made.resting(Tier.HBM) == 0
    assert made.spare_bytes(Tier.CPU) == limit - made.held_bytes(Tier.CPU)
    for group, pinned in ((Group.PARAM, param), (Group.GRAD, grad), (Group.OPTIMIZER, optimizer)):
        assert pinned is None or set(tiers_of(made, group)) == {pinned}


@given(units=sizes, prefetch=st.integers(0, 3))
def test_the_minimum_of_a_pinned_placement_is_the_smallest_that_works(units, prefetch):
    with pytest.raises(CapacityError) as caught:
        plan(model(*units), 1, prefetch=prefetch, chunk=1 << 20, **PINNED)
    named = int(re.search(r"minimum of (\d+) bytes", str(caught.value))[1])
    assert plan(model(*units), named, prefetch=prefetch, chunk=1 << 20, **PINNED).held_bytes(Tier.CPU) == named
    with pytest.raises(CapacityError, match=f"minimum of {named} bytes"):
        plan(model(*units), named - 1, prefetch=prefetch, chunk=1 << 20, **PINNED)


def test_the_error_names_the_parts_and_the_ways_out():
    with pytest.raises(CapacityError, match=r"budgets.cpu = 1.00 MiB .* live units 1.53 MiB.*optimizer ring.*Raise budgets.cpu, lower"):
        plan(model(400_000), MiB, **PINNED)
    with pytest.raises(CapacityError, match=r'placement.optimizer = "cpu" 4.\d+ MiB'):
        plan(model(400_000), 4 * MiB, optimizer=Tier.CPU)
    with pytest.raises(CapacityError, match=r'placement.param = "hbm".*device is cpu, which has no HBM'):
        plan(model(400_000), 64 * MiB, param=Tier.HBM)


def test_what_is_pinned_to_memory_gets_its_place_before_what_is_not():
    total = 12 * 262_144
    least = plan(model(262_144), 0).working_bytes(Tier.CPU)
    made = plan(model(262_144), least + total + 2 * MiB, optimizer=Tier.CPU, grad=Tier.NVME)
    assert set(tiers_of(made, Group.OPTIMIZER)) == {Tier.CPU}


def test_a_budget_of_zero_lets_nothing_rest_and_stages_as_little_as_it_can():
    made = plan(model(*[300_000] * 4), 0, chunk=1 << 20)
    assert {spec.tier for spec in made.specs} == {Tier.NVME}
    assert made.chunk_numel == 32_768 and 0 < made.held_bytes(Tier.CPU) < 20 * MiB
    smallest = plan(model(*[300_000] * 4), made.held_bytes(Tier.CPU), chunk=1 << 20, **PINNED)
    assert smallest.held_bytes(Tier.CPU) == made.held_bytes(Tier.CPU)
    with pytest.raises(CapacityError, match=r'placement.param = "cpu"'):
        plan(model(300_000), 0, param=Tier.CPU)


def test_chunks_shrink_with_the_budget_but_not_below_what_a_request_is_worth():
    layouts = model(*[1 << 22] * 3)
    chunks = [plan(layouts, limit, chunk=1 << 22, **PINNED).chunk_numel for limit in (2 * GiB, 600 * MiB, 300 * MiB, 150 * MiB)]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] == 1 << 22 and chunks[-1] < 1 << 20
    assert plan(layouts, 0, chunk=1 << 22).chunk_numel == 32_768


def test_units_around_others_are_counted_on_top_of_those_that_take_turns():
    layouts = model(1 << 18, 1 << 18, 1 << 18, 1 << 18, 1 << 18)
    flat, nested = (plan(layouts, 256 * MiB, prefetch=0, around=around, **PINNED) for around in ((), (0, 4)))
    assert flat.working_bytes(Tier.CPU, "live units") == 2 * MiB
    assert nested.working_bytes(Tier.CPU, "live units") == 4 * MiB
    assert nested.working_bytes(Tier.CPU, "gradients being filled") == 3 * MiB


TRAFFIC = {
    # group on NVMe: bytes per element read and written in a step of one micro-step, bf16 training with fp32 states
    ("optimizer",): (12, 12),
    ("optimizer", "param"): (12 + 2 * 2, 12 + 2),
    ("optimizer", "grad"): (12 + 2, 12 + 2),
    ("optimizer", "param", "grad"): (12 + 2 * 2 + 2, 12 + 2 + 2),
    ("param",): (2 * 2, 2),
}


@pytest.mark.parametrize("groups", TRAFFIC, ids="+".join)
def test_bytes_per_parameter_and_step(groups):
    numel = 8 * 65_536
    tiers = {group: Tier.NVME if group in groups else Tier.CPU for group in ("param", "grad", "optimizer")}
    made = plan(model(numel, numel, dtype=torch.bfloat16), 256 * MiB, **tiers)
    read, written = TRAFFIC[groups]
    assert made.num_params == 2 * numel
    assert made.traffic[Lane.NVME_READ] == read * made.num_params
    assert made.traffic[Lane.NVME_WRITE] == written * made.num_params


def test_where_nothing_rests_most_of_the_budget_is_left_for_gathering_and_for_other_settings():
    """A run keeps its chunks, so they must not be so large that it could only go on as it began."""
    layouts = model(*[1 << 20] * 8, dtype=torch.bfloat16)
    for limit in (48 * MiB, 82 * MiB, 256 * MiB):
        made = plan(layouts, limit, chunk=1 << 22, **PINNED)
        assert made.spare_bytes(Tier.CPU) > limit // 4
        for other in ({"accumulates": True}, {"prefetch": 4}):
            plan(layouts, limit, chunk=made.chunk_numel, is_cut=True, **PINNED, **other)
        plan(layouts, limit * 3 // 4, chunk=made.chunk_numel, is_cut=True, **PINNED)


def test_a_run_that_cannot_go_on_with_its_chunks_is_told_that_it_has_them():
    with pytest.raises(CapacityError, match="has chunks of 1048576 elements, which it keeps: .* save a checkpoint"):
        plan(model(1 << 20, 1 << 20), 16 * MiB, chunk=1 << 20, is_cut=True, **PINNED)


def test_what_is_frozen_is_read_and_never_written():
    made = plan(model(8 * 65_536, frozen=True, dtype=torch.bfloat16), 64 * MiB, **PINNED)
    assert {spec.key.group for spec in made.specs} == {Group.PARAM}
    assert (made.traffic[Lane.NVME_READ], made.traffic[Lane.NVME_WRITE]) == (2 * 2 * made.num_params, 0)


def test_gradients_that_are_added_up_rest_in_fp32():
    made = plan(model(8 * 65_536, dtype=torch.bfloat16), 64 * MiB, accumulates=True, **PINNED)
    assert sum(spec.nbytes for spec in made.specs if spec.key.group is Group.GRAD) == 4 * made.num_params


def test_on_a_gpu_everything_that_fits_rests_in_hbm_in_whole_flat_buffers():
    made = plan(model(*[1 << 20] * 4, dtype=torch.bfloat16), 256 * MiB, hbm=256 * MiB, device=CUDA)
    assert {spec.tier for spec in made.specs} == {Tier.HBM} and made.chunk_numel == 1 << 20
    assert made.held_bytes(Tier.HBM) <= 256 * MiB
    assert {item.name for item in made.working if item.tier is Tier.CPU} == {"publishing from HBM"}


@given(units=sizes, hbm=st.integers(0, 32 * MiB), cpu=st.integers(0, 64 * MiB), prefetch=st.integers(0, 3), accumulates=st.booleans())
def test_on_a_gpu_both_budgets_hold_or_the_one_that_does_not_is_named(units, hbm, cpu, prefetch, accumulates):
    limits, options = {Tier.HBM: hbm, Tier.CPU: cpu}, {"device": CUDA, "chunk": 1 << 20, "prefetch": prefetch, "accumulates": accumulates}
    for _ in range(3):  # at most one correction per tier
        try:
            made = plan(model(*units, dtype=torch.bfloat16), limits[Tier.CPU], hbm=limits[Tier.HBM], **options)
            break
        except CapacityError as error:
            found = re.search(r"budgets\.(\w+) = .*minimum of (\d+) bytes", str(error))
            assert int(found[2]) > limits[Tier(found[1])] > 0
            limits[Tier(found[1])] = int(found[2])
    for tier, limit in limits.items():
        assert made.held_bytes(tier) <= limit or (limit == 0 and not made.resting(tier))


@pytest.mark.parametrize(
    ("hbm", "activations", "left"),
    [(64 * MiB, None, 16 * MiB), (64 * MiB, 40 * MiB, 40 * MiB), (64 * MiB, 0, 0), (None, None, 32 * MiB), (None, 8 * MiB, 8 * MiB)],
)
def test_states_leave_to_activations_what_is_theirs(hbm, activations, left):
    """A quarter of a budget that somebody set, half of free memory, or what somebody wished."""
    chunk = 1 << 16
    made = plan(model(*[1 << 20] * 16), 512 * MiB, hbm=hbm, activations=activations, hbm_free=64 * MiB, device=CUDA, chunk=chunk)
    assert made.working_bytes(Tier.HBM, "activations") == left
    free = made.limits[Tier.HBM] - made.held_bytes(Tier.HBM)
    assert made.limits[Tier.HBM] == 64 * MiB and 0 <= free < 12 * chunk, "the rest is full, but for less than a chunk of states"


@pytest.mark.parametrize("activations", [None, 0, 5 * MiB])
def test_the_smallest_hbm_budget_counts_activations(activations):
    layouts, options = model(1 << 20, 1 << 20), {"activations": activations, "device": CUDA}
    with pytest.raises(CapacityError, match="activations") as told:
        plan(layouts, 64 * MiB, hbm=6 * MiB, **options)
    least = int(re.search(r"minimum of (\d+) bytes", str(told.value))[1])
    assert least - 1 <= plan(layouts, 64 * MiB, hbm=least, **options).held_bytes(Tier.HBM) <= least
    with pytest.raises(CapacityError, match=f"minimum of {least} bytes"):
        plan(layouts, 64 * MiB, hbm=least - 4, **options)


def test_activations_that_leave_nothing_are_refused_by_name():
    with pytest.raises(CapacityError, match=r"budgets.activations = 8.00 MiB leaves nothing of budgets.hbm = 8.00 MiB"):
        plan(model(1 << 20), 64 * MiB, hbm=8 * MiB, activations=8 * MiB, device=CUDA)


def test_states_in_hbm_keep_their_gradients_beside_them():
    layouts = model(*[1 << 18] * 8, dtype=torch.bfloat16)
    for hbm in range(8 * MiB, 48 * MiB, 4 * MiB):
        made = plan(layouts, 256 * MiB, hbm=hbm, device=CUDA, chunk=1 << 17)
        homes = {spec.key: spec.tier for spec in made.specs}
        for key, tier in homes.items():
            if key.group is Group.OPTIMIZER:
                grad = next(homes[other] for other in homes if other.group is Group.GRAD and (other.unit, other.chunk) == (key.unit, key.chunk))
                assert (tier is Tier.HBM) == (grad is Tier.HBM)


def test_the_plan_is_printed_with_every_budget():
    made = plan(model(*[1 << 18] * 8), 24 * MiB, **PINNED)
    text = made.render()
    assert "24.00 MiB" in text and "nvme-read" in text and "2,097,152 parameters" in text


def test_units_ahead_grow_with_an_eighth_of_a_budget_that_states_fill_and_are_never_below_two():
    layouts = model(*[1 << 18] * 80)  # a MiB each, so that n ahead are n + 2 MiB live; 400 MiB of states
    made = {limit: plan(layouts, limit * MiB, prefetch=None, chunk=1 << 14) for limit in (16, 32, 48, 64, 80, 120, 320)}
    assert {limit: one.prefetch_units for limit, one in made.items()} == {16: 2, 32: 2, 48: 4, 64: 6, 80: 8, 120: 13, 320: 32}
    assert all(one.resting(Tier.NVME) and one.spare_bytes(Tier.CPU) < 4 * MiB for one in made.values())
    assert plan(layouts, 800 * MiB, prefetch=0, **PINNED).prefetch_units == 0


@given(limit=st.integers(16, 128))
def test_units_ahead_take_half_of_what_a_budget_has_left_over(limit):
    layouts, options = model(*[1 << 18] * 20), {"chunk": 1 << 16, **PINNED}
    least = min(19, max(2, limit // 8 - 2))  # a MiB each: an eighth of the budget
    auto, few = plan(layouts, limit * MiB, prefetch=None, **options), plan(layouts, limit * MiB, prefetch=least, **options)
    assert auto.specs == few.specs and least <= auto.prefetch_units <= 19, "all of them, beside the one in use"
    if auto.prefetch_units > least:
        assert auto.spare_bytes(Tier.CPU) >= few.spare_bytes(Tier.CPU) // 2
    if few.spare_bytes(Tier.CPU) >= 20 * MiB:
        assert auto.spare_bytes(Tier.CPU) >= 20 * MiB, "where all parameters could be gathered they still can"
    if auto.prefetch_units < 19:
        more = plan(layouts, limit * MiB, prefetch=auto.prefetch_units + 1, **options)
        assert more.spare_bytes(Tier.CPU) < max(few.spare_bytes(Tier.CPU) // 2, 20 * MiB)


@given(paths=st.integers(1, 8), limit=st.integers(16 * MiB, 256 * MiB))
def test_staging_keeps_every_path_busy_where_there_is_room(paths, limit):
    layouts, options = model(*[1 << 18] * 8), {"chunk": 1 << 16, **PINNED}
    one, several = plan(layouts, limit, **options), plan(layouts, limit, paths=paths, **options)
    assert one.busy_paths == 1 <= several.busy_paths <= paths
    assert several.specs == one.specs and several.held_bytes(Tier.CPU) <= limit
    if limit == 256 * MiB:
        assert several.busy_paths == paths
