"""`infinity train` over several processes: they agree on everything, and one of them talks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest
import torch
from engines import known_rates
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from infinity.config import load_config
from infinity.kinds import Lane, Tier
from tests.ranks import job, run_ranks, torchrun

STEPS = 3
UNITS = 4
"""Three blocks, and a root of what is left."""

PROBE = """
import logging
import warnings
from pathlib import Path

import gpt
import torch

def windows(config, rank, world_size):
    text = torch.frombuffer(bytearray(Path(gpt.__file__).read_bytes()), dtype=torch.uint8)
    return gpt.Windows(text, batch_size=config.train.batch_size, length=config.train.sequence_length, rank=rank, world_size=world_size)

def talks(config, rank, world_size):
    warnings.warn("a warning")
    logging.getLogger("user").warning("a log, drawing from seed %d", torch.initial_seed())
    return windows(config, rank, world_size)

def empty(config, rank, world_size):
    return [] if rank == 1 else windows(config, rank, world_size)

def joins(config, rank, world_size):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return windows(config, rank, world_size)
"""

PROGRAM = """
import os
from pathlib import Path

import torch.distributed as dist

from infinity.cli.main import app

try:
    app()
finally:
    Path(f"rank-{os.environ['RANK']}-is-left").write_text(str(not dist.is_initialized()))
"""

CONFIG = f"""
device = "cpu"
budgets.cpu = "64MiB"
placement.param = "nvme"
placement.optimizer = "nvme"
nvme.paths = ["disk"]
zero.timeout_s = 60
train.model = "gpt:build_toy"
train.data = "job_probe:talks"
train.steps = {STEPS}
train.accumulation = 2
train.batch_size = 2
train.sequence_length = 32
train.log_every = 1
train.output = "runs"
"""


@pytest.fixture
def folder(example_folder):
    (example_folder / "run.toml").write_text(CONFIG)
    (example_folder / "job_probe.py").write_text(PROBE)
    known_rates(example_folder / "disk")
    return example_folder


def command(rank, world_size, folder, *words):
    """(exit code, stdout, stderr) of one rank's command."""
    os.chdir(folder)
    done = CliRunner().invoke(app, ["train", "run.toml", *words], prog_name="infinity")
    return done.exit_code, done.stdout, done.stderr


def resting(folder):
    """Bytes on NVMe by the plan."""
    import gpt

    return infinity.plan(gpt.build_toy, load_config(folder / "run.toml")).resting(Tier.NVME)


def planned(rank, world_size, folder):
    return command(rank, world_size, folder, "--plan"), resting(folder)


def test_a_plan_over_ranks_is_that_of_one_of_them_and_told_once(folder):
    whole = resting(folder)
    (first, mine), (second, others) = run_ranks(planned, 2, folder)
    assert mine == others and whole / 2 <= mine < 1.05 * whole / 2, "padding apart"
    assert first[0] == 0 and first[1].startswith("each of 2 ranks has, in memory and files of its own:\n169,792 parameters on cpu")
    assert second == (0, "", "")


def test_a_wrong_key_is_one_error_and_the_exit_code_of_all(folder):
    codes, said, errors = zip(*run_ranks(command, 2, folder, "--set", "optimizer.lrr=2"), strict=True)
    assert codes == (2, 2) and said == ("", "")
    (error,) = filter(None, errors)
    assert error == f"error on rank {errors.index(error)}: run.toml: optimizer.lrr: no such key; did you mean lr?\n"


def test_a_checkpoint_that_is_missing_is_told_by_rank_0(folder):
    assert run_ranks(command, 2, folder, "--resume", "nowhere") == [(2, "", "error on rank 0: --resume nowhere: no such checkpoint.\n"), (1, "", "")]


def test_data_that_gives_nothing_on_one_rank_is_told_by_that_rank(folder):
    first, second = run_ranks(command, 2, folder, "--data", "job_probe:empty", "--set", "zero.timeout_s=4")
    assert second[:2] == (2, "") and second[2].startswith("error on rank 1: train.data: the iterable gives no batch")
    assert first[0] == 1 and first[2] == "", "that a rank is lost is no news then"


