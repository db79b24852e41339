"""`infinity train` over several processes: they agree on everything, and one of them talks."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from infinity.config import load_config
from infinity.kinds import Tier
from tests.ranks import run_ranks

PROBE = """
import gpt

def empty(config, rank, world_size):
    return [] if rank == 1 else gpt.data(config, rank, world_size)
"""

CONFIG = """
device = "cpu"
budgets.cpu = "64MiB"
placement.param = "nvme"
placement.optimizer = "nvme"
nvme.paths = ["disk"]
zero.timeout_s = 4
train.model = "gpt:build_toy"
train.data = "gpt:data"
train.steps = 4
train.batch_size = 2
train.sequence_length = 32
train.log_every = 1
train.output = "runs"
"""


@pytest.fixture
def folder(example_folder):
    (example_folder / "run.toml").write_text(CONFIG)
    (example_folder / "job_probe.py").write_text(PROBE)
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
    first, second = run_ranks(command, 2, folder, "--data", "job_probe:empty")
    assert second[:2] == (2, "") and second[2].startswith("error on rank 1: train.data: the iterable gives no batch")
    assert first[0] == 1 and first[2] == "", "that a rank is lost is no news then"
