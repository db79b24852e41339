"""Every parameter is in exactly one unit, and the units are those a reader of the model would name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.errors import CapacityError, ConfigError
from infinity.runtime.units import find_units, make_units

LARGE = 1 << 30


class Block(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(d), nn.Linear(d, d)


class MixtureBlock(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))


class Gpt(nn.Module):
    def __init__(self, make=Block, layers=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(plans):
    return [plan.name for plan in plans]


def owner(plans):
    return {param: plan.name for plan in plans for param in plan.names}


def test_blocks_and_root():
    plans = find_units(Gpt(), threshold_numel=LARGE)
    assert names(plans) == ["layers.0", "layers.1", "layers.2", "root"]
    assert plans[0].names == ("layers.0.norm.weight", "layers.0.norm.bias", "layers.0.linear.weight", "layers.0.linear.bias")
    assert plans[-1].names == ("embed.weight", "norm.weight", "norm.bias", "head.weight")


def test_large_modules_are_units_of_their_own():
    plans = find_units(Gpt(), threshold_numel=39)
    assert names(plans) == ["embed", "layers.0", "layers.1", "layers.2", "head", "root"]
    assert find_units(Gpt(), threshold_numel=40)[0].name == "layers.0", "the threshold itself is not above it"


def test_a_tied_parameter_belongs_to_its_first_user():
    model = Gpt(tied=True)
    plans = find_units(model, threshold_numel=39)
    assert names(plans) == ["embed", "layers.0", "layers.1", "layers.2", "root"]
    assert owner(plans)["embed.weight"] == "embed" and "head.weight" not in owner(plans)


def test_experts_do_not_split_a_block():
    assert names(find_units(Gpt(MixtureBlock), threshold_numel=LARGE)) == ["layers.0", "layers.1", "layers.2", "root"]


def test_a_block_above_the_limit_splits_at_its_experts():
    model = Gpt(MixtureBlock, layers=2)
    plans = find_units(model, threshold_numel=39, max_unit_bytes=160)
    inner = [f"layers.{k}{rest}" for k in range(2) for rest in ("", *(f".experts.{e}" for e in range(4)))]
    assert names(plans) == ["embed", *inner, "head", "root"]
    assert owner(plans)["layers.0.norm.weight"] == "layers.0"


def test_a_unit_that_cannot_be_split_is_named_with_the_smallest_budget():
    with pytest.raises(CapacityError, match=r"unit 'embed' \(Embedding\) has 160 B.*smallest budget that works is 160 bytes"):
        find_units(Gpt(), threshold_numel=39, max_unit_bytes=150)
    find_units(Gpt(), threshold_numel=39, max_unit_bytes=160)


def test_sizes_count_the_engines_dtype():
    cast = lambda name, dtype: torch.bfloat16  # noqa: E731
    find_units(Gpt(), threshold_numel=39, max_unit_bytes=80, cast=cast)
    with pytest.raises(CapacityError):
        find_units(Gpt(), threshold_numel=39, max_unit_bytes=79, cast=cast)


def test_a_sequential_of_stages_is_split_at_the_repeated_one():
    stages = nn.Sequential(nn.Embedding(10, 4), nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(4, 10))
    assert names(find_units(stages, threshold_numel=LARGE)) == ["0", "1.0", "1.1", "1.2", "2"]


def test_repeated_sequentials_are_units_as_a_whole():
    mlp = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))  # noqa: E731
    model = nn.Sequential(*[mlp() for _ in range(3)])
    assert names(find_units(model, threshold_numel=LARGE)) == ["0", "1", "2"]


def test_lists_of_lists_are_split_at_what_can_be_called():
    ups = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
    assert names(find_units(nn.ModuleDict({"ups": ups}), threshold_numel=LARGE)) == ["ups.0.0", "ups.0.1", "ups.1.0", "ups.1.1"]


def test_a_list_of_one_is_no_repetition():
    assert names(find_units(Gpt(layers=1), threshold_numel=LARGE)) == ["root"]


def test_parameter_lists_are_never_units_since_nobody_calls_them():
    model = nn.Module()
    model.many = nn.ParameterList([torch.zeros(100) for _ in range(3)])
    assert names(find_units(model, threshold_numel=10)) == ["root"]


def test_classes_by_name():
    plans = find_units(Gpt(MixtureBlock), threshold_numel=LARGE, classes=["Linear"])
    assert names(plans) == [*(f"layers.{k}.experts.{e}" for k in range(3) for e in range(4)), "head", "root"]
    with pytest.raises(ConfigError, match=r"units\.classes names Blok,.*Embedding, Gpt, LayerNorm, Linear"):
        find_units(Gpt(), threshold_numel=LARGE, classes=["Blok"])


def test_a_function_decides_alone():
    plans = find_units(Gpt(), threshold_numel=1, function=lambda name, module: name in ("layers.0", "layers.1.linear"))
    assert names(plans) == ["layers.0", "layers.1.linear", "root"]


def test_shared_modules_are_counted_once():
    model = Gpt()
    model.layers[2] = model.layers[0]
    plans = find_units(model, threshold_numel=LARGE)
    assert names(plans) == ["layers.0", "layers.1", "root"]


def test_units_carry_layouts_in_the_engines_dtypes():
    model = Gpt()
    model.layers[0].norm.requires_grad_(False)
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    cast = lambda name, dtype: torch.float32 if "norm" in name else torch.bfloat16  # noqa: E731
    units = make_units(find_units(model, threshold_numel=LARGE), cast=cast, world_size=2)
    assert [unit.index for unit in units] == [0, 1, 2, 3] and [unit.layout.index for unit in units] == [0, 1, 2, 3]
    assert [(flat.dtype, flat.trainable, [slot.name for slot in flat.slots]) for flat in units[0].layout.flats] == [
        (torch.float32, False, ["layers.0.norm.weight", "layers.0.norm.bias"]),
        (torch.bfloat16, True, ["layers.0.linear.weight", "layers.0.linear.bias"]),
    ]
    assert torch.int8 in {flat.dtype for flat in units[-1].layout.flats}
    assert all(flat.numel % 2 == 0 and flat.world_size == 2 for unit in units for flat in unit.layout.flats)
    assert units[-1].is_root and not units[0].is_root


TREES = st.recursive(
    st.sampled_from(["linear", "norm", "relu"]),
    lambda inner: st.tuples(st.sampled_from(["list", "sequential", "dict"]), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=20,
)


def grow(tree):
    if isinstance(tree, str):
        return {"linear": lambda: nn.Linear(3, 3), "norm": lambda: nn.LayerNorm(2), "relu": nn.ReLU}[tree]()
    kind, children = tree
    grown = [grow(child) for child in children]
    if kind == "dict":
        return nn.ModuleDict({str(index): child for index, child in enumerate(grown)})
    return nn.ModuleList(grown) if kind == "list" else nn.Sequential(*grown)


@given(TREES, st.integers(0, 20), st.one_of(st.none(), st.integers(48, 200)))
def test_every_parameter_is_in_exactly_one_unit(tree, threshold_numel, max_unit_bytes):
    model = nn.ModuleDict({"top": grow(tree)})
    try:
        plans = find_units(model, threshold_numel=threshold_numel, max_unit_bytes=max_unit_bytes)
    except CapacityError:
        assert max_unit_bytes is not None
        return
    found = [param for plan in plans for param in plan.params]
    assert len(found) == len(set(found))
    assert set(found) == set(model.parameters())
    named = dict(model.named_parameters())
    for plan in plans:
        assert plan.params and all(named[name] is param for name, param in zip(plan.names, plan.params, strict=True))
        assert set(plan.params) <= set(plan.module.parameters())
        assert plan.module is model or not isinstance(plan.module, (nn.ModuleList, nn.ModuleDict))
        assert max_unit_bytes is None or sum(param.nbytes for param in plan.params) <= max_unit_bytes
    assert names(plans).count("root") <= 1 and (not plans or "root" not in names(plans)[:-1])
