"""Nested values come back equal, of the same type, to the bit."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.arrays import Arrays, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.checkpoint import from_json, load, save, to_json
from infinity.errors import CheckpointError


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return bool(a == b)


TENSOR_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    values = torch.tensor(draw(st.integers(0, 255))).to(dtype).expand(shape)
    return values.contiguous().t() if len(shape) == 2 else values


arrays = st.sampled_from(["f4", ">f8", "i2", "?", "u8", "c16", "U3", "S2", "M8[s]"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape).astype(dtype))
)
scalars = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("ab"), np.str_(""), np.datetime64(5, "s")])
atoms = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), bytearray(b"x"), frozenset({1, "a"}), {2, 3}])
    | tensors() | arrays | scalars
)  # fmt: skip
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=9))
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@given(values)
def test_any_nested_value_comes_back_through_json(value: Any) -> None:
    assert same(value, from_json(json.loads(json.dumps(to_json(value), allow_nan=False))))


@settings(max_examples=25)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_any_registered_state_comes_back_through_a_checkpoint(tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any]) -> None:
    directory = tmp_path_factory.mktemp("values") / "c"
    save(directory, Arrays({}), extra, 0)
    assert same(extra, load(directory, Arrays({})))


@pytest.mark.parametrize("key", ["%", "%tuple", "a|b", "", "\ud800", "ä"])
def test_keys_that_look_like_marks_are_keys(key: str) -> None:
    assert from_json(to_json({key: 1, "x": {key: (2,)}})) == {key: 1, "x": {key: (2,)}}


def test_generators_of_random_numbers_go_on_where_they_were() -> None:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    wanted = random.random(), np.random.random(), torch.rand(3)
    back = from_json(json.loads(json.dumps(to_json(states))))
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    got = random.random(), np.random.random(), torch.rand(3)
    assert got[:2] == wanted[:2] and torch.equal(got[2], wanted[2])


def schedulers() -> list[torch.optim.lr_scheduler.LRScheduler]:
    lr = torch.optim.lr_scheduler

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=0.1)

    first = optimizer()
    return [
        lr.StepLR(optimizer(), 3),
        lr.MultiStepLR(optimizer(), [2, 2, 5]),
        lr.CosineAnnealingWarmRestarts(optimizer(), 4),
        lr.OneCycleLR(optimizer(), 0.2, 20),
        lr.LambdaLR(optimizer(), lambda step: 0.9**step),
        lr.ReduceLROnPlateau(optimizer()),
        lr.SequentialLR(first, [lr.LinearLR(first), lr.ExponentialLR(first, 0.9)], [2]),
    ]


def test_schedulers_of_torch_are_kept() -> None:
    for scheduler in schedulers():
        state = scheduler.state_dict()
        assert same(state, from_json(to_json(state))), type(scheduler)


class Colour(IntEnum):
    RED = 1


Point = __import__("collections").namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: 0, "builtins.function"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (Path("x"), "PosixPath"),
        (np.array([object()]), "numpy.ndarray"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_needs_pickle_is_refused_by_its_path(value: object, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"run\.registered\.loader\.1 is a .*{name}"):
        to_json({"run": {"registered": {"loader": [0, value]}}})


def test_a_value_inside_itself_is_refused() -> None:
    value: list[object] = [1]
    value.append({"again": value})
    with pytest.raises(CheckpointError, match=r"1\.again contains itself"):
        to_json(value)


def test_one_value_in_two_places_is_no_cycle() -> None:
    part = [1, 2]
    assert from_json(to_json([part, part])) == [part, part]


@pytest.mark.parametrize("damaged", [{"%nothing": 1}, {"%tuple": 3}, {"%float": "x"}, {"%dtype": "float99"}, {"%tensor": {}}])
def test_json_that_was_not_made_here_is_refused(damaged: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_json(damaged)
