"""The floors of the house: imports go down, never up, never in a circle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


floors = load_tool("floors")


def package(tmp_path: Path, **files: str) -> Path:
    """`storage__store="import x"` becomes infinity/storage/store.py."""
    root = tmp_path / "infinity"
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (root / "__init__.py").touch()
    return root


def test_every_import_of_the_package_goes_down():
    assert list(floors.violations(ROOT / "infinity")) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("storage__store", "from infinity.sharding.layout import Interval"),
        ("storage__store", "from ..sharding import layout"),
        ("storage__store", "def f():\n    import infinity.engine"),
        ("storage__store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from infinity.optim import grads"),
        ("storage__store", "from infinity import cli"),
        ("storage__store", "from infinity import initialize"),
        ("config__load", "from infinity.storage import slabs"),
        ("runtime__hooks", "import infinity"),
    ],
)
def test_an_import_from_above_is_named_with_its_line(tmp_path, module, text):
    (problem,) = floors.violations(package(tmp_path, sharding__layout="", optim__grads="", storage__slabs="", **{module: text}))
    assert f"{module.split('__')[1]}.py:{len(text.splitlines())}:" in problem
    assert "pass a value or a callable down" in problem


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("optim__pipeline", "from infinity.storage.store import Store"),
        ("storage__store", "from infinity.storage.slabs import SlabPool\nfrom .slabs import SlabPool"),
        ("storage__store", "from infinity import _native, kinds"),
        ("storage__store", "import torch\nfrom collections import abc"),
        ("runtime__hooks", "from infinity.planner import plan"),
    ],
)
def test_imports_from_below_and_beside_are_fine(tmp_path, module, text):
    assert list(floors.violations(package(tmp_path, **{module: text}))) == []


def test_siblings_in_a_circle_are_named(tmp_path):
    root = package(tmp_path, storage__a="from .b import x", storage__b="from infinity.storage import c", storage__c="import infinity.storage.a")
    (problem,) = floors.violations(root)
    assert "circle" in problem
    assert all(f"infinity.storage.{name}" in problem for name in "abc")


def test_a_module_without_a_floor_is_named(tmp_path):
    problems = list(floors.violations(package(tmp_path, attic__old="")))
    assert len(problems) == 2  # the folder and the file in it
    assert all("infinity.attic" in problem and "add it to FLOORS" in problem for problem in problems)
