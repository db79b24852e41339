"""The training loop against an engine that is plain PyTorch: what it runs, saves, resumes and refuses."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import infinity
from infinity.cli.job import Job
from infinity.cli.train import count_tokens, learning_rate_factor, run_training
from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.sharding.ranks import Ranks
from infinity.timeline import Timeline

MODULE = """
import torch
from torch import nn

seen = []

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x, y):
        seen.append(x[0, 0].item())
        return ((x @ self.weight - y) ** 2).mean()

def build():
    return Regression()

def batch(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(4, 3, generator=generator)
    x[0, 0] = n
    return {"x": x, "y": x.sum(1)}

def data(config, rank, world_size):
    return [batch(n) for n in range(8)]

class Stateful:
    def __init__(self):
        self.position = 0
    def __iter__(self):
        while True:
            self.position += 1
            yield batch(self.position - 1)
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

def stateful(config, rank, world_size):
    return Stateful()

def nothing(config, rank, world_size):
    return []
"""


class PlainEngine:
    """What `infinity.initialize` promises, kept in memory; a checkpoint is one file."""

    def __init__(self, build, config, checkpoint):
        self._checkpoint = checkpoint
        self.model: nn.Module = build()
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=options.betas)
        self.optimizer.register_step_post_hook(self._count)
        self.timeline = Timeline()
        self.plan = type("Plan", (), {"render": lambda self: "the plan"})()
        self.global_step = 0
        self.registered: dict[str, object] = {}
        self.is_closed = False

    def _count(self, *_):
        self.global_step += 1

    def scale(self, loss):
        return loss

    def register(self, **objects):
        self.registered |= objects
        if self._checkpoint is not None:
            self.load(self._checkpoint)

    def _everything(self):
        return {"model": self.model, "optimizer": self.optimizer, **self.registered}

    def save(self, folder):
        Path(folder).mkdir(parents=True)
        states = {name: thing.state_dict() for name, thing in self._everything().items()}
        torch.save({"step": self.global_step, "states": states}, Path(folder) / "all.pt")
        return type("Done", (), {"wait": lambda self, timeout_s=None: None})()

    def load(self, folder):
        saved = torch.load(Path(folder) / "all.pt", weights_only=False)
        for name, thing in self._everything().items():
            thing.load_state_dict(saved["states"][name])
        self.global_step = saved["step"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run("train.steps=4", ...) -> exit code; run.engines, run.seen and run.output tell what happened."""
    (tmp_path / "loop_probe.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import loop_probe  # type: ignore[import-not-found]

    def initialize(build, config, *, checkpoint=None):
        run.engines.append(PlainEngine(build, config, checkpoint))
        return run.engines[-1]

    def run(*words, resume=None):
        defaults = ["train.model=loop_probe:build", "train.data=loop_probe:data", "train.steps=4", "optimizer.lr=0.1", f"train.output={tmp_path}/out"]
        loop_probe.seen.clear()
        job = Job(config=load_config({}, [*defaults, *words]), ranks=Ranks(timeout_s=1.0, timeline=Timeline()), console=Console())
        return run_training(job, [tmp_path], resume)

    monkeypatch.setattr(infinity, "initialize", initialize, raising=False)
    run.engines, run.seen, run.output, run.module = [], loop_probe.seen, tmp_path / "out", loop_probe
    yield run
    sys.modules.pop("loop_probe")


def weights(run) -> torch.Tensor:
    return run.engines[-1].model.weight.detach().clone()


def test_a_run_does_its_steps_saves_and_closes(run, capsys):
    assert run() == 0
    engine = run.engines[0]
    assert engine.global_step == 4 and engine.is_closed
    assert run.seen == [0, 1, 2, 3]
    assert (run.output / "step-4" / "all.pt").exists()
    lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads((run.output / "trace.json").read_text())["traceEvents"]
    assert "the plan" in capsys.readouterr().out


def test_accumulated_micro_steps_are_one_batch_of_all(run):
    run("train.accumulation=2", "train.steps=3")
    model = run.module.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        halves = [run.module.batch(2 * step), run.module.batch(2 * step + 1)]
        model(**{key: torch.cat([half[key] for half in halves]) for key in ("x", "y")}).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(run), model.weight.detach())


def test_data_that_ends_is_gone_through_again(run):
    run("train.steps=10")
    assert run.seen == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize("data", ["data", "stateful"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_resumed_run_equals_one_that_never_stopped(run, data, schedule):
    words = [f"train.data=loop_probe:{data}", "train.warmup_steps=2", f"train.schedule={schedule}", "train.steps=6"]
    run(*words, f"train.output={run.output}-whole", "train.save_every=3")
    whole = weights(run)
    assert run(*words, resume=Path(f"{run.output}-whole/step-3")) == 0
    assert run.seen == [3, 4, 5]
    assert torch.equal(weights(run), whole)


def test_a_second_run_goes_on_where_the_first_ended(run, capsys):
    run("train.steps=2")
    assert run("train.steps=5") == 0
    assert run.seen == [2, 3, 4]
    assert "going on from" in capsys.readouterr().out
    assert len((run.output / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_second_run_of_a_finished_one_builds_nothing_and_says_how_to_go_on(run, capsys):
    run()
    assert run() == 0
    assert len(run.engines) == 1
    said = capsys.readouterr().out
    assert "already has all 4 steps" in said and "--set train.steps=8" in said


def test_checkpoints_come_every_so_many_steps(run):
    run("train.save_every=2", "train.steps=5")
    assert sorted(path.name for path in run.output.glob("step-*")) == ["step-2", "step-4", "step-5"]


def test_the_latest_checkpoint_is_the_largest_number_and_unfinished_ones_are_no_checkpoints(run):
    run("train.save_every=3", "train.steps=10")
    (run.output / "step-99.tmp").mkdir()
    run("train.steps=11")
    assert run.seen == [10 % 8]


@pytest.mark.parametrize(
    ("words", "before", "said"),
    [
        (["train.data=loop_probe:nothing"], [], "gives no batch"),
        (["store.resume=never"], ["train.steps=2"], "holds an earlier run up to step-2"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(run, words, before, said):
    if before:
        run(*before)
    with pytest.raises(ConfigError) as caught:
        run(*words)
    assert said in str(caught.value)


def test_a_checkpoint_that_is_missing_is_refused_before_anything_is_built(run, tmp_path):
    with pytest.raises(ConfigError, match="no such checkpoint"):
        run(resume=tmp_path / "nowhere")
    assert run.engines == []


def test_ctrl_c_finishes_the_step_saves_and_goes_on_next_time(run, monkeypatch, capsys):
    inside = run.module.Regression.forward

    def pressed(self, x, y):
        if len(run.seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return inside(self, x, y)

    monkeypatch.setattr(run.module.Regression, "forward", pressed)
    assert run("train.steps=6") == 130
    assert run.engines[-1].global_step == 3 and run.engines[-1].is_closed
    assert (run.output / "step-3").is_dir()
    assert "stopped at step 3 of 6" in capsys.readouterr().out
    monkeypatch.setattr(run.module.Regression, "forward", inside)
    assert run("train.steps=6") == 0
    assert run.seen == [3, 4, 5]


def test_an_error_in_user_code_closes_the_engine(run, monkeypatch):
    def broken(self, x, y):
        raise RuntimeError("in your forward")

    monkeypatch.setattr(run.module.Regression, "forward", broken)
    with pytest.raises(RuntimeError, match="in your forward"):
        run()
    assert run.engines[-1].is_closed


def test_a_skipped_step_moves_neither_the_count_nor_the_schedule(run, monkeypatch):
    skipped = iter([True, False, False])

    def count(self, *_):
        self.global_step += not next(skipped)

    monkeypatch.setattr(PlainEngine, "_count", count)
    run("train.steps=2", "train.warmup_steps=4")
    assert run.engines[-1].registered["scheduler"].last_epoch == 2
    assert len(run.seen) == 3


def test_the_seed_gives_the_same_weights(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(run.module, "build", lambda: drawn.append(torch.rand(1).item()) or run.module.Regression())
    for seed in (1, 2, 1):
        run(f"train.seed={seed}", f"train.output={run.output}-{len(drawn)}")
    assert drawn[0] == drawn[2] != drawn[1]


def test_the_learning_rate_warms_up_then_follows_half_a_cosine():
    train = load_config({"train": {"steps": 12, "warmup_steps": 4, "schedule": "cosine"}}).train
    factors = [learning_rate_factor(train, step) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.5)
    assert factors[12] == pytest.approx(0.0)
    constant = train.model_copy(update={"schedule": "constant"})
    assert {learning_rate_factor(constant, step) for step in range(4, 40)} == {1.0}


def test_tokens_are_the_elements_of_the_first_whole_numbers():
    assert count_tokens({"mask": torch.ones(2, 5), "tokens": torch.ones(2, 3, dtype=torch.long)}) == 6
    assert count_tokens({"x": torch.ones(4, 3)}) == 4
