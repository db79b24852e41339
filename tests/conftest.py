"""What all tests share: what their processes import, a reason where CUDA is missing, and that machines may be slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Processes that tests start import what the tests do: the package beside them, their own helpers, the caller's packages."""

settings.register_profile("infinity", deadline=None)
settings.load_profile("infinity")

torch.set_num_threads(1)  # the models are tiny: more threads wait for each other longer than they compute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_cuda = pytest.mark.skip(reason="needs CUDA, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_cuda)


@pytest.fixture
def example_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the example in it and a drive beside it."""
    example = ROOT / "examples" / "gpt.py"
    (tmp_path / "disk").mkdir()
    (tmp_path / "gpt.py").write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("gpt", None)
