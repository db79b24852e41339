"""`infinity io --pattern=training` as people type it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import small_disk
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.config import load_config, write_commented
from infinity.replay import Replay

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PHASES = ("forward", "backward", "update")


def infinity(*words):
    return CliRunner().invoke(app, words, prog_name="infinity")


def replay(*words, config="run.toml"):
    return infinity("io", "--pattern=training", f"--config={config}", *words)


@pytest.fixture
def folder(example_folder):
    """With a configuration in it, and the drive's rates known."""
    write_config()
    return example_folder


def write_config(**changes):
    settings = {"device": "cpu", "budgets.cpu": "64MiB", "train.model": "gpt:build_toy", "optimizer.chunk_size": "64KiB"}
    settings |= {f"placement.{group}": "nvme" for group in ("param", "grad", "optimizer")}
    words = [f"{key}={json.dumps(value)}" for key, value in (settings | changes).items()]
    words.append('nvme.paths=[{path="disk", read_rate=2e9, write_rate=1e9}]')
    Path("run.toml").write_text(write_commented(load_config({}, words)), encoding="utf-8")


def left(folder):
    """What is not the user's own."""
    return sorted(str(entry.relative_to(folder)) for entry in (folder / "disk").rglob("*"))


def test_the_command_of_the_readme_works(folder):
    (line,) = re.findall(r"```sh\n(infinity io --pattern=training .*)\n```", README)
    write_config(**{f"placement.{group}": "auto" for group in ("param", "grad", "optimizer")})
    done = infinity(*shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert "replayed, I/O alone: 3 steps, gpt:build_toy" in done.stdout and left(folder) == []


def test_a_report_has_phases_paths_and_the_plan(folder, monkeypatch):
    monkeypatch.setattr("infinity.replay.report.SHORT_S", math.inf)
    done = replay("--steps=2")
    assert done.exit_code == 0, done.output
    first, second, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"infinity io: training with run.toml replayed, I/O alone: 2 steps, gpt:build_toy, [\d,]+ parameters", first)
    assert second.startswith("block_size=1.00 MiB queue_depth=32 readers=1 writers=1, chunks of 16,384 elements")
    text = "\n".join(rest)
    assert "warning: the steps took" in text and "too short for a drive to settle" in text
    amount = r" +[\d.]+ [KM]iB +[\d.]+ [MG]B/s"
    assert re.search(rf"^forward +[\d.]+{amount} +- +-$", text, flags=re.MULTILINE)
    for row in ("backward", "update", "step"):
        assert re.search(rf"^{row} +[\d.]+{amount}{amount}$", text, flags=re.MULTILINE), row
    assert re.search(rf"^{re.escape(str(folder / 'disk'))} +100\.0% +[\d.]+ [MG]B/s +[\d.]+ [MG]B/s$", text, flags=re.MULTILINE)
    assert re.search(r"the plan expects.*nvme-read .* at 2\.00 GB/s, nvme-write .* at 1\.00 GB/s$", text, flags=re.MULTILINE)
    assert "a real step takes at least as long as the larger of its compute and" in text
    assert "laying out" in done.stderr and left(folder) == []


def test_json_adds_up(folder):
    done = replay("--steps=3", "--output-format=json", "--output=report.json", "--set", "train.accumulation=2")
    assert done.exit_code == 0 and not done.stdout, done.output
    table = json.loads(Path("report.json").read_text())
    assert (table["pattern"], table["config"], table["model"], table["accumulation"]) == ("training", "run.toml", "gpt:build_toy", 2)
    assert any("train.accumulation = 2" in warning for warning in table["warnings"])
    plan, steps, medians = table["plan"], table["steps"], table["medians"]
    assert plan["read_seconds"] == pytest.approx(plan["read_bytes"] / 2e9) and plan["write_seconds"] == pytest.approx(plan["write_bytes"] / 1e9)
    assert len(steps) == 3 and all(step["whole"] for step in steps)
    for key in ("read_bytes", "write_bytes"):
        for step in steps:
            assert step[key] == plan[key] == sum(step["phases"][phase][key] for phase in PHASES)
        assert medians["step"][key] == plan[key]
        assert sum(path[key] for path in table["paths"]) == 3 * plan[key]
    for name in PHASES:
        seconds = sorted(step["phases"][name]["seconds"] for step in steps)
        assert medians[name]["seconds"] == seconds[1] and medians[name]["count"] == 3
    for step in steps:
        assert step["seconds"] == pytest.approx(sum(step["phases"][name]["seconds"] for name in PHASES))
    assert sum(path["share"] for path in table["paths"]) == pytest.approx(1)


