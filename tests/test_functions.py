"""Finding what `module:function` names, and saying what is there instead."""

from __future__ import annotations

import sys

import pytest

from infinity.errors import ConfigError
from infinity.functions import load_function


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "spec_probe.py").write_text("import os\nlimit = 3\ndef build(): return 'built'\ndef data(config, rank, world_size): return []\n")
    (tmp_path / "spec_broken.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "spec_raises.py").write_text("raise RuntimeError('in your module')\n")
    yield tmp_path
    for name in ("spec_probe", "spec_broken", "spec_raises"):
        sys.modules.pop(name, None)


def test_a_module_beside_the_configuration_is_found(folder):
    assert load_function("train.model", "spec_probe:build", [folder])() == "built"


def test_installed_modules_are_found():
    assert load_function("train.model", "os.path:join", [])("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, 'train.model is not set: name a function as train.model = "module:function" or with --model'),
        ("spec_absent:build", "no module 'spec_absent'"),
        ("spec_absent.sub:build", "no module 'spec_absent.sub'"),
        ("spec_probe:bild", "has no function 'bild'; it has build, data."),
        ("spec_probe:limit", "has no function 'limit'"),
    ],
)
def test_what_is_missing_is_named_with_what_is_there(folder, spec, said):
    with pytest.raises(ConfigError) as caught:
        load_function("train.model", spec, [folder])
    assert said in str(caught.value)


def test_an_error_inside_the_module_stays_the_users(folder):
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        load_function("train.model", "spec_broken:build", [folder])
    with pytest.raises(RuntimeError, match="in your module"):
        load_function("train.model", "spec_raises:build", [folder])
