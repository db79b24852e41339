"""In which order a step comes to the units."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from engines import step
from models import tiny_gpt
from replay.replay_rig import configured, logged, opened

import infinity
from infinity.kinds import Group
from infinity.replay.order import backward_turns, forward_order
from infinity.runtime.units import find_units, make_units


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(4))
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.outer, self.scale = nn.Linear(4, 4), Outer(), nn.Parameter(torch.zeros(4))


def names(units):
    return [unit.name for unit in units]


def test_a_unit_around_others_comes_before_them_both_ways_and_its_gradients_go_down_after_theirs():
    chosen = {"first", "outer", "outer.inner.0", "outer.inner.1"}
    units = make_units(find_units(Nested(), threshold_numel=1, function=lambda name, module: name in chosen))
    assert names(forward_order(units)) == ["root", "first", "outer", "outer.inner.0", "outer.inner.1"]
    turns = backward_turns(units)
    assert names(turn.unit for turn in turns) == ["root", "outer", "outer.inner.1", "outer.inner.0", "first"]
    assert [names(turn.finished) for turn in turns] == [[], [], ["outer.inner.1"], ["outer.inner.0", "outer"], ["first", "root"]]


def test_a_model_of_one_unit_has_one_turn():
    (unit,) = make_units(find_units(nn.Linear(4, 4), threshold_numel=1000))
    (turn,) = backward_turns([unit])
    assert turn.unit is unit and turn.finished == (unit,)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_and_the_update_come_in_the_order_of_an_engine(tmp_path, tied):
    def build():
        return tiny_gpt(tied=tied)

    config = configured(tmp_path)
    with infinity.initialize(build, config) as engine:
        step(engine, 2)
        with logged() as trained:
            step(engine)
    _, replay = opened(config, build)
    with replay:
        replay.lay_out()
        with logged() as replayed:
            replay.step("step 1")
    kinds = [(name, group) for name in ("fetch", "write_back") for group in Group if (name, group) != ("fetch", Group.PARAM)]
    for name, group in kinds:
        theirs, ours = ([key for did, key in log if did == name and key.group is group] for log in (trained, replayed))
        assert ours == theirs and ours, f"{name} {group}"


def test_parameters_come_forwards_and_then_backwards(tmp_path):
    found, replay = opened(configured(tmp_path))
    with replay:
        replay.lay_out()
        with logged() as log:
            replay.step("step 1")
    fetched = [key for name, key in log if name == "fetch" and key.group is Group.PARAM]
    half = len(fetched) // 2
    forward = [unit.index for unit in forward_order(found.units)]
    assert list(dict.fromkeys(key.unit for key in fetched[:half])) == forward
    assert list(dict.fromkeys(key.unit for key in fetched[half:])) == forward[:1] + forward[:0:-1]
    assert set(fetched[:half]) == set(fetched[half:]) and len(set(fetched)) == half