def test_what_is_no_disk_is_said(folder):
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    before = sorted(shm.rglob("*"))
    done = replay("--steps=1", "--set", 'nvme.paths=[{path="/dev/shm", read_rate=2e9, write_rate=1e9}]')
    assert done.exit_code == 0, done.output
    assert "warning: /dev/shm is tmpfs: memory, not a disk" in done.stdout
    assert sorted(shm.rglob("*")) == before


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--pattern=seq", "--config=run.toml"], 2, "error: --pattern=seq: choose training"),
        (["--pattern=training"], 2, "--pattern=training needs --config=CONFIG"),
        (["--config=run.toml"], 2, "--config belongs to --pattern=training"),
        (["--name=a", "--steps=2"], 2, "--steps belongs to --pattern=training"),
        (
            ["--pattern=training", "--config=run.toml", "--name=a"],
            2,
            "takes no fio jobs, the configuration says what is read and written: leave out --name=a",
        ),
        (["--pattern=training", "--config=run.toml", "--bs=4k"], 2, "leave out --bs=4k"),
        (["--pattern=training", "--config=run.toml", "job.fio"], 2, "leave out job.fio"),
        (["--pattern=training", "--config=run.toml", "--destroy-data"], 2, "leave out --destroy-data"),
        (["--pattern=training", "--config=run.toml", "--steps=0"], 2, "--steps"),
        (["--pattern=training", "--config=absent.toml"], 2, "absent.toml: no such file"),
        (["--pattern=training", "--config=run.toml", "--set", "nvme.dept=1"], 2, "nvme.dept: no such key"),
        (["--pattern=training", "--config=run.toml", "--model=gpt:bild"], 2, "has no function 'bild'; it has"),
        (["--pattern=training", "--config=run.toml", "--model=absent:build"], 2, "no module 'absent'"),
        (["--pattern=training", "--config=run.toml", "--set", 'nvme.paths=["absent"]'], 2, "absent does not exist"),
        (["--pattern=training", "--config=run.toml", "--set", 'nvme.paths=["gpt.py"]'], 2, "gpt.py is not a directory"),
        (["--pattern=training", "--config=run.toml", "--set", 'nvme.paths=[{path="disk", max_bytes="1MiB"}]'], 1, "max_bytes 1048576. Add a path"),
        (["--pattern=training", "--config=run.toml", "--set", "budgets.cpu=1KiB"], 1, "budgets.cpu"),
        (["--pattern=training", "--config=run.toml", "--output=absent/report"], 2, "--output=absent/report: cannot be written"),
        (["--pattern=training", "--config=run.toml", "--output-format=terse"], 2, "choose normal or json"),
    ],
)
def test_what_cannot_work_is_one_line_an_exit_code_and_nothing_left(folder, words, code, said):
    done = infinity("io", *words)
    assert done.exit_code == code, done.output
    assert said in done.stderr and "Traceback" not in done.stderr and not done.stdout
    assert left(folder) == []


def test_a_file_in_the_place_of_the_runs_is_named_and_stays(folder):
    (folder / "disk" / "infinity").write_text("mine")
    done = replay("--set", "store.resume=never")
    assert done.exit_code == 2 and f"{folder / 'disk' / 'infinity'} is a file" in done.stderr, done.output
    assert (folder / "disk" / "infinity").read_text() == "mine"


def test_a_configuration_without_a_model_says_how_to_name_one(folder):
    Path("bare.toml").write_text('device = "cpu"\n[nvme]\npaths = ["disk"]\n')
    done = replay(config="bare.toml")
    assert done.exit_code == 2 and "train.model is not set" in done.stderr and "--model" in done.stderr


