"""A run goes on to the digit: from a checkpoint, from its own store, elsewhere and cut differently. What does not fit costs nothing."""

from __future__ import annotations

import os
import random
import shutil

import numpy as np
import pytest
import torch
from engines import CPU, NVME, decay_groups, known_rates, mixed, settings, states_of, step, values_of
from models import Block, batches, tiny_gpt
from torch import nn

import infinity
from infinity.errors import CheckpointError

STEPS, HALF, MICRO_STEPS = 4, 2, 2


class Net(nn.Module):
    """Everything a run has to keep: tied and frozen parameters, dropout, statistics in buffers, persistent and not."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)
        self.head.weight = self.token.weight
        self.position = nn.Parameter(torch.randn(16, 32) * 0.02, requires_grad=False)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(4))
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, ids):
        self.calls += 1
        x = self.token(ids[:, :-1]) + self.position[: ids.shape[1] - 1]
        for block in self.blocks:
            x = self.drop(block(x))
        x = self.norm(x.flatten(0, 1).to(self.norm.weight.dtype))
        return nn.functional.cross_entropy(self.head(x.to(self.head.weight.dtype)).float(), ids[:, 1:].flatten())


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def config_of(path, dtype="fp32", placement=NVME, **sections):
    precision = {"dtype": dtype, "keep_fp32": [] if dtype == "fp32" else ["norm.*"], "init_scale": 2.0**20, "growth_interval": 2}
    optimizer = {"max_grad_norm": 0.5, "chunk_size": "16KiB", **sections.pop("optimizer", {})}
    return settings(path, placement, precision=precision, train={"accumulation": MICRO_STEPS}, optimizer=optimizer, **sections)


class Loader:
    """Knows how far it is."""

    def __init__(self):
        self.at, self.data = 0, batches(STEPS * MICRO_STEPS)

    def next(self):
        self.at += 1
        return self.data[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Run:
    """A training loop that draws from every generator and reports to the digit."""

    def __init__(self, model, config, **options):
        self.engine = infinity.initialize(model, config, param_groups=decay_groups, **options)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.engine.optimizer, max_lr=3e-3, total_steps=2 * STEPS)
        self.loader, self.losses = Loader(), []
        self.engine.register(scheduler=self.scheduler, loader=self.loader)

    def steps(self, count):
        for _ in range(count):
            for _ in range(MICRO_STEPS):
                weight = 1 + 0.1 * (random.random() + np.random.random() + torch.rand(()).item())
                loss = self.engine.model(self.loader.next()) * weight / MICRO_STEPS
                self.engine.scale(loss).backward()
                self.losses.append(loss.item())
            self.engine.optimizer.step()
            self.scheduler.step()
            self.engine.optimizer.zero_grad()
        return self

    def end(self, **options):
        scale = self.engine._parts.loss_scale
        result = {
            "losses": self.losses,
            "step": self.engine.global_step,
            "lr": self.scheduler.get_last_lr(),
            "scale": scale.state_dict() if scale else None,
            "buffers": {name: buffer.clone() for name, buffer in self.engine.model.named_buffers()},
            "states": states_of(self.engine),
        }
        self.engine.close(**options)
        return result


def seed_everything(seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def assert_goes_on(whole, second):
    """`second` is the second half of `whole`, to the bit."""
    assert second["losses"] == whole["losses"][HALF * MICRO_STEPS :]
    assert {key: second[key] for key in ("step", "lr", "scale")} == {key: whole[key] for key in ("step", "lr", "scale")}
    for part in ("buffers", "states"):
        assert second[part].keys() == whole[part].keys()
        wrong = [name for name, value in whole[part].items() if not torch.equal(second[part][name], value)]
        assert not wrong


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def straight(request, tmp_path_factory):
    """(dtype, an uninterrupted run, a checkpoint of its middle)."""
    path = known_rates(tmp_path_factory.mktemp("straight"))
    seed_everything(7)
    run = Run(net(), config_of(path, request.param)).steps(HALF)
    run.engine.save(path / "half").wait()
    half = run.engine.global_step
    assert (half < HALF) is (request.param == "fp16"), "the first step in fp16 overflows and is skipped"
    return request.param, {**run.steps(STEPS - HALF).end(), "half": half}, path / "half"


ELSEWHERE = {
    "the same": {},
    "on the cpu": {"placement": CPU},
    "params on the cpu": {"placement": {**NVME, "param": "cpu"}},
    "mixed": {"placement": "mixed"},
    "other chunks": {"optimizer": {"chunk_size": "32KiB"}},
    "other prefetch": {"prefetch": {"units": 0}},
    "other block size": {"nvme": {"block_size": "4KiB", "queue_depth": 2, "readers": 2, "writers": 2}},
    "other units": {"units": {"threshold": 1 << 30}},
}


QUICK = {"the same", "mixed"}


LOADS = [
    pytest.param(dtype, where, marks=() if dtype == "fp32" or where in QUICK else pytest.mark.slow)
    for dtype in ("fp32", "bf16", "fp16")
    for where in ELSEWHERE
]


@pytest.mark.parametrize(("straight", "where"), LOADS, indirect=["straight"])
def test_a_loaded_run_goes_on_to_the_digit(tmp_path, straight, where):
    dtype, whole, checkpoint = straight
    options = dict(ELSEWHERE[where])
    is_mixed = options.get("placement") == "mixed"
    config = config_of(known_rates(tmp_path), dtype, **({} if is_mixed else options))
    seed_everything(99)
    run = Run(net(seed=5), mixed(config, net()) if is_mixed else config)
    run.steps(1)
    run.losses.clear()
    run.engine.load(checkpoint)
    assert_goes_on(whole, run.steps(STEPS - HALF).end())


def test_a_run_initialized_from_a_checkpoint_goes_on(tmp_path, straight):
    dtype, whole, checkpoint = straight
    seed_everything(99)
    run = Run(lambda: net(seed=5), config_of(known_rates(tmp_path), dtype), checkpoint=checkpoint)
    assert run.engine.global_step == whole["half"]
    assert_goes_on(whole, run.steps(STEPS - HALF).end())


@pytest.mark.parametrize("placement", ["nvme", "cpu", "mixed"])
def test_a_closed_run_goes_on_from_its_store(tmp_path, straight, placement):
    dtype, whole, _ = straight
    config = config_of(known_rates(tmp_path), dtype, CPU if placement == "cpu" else NVME, store={"resume": "auto"})
    config = mixed(config, net()) if placement == "mixed" else config
    seed_everything(7)
    Run(net(), config).steps(HALF).end()
    seed_everything(99)
    run = Run(net(), config | {"store": {"resume": "must"}})
    assert run.engine.global_step == whole["half"]
    assert_goes_on(whole, run.steps(STEPS - HALF).end())


def test_a_store_is_resumed_under_another_placement_and_on_other_paths(tmp_path):
    first, second = known_rates(tmp_path / "a"), known_rates(tmp_path / "b")
    seed_everything(7)
    whole = Run(net(), config_of(known_rates(tmp_path / "whole"))).steps(STEPS).end()
    seed_everything(7)
    Run(net(), config_of(first, store={"resume": "auto"})).steps(HALF).end()
    moved = config_of(second, placement=CPU, store={"resume": "auto"}, nvme={"paths": [str(second), str(first)]})
    run = Run(net(), moved)
    assert run.engine.global_step == HALF
    assert_goes_on(whole, run.steps(STEPS - HALF).end())


@pytest.mark.parametrize("straight", ["fp32"], indirect=True)
def test_a_bad_checkpoint_costs_nothing(tmp_path, straight):
    """Neither the run in the store nor the values in the engine, whatever is wrong with the checkpoint."""
    _, _, other_model = straight
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine)
        engine.save(tmp_path / "good")
        engine.save(tmp_path / "flipped")
        engine.save(tmp_path / "cut")
    flip(next((tmp_path / "flipped").glob("states-*")))
    cut = next((tmp_path / "cut").glob("states-*"))
    os.truncate(cut, cut.stat().st_size - 512)
    bad = {tmp_path / "nowhere": "manifest.json is missing", tmp_path / "flipped": "checksum", tmp_path / "cut": "bytes"}
    bad[other_model] = "another model"
    for checkpoint, told in bad.items():
        with pytest.raises(CheckpointError, match=told):
            infinity.initialize(tiny_gpt(), config, checkpoint=checkpoint)
    with infinity.initialize(tiny_gpt(), config) as engine:
        assert engine.global_step == 1
        before = states_of(engine)
        for checkpoint, told in bad.items():
            with pytest.raises(CheckpointError, match=told):
                engine.load(checkpoint)
        after = states_of(engine)
        assert all(torch.equal(after[key], before[key]) for key in before)
        step(engine)
        engine.load(tmp_path / "good")
        assert engine.global_step == 1


def flip(path):
    with path.open("r+b") as raw:
        raw.seek(-5, os.SEEK_END)
        byte = raw.read(1)
        raw.seek(-5, os.SEEK_END)
        raw.write(bytes([byte[0] ^ 16]))


def test_groups_that_differ_are_refused_before_anything_changes(tmp_path):
    config = settings(known_rates(tmp_path))
    with infinity.initialize(tiny_gpt(), config, param_groups=decay_groups) as engine:
        step(engine)
        engine.save(tmp_path / "two-groups")

    def other_groups(named):
        first, second = decay_groups(named)
        second["params"].append(first["params"].pop())
        return [first, second]

    for groups in (None, other_groups):
        with infinity.initialize(tiny_gpt(seed=3), config, param_groups=groups) as engine:
            before = states_of(engine)
            with pytest.raises(CheckpointError, match="param_groups"):
                engine.load(tmp_path / "two-groups")
            after = states_of(engine)
            assert all(torch.equal(after[key], before[key]) for key in before)
            step(engine)


def test_a_second_checkpoint_holds_what_was_trained_since_the_first(tmp_path):
    """One chunk in all: what the first save read must not be what the second one writes."""
    torch.manual_seed(0)
    config = settings(known_rates(tmp_path), NVME, optimizer={"chunk_size": "1MiB"})
    with infinity.initialize(torch.nn.Linear(8, 8), config) as engine:
        saved = []
        for name in ("first", "second"):
            engine.model(torch.ones(4, 8)).sum().backward()
            engine.optimizer.step()
            engine.save(tmp_path / name).wait()
            with engine.gathered():
                saved.append(engine.model.weight.detach().clone())
    for name, want in zip(("first", "second"), saved, strict=True):
        with infinity.initialize(torch.nn.Linear(8, 8), config, checkpoint=tmp_path / name) as engine, engine.gathered():
            assert torch.equal(engine.model.weight, want)


def test_a_copied_run_goes_on_from_the_copy_and_leaves_the_original_alone(tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()

    def steps(path, some):
        config = settings(known_rates(path), NVME, store={"resume": "auto"})
        with infinity.initialize(tiny_gpt(), config) as engine:
            for ids in some:
                engine.model(ids).backward()
                engine.optimizer.step()
            return engine.global_step, values_of(engine)

    _, early = steps(original, batches(2))
    shutil.copytree(original, copy)
    _, late = steps(original, batches(1))
    step, values = steps(copy, [])
    assert step == 2 and all(torch.equal(values[name], early[name]) for name in early)
    step, values = steps(original, [])
    assert step == 3 and all(torch.equal(values[name], late[name]) for name in late)
