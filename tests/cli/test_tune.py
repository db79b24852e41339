"""`infinity tune` as people call it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.config import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--size", "128m", "--runtime", "10ms", "--bs", "256k,1m", "--iodepth", "4", "--workers", "1", "--rounds", "2"]


def tune(*words):
    return CliRunner().invoke(app, ["tune", *map(str, words)])


def test_the_command_of_the_readme_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("infinity.tune.choice.MOST_SPREAD", 1000.0)
    (line,) = re.findall(r"```sh\ninfinity tune (.*)\n```", (ROOT / "README.md").read_text(encoding="utf-8"))
    for drive in ("nvme0", "nvme1"):
        (tmp_path / drive).mkdir()
    done = tune(*shlex.split(line.replace("/mnt/", f"{tmp_path}/")), *QUICK)
    assert done.exit_code == 0, done.output
    assert len(load_config("tuned.toml").nvme.paths) == 2


def test_a_sweep_ends_in_a_configuration_a_picture_and_json(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.tune.choice.MOST_SPREAD", 1000.0)  # trials of 10 ms say nothing, and need not
    disk, output = tmp_path / "disk", tmp_path / "tuned.toml"
    disk.mkdir()
    done = tune(disk, "--output", output, *QUICK)
    assert done.exit_code == 0, done.output
    loaded = load_config(output).nvme
    assert [entry.path for entry in loaded.paths] == [str(disk)] and loaded.paths[0].weight > 0
    raw = json.loads(output.with_suffix(".json").read_text())
    assert len(raw["paths"][0]["trials"]) == 6 and raw["conditions"]["rounds"] == 2
    assert raw["choice"]["setting"]["block_bytes"] == loaded.block_size
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "->" in done.stdout and "GB/s" in done.stdout and not list(disk.iterdir())
    again = tune(disk, "--output", output, *QUICK)
    assert again.exit_code == 2 and "exists" in again.output


def test_what_the_spread_does_not_support_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.tune.choice.MOST_SPREAD", -1.0)
    output = tmp_path / "tuned.toml"
    done = tune(tmp_path, "--output", output, *QUICK)
    assert done.exit_code == 1 and "nothing is recommended" in done.stdout
    assert not output.exists() and output.with_suffix(".json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bs", "5k"], "multiples of 4096"),
        (["--bs", "1x"], "--bs=1x"),
        (["--iodepth", "0"], "--iodepth=0"),
        (["--workers", "17"], "between 1 and 16"),
        (["--bs", "64m", "--iodepth", "64"], "Lower one of them"),
        (["--runtime", "soon"], "--runtime=soon"),
        (["--size", "1m"], "--size=1m"),
        (["--output", "tuned.json"], "tuned.toml"),
        (["--output", "nowhere/tuned.toml"], "nowhere"),
    ],
)
def test_bad_words_are_named_before_anything_is_touched(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = tune(tmp_path, *words)
    assert done.exit_code == 2 and said in done.output, done.output
    assert not list(tmp_path.iterdir())


def test_bad_paths_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in tune("missing", *QUICK).output
    assert "named twice" in tune(".", tmp_path, *QUICK).output
    assert not list(tmp_path.iterdir())