def train_by_hand(rank, world_size, folder):
    """(mean loss of each step, bytes that Adam passed over) of a loop as anybody writes it."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import gpt
    import job_probe  # type: ignore[import-not-found]

    config = load_config("run.toml", ["store.run=hand"])
    torch.manual_seed(config.train.seed)
    losses = []
    with infinity.initialize(gpt.build_toy, config) as engine:
        batches = iter(job_probe.windows(config, rank, world_size))
        for _ in range(config.train.steps):
            parts = []
            for _ in range(config.train.accumulation):
                loss = engine.model(**next(batches)) / config.train.accumulation
                loss.backward()
                parts.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(sum(parts))
        return losses, engine.timeline.moved_bytes()[Lane.ADAM]


def metrics(folder, output="runs"):
    return [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]


def check_metrics(steps, by_hand):
    """They are of all ranks together."""
    losses, adam_bytes = zip(*by_hand, strict=True)
    assert [step["loss"] for step in steps] == [sum(parts) / len(by_hand) for parts in zip(*losses, strict=True)]
    assert sum(step["bytes"]["adam"] for step in steps) == sum(adam_bytes)
    for step in steps:
        assert step["tokens_per_s"] * step["seconds"] == pytest.approx(len(by_hand) * 2 * 2 * 32)
        assert 0 <= step["stalled_share"] <= 1


def check_trace(folder, world_size):
    events = json.loads((folder / "runs" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"} == {f"rank {n}": n for n in range(world_size)}
    reduces = [[event["name"] for event in events if event["pid"] == rank and event["name"].startswith("reduce of")] for rank in range(world_size)]
    assert len(reduces[0]) == STEPS * 2 * UNITS and all(names == reduces[0] for names in reduces), "in each micro-step, and in one order"


def train_thrice(rank, world_size, folder):
    """By hand, by command, and one step more from the command's checkpoint."""
    by_hand, told = train_by_hand(rank, world_size, folder), command(rank, world_size, folder)
    words = ("--resume", f"runs/step-{STEPS}", "--set", "train.output=again", "--set", f"train.steps={STEPS + 1}", "--set", "store.run=again")
    return by_hand, told, command(rank, world_size, folder, *words)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_a_loop_by_hand_does_and_rank_0_tells_of_it(folder, world_size):
    by_hand, (first, *others), again = zip(*run_ranks(train_thrice, world_size, folder), strict=True)
    assert others == [(0, "", "")] * (world_size - 1)
    assert first[0] == 0 and "a warning" in first[2] and "a log" in first[2]
    assert "lanes of rank 0 over the last" in first[1] and f"finished step {STEPS} of {STEPS}, saved in {folder}/runs/step-{STEPS}" in first[1]
    check_metrics(metrics(folder), by_hand)
    check_trace(folder, world_size)

    onward = run_ranks(command, world_size, folder, "--log-all", "--set", f"train.steps={STEPS + 1}")
    for rank, (code, said, errors) in enumerate(onward):
        assert code == 0 and f"rank {rank}: a log, drawing from seed {rank}\n" in errors and "a warning" in errors
        assert f"rank {rank}: going on from step {STEPS} of {STEPS + 1}\n" in said
        assert all(line.startswith(f"rank {rank}: ") for line in (said + errors).splitlines())

    assert [code for code, *_ in again] == [0] * world_size
    assert metrics(folder, "again")[-1]["loss"] == metrics(folder)[STEPS]["loss"]


def wait_for_steps(folder, count):
    path, deadline = folder / "runs" / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stopped_at(folder):
    """The last step that was told of; the only checkpoint is of that."""
    (checkpoint,) = (folder / "runs").glob("step-*")
    step = len(metrics(folder))
    assert checkpoint.name == f"step-{step}"
    return step


def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step_and_the_command_goes_on(folder):
    with job(command, 2, folder, "--set", "train.steps=100000") as running:
        wait_for_steps(folder, 2)
        os.kill(running.processes[1].pid, signal.SIGTERM)
        first, second = (running.outcome(rank).value for rank in range(2))
    assert second == (130, "", "") and first[0] == 130
    step = stopped_at(folder)
    assert f"stopped at step {step} of 100000" in first[1]
    onward = run_ranks(command, 2, folder, "--set", f"train.steps={step + 1}")
    assert [code for code, *_ in onward] == [0, 0] and f"going on from step {step} of {step + 1}" in onward[0][1]


def test_ctrl_c_on_torchrun_stops_all_ranks_with_one_checkpoint(folder):
    with torchrun(folder, "-m", "infinity", "train", "run.toml", "--set", "train.steps=100000") as process:
        wait_for_steps(folder, 2)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert errors.count("stopping after this step; once more aborts at once.") == 1 and "error on rank" not in errors
    (step,) = re.findall(r"^stopped at step (\d+) of 100000, saved in .*The same command goes on from there\.$", said, flags=re.MULTILINE)
    assert int(step) == stopped_at(folder)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_under_torchrun_the_command_leaves_no_process_group_and_no_word_on_stderr(folder, device):
    (folder / "program.py").write_text(PROGRAM)
    with torchrun(folder, "program.py", "train", "run.toml", "--set", f"device={device}", "--set", "train.data=job_probe:windows") as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and f"finished step {STEPS}" in said, errors
    assert [path.read_text() for path in folder.glob("rank-*-is-left")] == ["True", "True"]
    assert [line for line in errors.splitlines() if "compute on one GPU" not in line] == []


def test_a_process_group_that_the_data_has_made_is_not_the_commands_to_destroy(folder, monkeypatch):
    monkeypatch.chdir(folder)
    try:
        done = CliRunner().invoke(app, ["train", "run.toml", "--set", "train.data=job_probe:joins"], prog_name="infinity")
        assert done.exit_code == 0 and torch.distributed.is_initialized(), done.output
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_that_a_rank_was_killed_is_told_once_by_those_that_are_left(folder):
    with job(command, 3, folder, "--set", "train.steps=100000", "--set", "zero.timeout_s=4") as running:
        wait_for_steps(folder, 2)
        running.processes[2].kill()
        codes, _, errors = zip(*(running.outcome(rank).value for rank in range(2)), strict=True)
    (error,) = [line for text in errors for line in text.splitlines() if line.startswith("error")]
    assert codes == (1, 1) and re.match(r"error on rank [01]: rank 2 has not been heard of", error)
    assert not list((folder / "runs").glob("step-*"))
