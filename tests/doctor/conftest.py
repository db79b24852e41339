"""A machine of files: what the kernel would say, under tmp_path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from infinity.doctor.system import System

MakeSystem = Callable[[Mapping[str, object]], System]


@pytest.fixture
def machine(tmp_path: Path) -> MakeSystem:
    """machine({"proc/sys/fs/aio-nr": 3}) -> a System that says so and nothing else."""

    def make(files: Mapping[str, object]) -> System:
        for name, text in files.items():
            file = tmp_path / "machine" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return System(proc=tmp_path / "machine" / "proc", sys=tmp_path / "machine" / "sys")

    return make
