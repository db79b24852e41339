"""docs/format.md tells the truth: its reader reads what the store writes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from storage.storage_rig import SPECS, UNITS, contents, fill

DOC = Path(__file__).resolve().parents[2] / "docs" / "format.md"


def reader_source() -> str:
    (source,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    return source


def test_the_reader_is_about_forty_lines():
    lines = [line for line in reader_source().splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.fixture
def published(open_store, disk, pools):
    store = open_store(disk / "a", disk / "b")
    store.build(SPECS, UNITS)
    fill(store, SPECS, pools)
    store.publish(3, {})
    return store


@pytest.mark.parametrize("where", ["a", "b"])
def test_the_reader_yields_every_part_bit_for_bit(published, disk, pools, where):
    names: dict[str, object] = {"__name__": "reader"}
    exec(reader_source(), names)
    read = {name: data for name, _, _, data in names["read_run"](disk / where / "infinity" / "test")}  # type: ignore[operator]
    assert sorted(read) == sorted(part.name for spec in SPECS for part in spec.parts)
    for spec in SPECS:
        assert b"".join(read[part.name] for part in spec.parts) == contents(published, spec, pools).numpy().tobytes()


def test_the_reader_runs_as_a_script_and_refuses_a_dirty_run(published, disk, pools, tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(reader_source())
    command = [sys.executable, str(script), str(disk / "a" / "infinity" / "test")]
    assert "h.0|f0|c0|master F32 [4096] 16384\n" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fill(published, SPECS[:1], pools)
    assert "stopped while being overwritten after step 3" in subprocess.run(command, capture_output=True, text=True).stderr
