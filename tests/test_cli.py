"""The commands as people type them, from the README, at toy size."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors import safe_open
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.config import load_config, write_commented
from infinity.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

TOY = {"/mnt/nvme0": "{disk}", "train.steps=100": "train.steps=3", "step-100": "step-3", "train.steps=200": "train.steps=5", "step-200": "step-5"}
TOY |= {"train.steps=150": "train.steps=4", "layers=48, heads=32, width=4096, context=1024": "layers=3, heads=2, width=32, context=32"}
TOY |= {"length=1024": "length=32", '"32GiB"': '"64MiB"'}


def as_toy(text: str, disk: Path) -> str:
    for large, small in TOY.items():
        text = text.replace(large, small.format(disk=disk))
    return text


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def infinity(*words: str, answer: str = "") -> Result:
    """The command in this process and this working directory."""
    return CliRunner().invoke(app, words, input=answer, prog_name="infinity")


def write_config(**changes: object) -> None:
    settings = {
        "device": "cpu",
        "nvme.paths": ["disk"],
        "budgets.cpu": "64MiB",
        "placement.param": "nvme",
        "placement.optimizer": "nvme",
        "train.model": "gpt:build_toy",
        "train.data": "gpt:data",
        "train.steps": 3,
        "train.batch_size": 2,
        "train.sequence_length": 32,
        "train.log_every": 1,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in (settings | changes).items()]
    Path("run.toml").write_text(write_commented(load_config({}, words)), encoding="utf-8")


def test_the_commands_of_the_readme_work_in_their_order(example_folder):
    block, *_ = blocks("sh")  # the others are run by cli/test_io.py, cli/test_replay.py and cli/test_tune.py
    lines = as_toy(block, example_folder / "disk").splitlines()
    assert len(lines) >= 7
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        assert name == "infinity"
        done = infinity(*words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert (example_folder / "again" / "step-4").is_dir()
    assert (example_folder / "runs" / "step-5").is_dir()
    assert not list((example_folder / "disk").rglob("*.safetensors"))


def test_the_ten_lines_of_the_readme_work(example_folder):
    (block,) = blocks("python")
    names: dict[str, Any] = {}
    exec(as_toy(block, example_folder / "disk") + "        break\n", names)
    assert names["engine"].global_step == 1
    assert names["loss"].item() == pytest.approx(math.log(256), abs=0.5)


def test_a_run_reports_its_lanes_and_leaves_its_files(example_folder):
    write_config()
    done = infinity("train", "run.toml")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^step 3  loss \d\.\d+ .* tokens/s .*nvme-read .* stalled \d+%$", done.stdout, flags=re.MULTILINE)
    assert "nvme-write" in done.stdout and "exposed" in done.stdout
    lines = [json.loads(line) for line in (example_folder / "runs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["bytes"]["nvme-read"] > 0 and line["bytes"]["nvme-write"] > 0 for line in lines)
    trace = json.loads((example_folder / "runs" / "trace.json").read_text())
    assert {"nvme-read", "adam"} <= {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}


def test_a_second_run_of_a_finished_one_says_how_to_go_on(example_folder):
    write_config()
    infinity("train", "run.toml")
    again = infinity("train", "run.toml")
    assert again.exit_code == 0, again.stderr
    assert "already has all 3 steps" in again.stdout


def test_ctrl_c_stops_after_the_step_with_everything_saved_and_closed(example_folder):
    write_config(**{"train.steps": 100_000})
    command = [sys.executable, "-m", "infinity", "train", "run.toml"]
    with subprocess.Popen(command, cwd=example_folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 2 "))
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    (checkpoint,) = (example_folder / "runs").glob("step-*")
    assert f"saved in {checkpoint}. The same command goes on from there." in said
    steps = int(checkpoint.name.removeprefix("step-"))
    done = infinity("train", "run.toml", "--set", f"train.steps={steps + 1}")
    assert done.exit_code == 0, done.stderr
    assert f"going on from step {steps} of {steps + 1}" in done.stdout


def losses(output: str) -> dict[int, float]:
    lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def test_a_resumed_run_continues_to_the_digit(example_folder):
    write_config(**{"train.warmup_steps": 4})  # so that a wrong learning rate would show
    for steps, output in ((4, "whole"), (2, "halves"), (4, "halves")):
        settings = (f"train.steps={steps}", f"train.output={output}", f"store.run={output}")
        done = infinity("train", "run.toml", *[part for word in settings for part in ("--set", word)])
        assert done.exit_code == 0, done.stderr
    assert losses("whole") == losses("halves")


def test_exported_weights_are_plain_and_tied_ones_stand_once(example_folder):
    write_config()
    infinity("train", "run.toml")
    done = infinity("export", "runs/step-3", "weights")
    assert done.exit_code == 0, done.stderr
    names: list[str] = []
    for path in sorted((example_folder / "weights").glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            names += tensors.keys()
    assert len(names) == len(set(names))
    assert ("embedding.weight" in names) != ("head.weight" in names)
    assert "blocks.2.down.weight" in names


def test_a_plan_builds_nothing(example_folder):
    write_config()
    done = infinity("train", "run.toml", "--plan")
    assert done.exit_code == 0, done.stderr
    assert "nvme" in done.stdout
    assert not list((example_folder / "disk").rglob("*.safetensors")) and not (example_folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train"], 2, "CONFIG"),
        (["trian", "run.toml"], 2, "No such command"),
        (["train", "absent.toml"], 2, "absent.toml: no such file"),
        (["train", "run.toml", "--set", "nvme.block_sise=1"], 2, "nvme.block_sise: no such key; did you mean block_size?"),
        (["train", "run.toml", "--model", "gpt:bild"], 2, "has no function 'bild'; it has"),
        (["train", "run.toml", "--model", "gpt.build"], 2, "write module:function"),
        (["train", "run.toml", "--resume", "absent"], 2, "--resume absent: no such checkpoint"),
        (["train", "run.toml", "--set", "budgets.cpu=1MiB"], 1, "budgets.cpu"),
        (["train", "run.toml", "--set", 'nvme.paths=["absent"]'], None, "absent"),
        (["init", "run.toml"], 2, "exists and is left as it is"),
        (["init", "run.json"], 2, "name it run.toml"),
        (["export", "absent", "weights"], None, "absent"),
        (["clean", "disk", "--yes"], 2, "is not the directory of a run"),
    ],
)
def test_what_cannot_work_is_one_line_and_an_exit_code(example_folder, words, code, said):
    write_config()
    done = infinity(*words)
    assert done.exit_code in ((1, 2) if code is None else (code,)), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_lets_the_error_through_with_its_traceback(example_folder):
    done = infinity("train", "absent.toml", "--debug")
    assert done.exit_code == 1
    assert isinstance(done.exception, ConfigError)


def test_clean_asks_and_then_removes_only_the_run(example_folder):
    write_config()
    infinity("train", "run.toml")
    (example_folder / "disk" / "mine.txt").write_text("keep")
    assert list((example_folder / "disk").rglob("*.safetensors"))
    asked = infinity("clean", "run.toml", answer="n\n")
    assert "nothing was removed" in asked.stdout
    assert list((example_folder / "disk").rglob("*.safetensors"))
    done = infinity("clean", "run.toml", "--yes")
    assert done.exit_code == 0, done.stderr
    assert not list((example_folder / "disk").rglob("*.safetensors"))
    assert (example_folder / "disk" / "mine.txt").exists() and (example_folder / "runs" / "step-3").is_dir()


def test_help_is_there_for_every_command(example_folder):
    for words in ([], ["train"], ["doctor"], ["init"], ["export"], ["clean"]):
        done = infinity(*words, "--help")
        assert done.exit_code == 0 and "Usage: infinity" in done.stdout


def test_resuming_beside_a_later_checkpoint_is_refused(example_folder):
    write_config(**{"train.save_every": 2})
    assert infinity("train", "run.toml").exit_code == 0
    refused = infinity("train", "run.toml", "--resume", "runs/step-2", "--set", "store.run=again")
    assert refused.exit_code == 2 and "step-3" in refused.stderr and "train.output" in refused.stderr