@pytest.mark.parametrize(
    ("paths", "said"), [('["disk"]', "pin states there, as with --set placement.optimizer=nvme"), ("[]", "name a directory in nvme.paths")]
)
def test_a_plan_without_nvme_is_refused_with_the_way_out(folder, paths, said):
    Path("memory.toml").write_text(f'device = "cpu"\n[budgets]\ncpu = "64MiB"\n[nvme]\npaths = {paths}\n[train]\nmodel = "gpt:build_toy"\n')
    done = replay(config="memory.toml")
    assert done.exit_code == 2, done.output
    assert "memory.toml: the plan puts nothing on NVMe" in done.stderr and "in cpu)" in done.stderr and said in done.stderr
    assert left(folder) == []


@pytest.fixture
def small(folder):
    """A drive of 1 MiB."""
    try:
        with small_disk(folder / "small", "1M") as disk:
            yield disk
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")


def test_a_full_disk_is_known_before_anything_is_written(small):
    done = replay("--set", f'nvme.paths=[{{path="{small}", read_rate=2e9, write_rate=1e9}}]')
    assert done.exit_code == 1 and f"{small} has 1048576 bytes free" in done.stderr, done.output
    assert list(small.iterdir()) == []


def test_a_read_only_path_is_refused(small):
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    done = replay("--set", f'nvme.paths=["{small}"]')
    assert done.exit_code == 2 and f"{small} is not writable for this user, or mounted read-only" in done.stderr, done.output


def test_what_the_model_prints_does_not_spoil_the_report(folder):
    Path("loud.py").write_text("import gpt\nprint('imported')\ndef build():\n    print('built')\n    return gpt.build_toy()\n")
    done = replay("--model=loud:build", "--steps=1", "--output-format=json")
    sys.modules.pop("loud", None)
    assert json.loads(done.stdout)["model"] == "loud:build"
    assert "imported" in done.stderr and "built" in done.stderr


# ---- Ctrl-C ----


@pytest.mark.parametrize(("phase", "rows"), [("forward", ["forward"]), ("update", [*PHASES, "step"])])
def test_ctrl_c_ends_after_the_running_phase_with_a_report(folder, monkeypatch, phase, rows):
    real = getattr(Replay, f"_run_{phase}")

    def interrupted(self, beat):
        os.kill(os.getpid(), signal.SIGINT)
        real(self, beat)

    monkeypatch.setattr(Replay, f"_run_{phase}", interrupted)
    done = replay("--steps=100")
    assert done.exit_code == 130, done.output
    assert re.findall(r"^(forward|backward|update|step) ", done.stdout, flags=re.MULTILINE) == rows
    whole = "1 step," if "step" in rows else "0 steps and a part of one,"
    assert f"I/O alone: {whole}" in done.stdout and left(folder) == []


def test_ctrl_c_before_anything_is_measured_leaves_nothing(folder, monkeypatch):
    real = Replay.lay_out

    def interrupted(self, is_wanted):
        os.kill(os.getpid(), signal.SIGINT)
        real(self, is_wanted)

    monkeypatch.setattr(Replay, "lay_out", interrupted)
    done = replay()
    assert done.exit_code == 130 and not done.stdout and left(folder) == []


def test_a_replay_says_what_a_killed_one_left(folder):
    name = "replay-" + "0" * 32
    directory = folder / "disk" / "infinity" / name
    directory.mkdir(parents=True)
    (directory / "u00000-param-r0-g0.safetensors").write_bytes(bytes(1 << 20))
    done = replay("--steps=1")
    assert done.exit_code == 0 and f"removed {directory} (1.00 MiB), which a killed replay had left" in done.stderr
    assert left(folder) == []


def test_help_has_it_in_words_of_fio_users(folder):
    done = infinity("io", "--help")
    assert "In place of jobs, --pattern=training --config=CONFIG" in done.stdout
    for name in ("pattern", "config", "set", "model", "steps"):
        assert re.search(rf"--{name}\b", done.stdout), name
