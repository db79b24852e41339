"""A run goes on to the digit: from a checkpoint, from its own store, elsewhere and cut differently; and it refuses what it cannot go on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from engines import CPU, NVME, files_below, known_rates, mixed, settings, states_of, train_and_die, try_to_open, values_of
from models import Block, batches, tiny_gpt
from torch import nn

import infinity
from infinity.errors import CheckpointError, ClosedError, ConfigError, LockError, TraceError

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


def decay_groups(named):
    named = list(named)
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


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


def close_after(config, steps=1):
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine, steps)
        return engine.global_step


def step(engine, steps=1):
    for ids in batches(steps):
        engine.model(ids).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def test_resume_must_never_and_auto(tmp_path):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    with pytest.raises(ConfigError, match='store.resume = "must".*never been published'):
        infinity.initialize(tiny_gpt(), config | {"store": {"resume": "must"}})
    assert not files_below(tmp_path)
    assert [close_after(config, 2), close_after(config, 2)] == [2, 4]
    before = files_below(tmp_path)
    with pytest.raises(ConfigError, match="already holds step 4 and is not overwritten.*infinity clean"):
        infinity.initialize(tiny_gpt(), config | {"store": {"resume": "never"}})
    assert files_below(tmp_path) == before and close_after(config) == 5
    assert close_after(config | {"store": {"resume": "never", "run": "other"}}) == 1


@pytest.mark.parametrize(
    ("model", "change", "told"),
    [
        (lambda: tiny_gpt(seed=1), {}, "initial weights was"),
        (tiny_gpt, {"precision": {"dtype": "bf16"}}, "precision was 'fp32', is now 'bf16'"),
        (lambda: tiny_gpt(layers=3), {}, "another layout|initial weights"),
        (tiny_gpt, {"units": {"threshold": 1 << 30}}, "another layout|initial weights"),
    ],
)
def test_a_store_of_another_model_is_refused_and_untouched(tmp_path, model, change, told):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    close_after(config)
    before = {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path)}
    with pytest.raises(ConfigError, match=f"(?s)run 'default' .step 1.*({told}).*Load a checkpoint.*store.run.*infinity clean"):
        infinity.initialize(model(), {**config, **{name: {**config.get(name, {}), **keys} for name, keys in change.items()}})
    assert {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path)} == before
    assert close_after(config) == 2


@pytest.fixture(scope="module")
def processes():
    """Fresh processes, forked from one that has imported everything and started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "infinity", "engines", "models"])
    return context


def die_in_mid_step(processes, path):
    child = processes.Process(target=train_and_die, args=(path,))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


def test_a_run_killed_in_mid_step_is_refused_with_three_ways_out_and_each_works(tmp_path, processes):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine, 2)
        engine.save(tmp_path / "step-2")
        want = values_of(engine)
    die_in_mid_step(processes, tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="(?s)mix of two steps.*Load a checkpoint.*store.run.*infinity clean"):
            infinity.initialize(tiny_gpt(), config)
    assert close_after(config | {"store": {"resume": "never", "run": "new"}}) == 1
    with infinity.initialize(tiny_gpt(), config, checkpoint=tmp_path / "step-2") as engine:
        assert engine.global_step == 2
        got = values_of(engine)
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert close_after(config) == 3, "the run is whole again"


def test_a_run_killed_before_it_was_ever_published_starts_anew(tmp_path, processes):
    die_in_mid_step(processes, known_rates(tmp_path))
    assert files_below(tmp_path)
    assert close_after(settings(tmp_path, store={"resume": "auto"})) == 1


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


def test_a_second_engine_on_a_run_names_the_first(tmp_path):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    with infinity.initialize(tiny_gpt(), config) as engine:
        engine.save(tmp_path / "start")
        with pytest.raises(LockError, match=f"pid {os.getpid()}"):
            infinity.initialize(tiny_gpt(), config)
        with pytest.raises(LockError, match=f"pid {os.getpid()}"):
            infinity.initialize(tiny_gpt(), config, checkpoint=tmp_path / "start")
        step(engine, 2)
    assert close_after(config) == 3


def test_another_process_is_told_who_holds_the_run(tmp_path, processes):
    answers = processes.SimpleQueue()
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))):
        child = processes.Process(target=try_to_open, args=(tmp_path, answers))
        child.start()
        told = answers.get()
        child.join(120)
    assert told.startswith("LockError") and f"in use by pid {os.getpid()} on" in told


@pytest.mark.parametrize("tied", [False, True])
def test_a_builder_makes_the_model_that_eager_construction_makes(tmp_path, tied):
    data = batches(3)

    def run(model, path):
        with infinity.initialize(model, settings(known_rates(path))) as engine:
            losses = []
            for ids in data:
                loss = engine.model(ids)
                loss.backward()
                engine.optimizer.step()
                losses.append(loss.item())
            return losses, states_of(engine), {name: buffer.clone() for name, buffer in engine.model.named_buffers()}

    eager = run(tiny_gpt(tied=tied), tmp_path / "eager")
    built = run(lambda: tiny_gpt(tied=tied), tmp_path / "built")
    assert built[0] == eager[0]
    for mine, theirs in zip(built[1:], eager[1:], strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not files_below(tmp_path / "built")


def test_the_plan_of_a_builder_is_the_plan_of_its_engine(tmp_path):
    config = mixed(settings(known_rates(tmp_path)), tiny_gpt())
    plan = infinity.plan(lambda: tiny_gpt(), config)
    assert not files_below(tmp_path)
    with infinity.initialize(tiny_gpt(), config) as engine:
        assert engine.plan.specs == plan.specs and engine.plan.working == plan.working
        assert all(engine._parts.store.tier(spec.key) is spec.tier for spec in plan.specs)


def test_an_unscaled_fp16_backward_is_refused_by_the_step(tmp_path):
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path), precision={"dtype": "fp16", "init_scale": 1024.0})) as engine:
        before = values_of(engine)
        engine.model(batches(1)[0]).backward()
        with pytest.raises(TraceError, match=r"engine.scale\(loss\).backward"):
            engine.optimizer.step()
        engine.optimizer.zero_grad()
        after = values_of(engine)
        assert engine.global_step == 0 and all(torch.equal(after[name], before[name]) for name in before)
        engine.scale(engine.model(batches(1)[0])).backward()
        engine.optimizer.step()
        assert engine.global_step == 1


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_skipped_step_changes_nothing(tmp_path, dtype):
    config = settings(known_rates(tmp_path), precision={"dtype": dtype, "init_scale": 1024.0})
    with infinity.initialize(tiny_gpt(), config) as engine:
        engine.scale(engine.model(batches(1)[0])).backward()
        engine.optimizer.step()
        before, counts = states_of(engine), engine.optimizer.step_counts()
        loss = engine.scale(engine.model(batches(1)[0]))
        (loss * float("inf")).backward()
        if dtype == "fp16":
            engine.optimizer.step()
        else:
            with pytest.warns(RuntimeWarning, match="skipped"):
                engine.optimizer.step()
        after = states_of(engine)
        assert engine.global_step == 1 and engine.optimizer.step_counts() == counts and engine.optimizer.skipped_steps == 1
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_use_after_close_is_refused_in_words(tmp_path):
    engine = infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path)))
    engine.model(batches(1)[0]).backward()
    engine.close()
    engine.close()
    uses = [
        lambda: engine.model(batches(1)[0]),
        lambda: engine.optimizer.step(),
        lambda: engine.save(tmp_path / "x"),
        lambda: engine.load(tmp_path / "x"),
        lambda: engine.gathered().__enter__(),
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.detach(),
        lambda: engine.optimizer.zero_grad(),
        lambda: engine.model.state_dict(),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="close"):
            use()
    assert not (tmp_path / "x").exists()


class Boom(Exception):
    pass


class Trap(torch.autograd.Function):
    """Identity; raises in its backward what it was given."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


@pytest.mark.parametrize("error", [Boom("here"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("placement", ["nvme", "cpu"])
def test_an_exception_in_the_model_leaves_the_engine_usable(tmp_path, error, phase, placement):
    """Then zero_grad() and the same steps as if nothing had happened."""
    data = batches(4)
    config = settings(known_rates(tmp_path), NVME if placement == "nvme" else CPU)

    def trap(module, args, out):
        if phase == "forward":
            raise error
        return Trap.apply(out, error)

    with infinity.initialize(tiny_gpt(), config) as engine:
        want = train(engine, data)
    with infinity.initialize(tiny_gpt(), config) as engine:
        got = train(engine, data[:2])
        handle = engine.model.blocks[2].up.register_forward_hook(trap)
        with pytest.raises(type(error)):
            engine.model(data[0]).backward()
        handle.remove()
        engine.optimizer.zero_grad()
        got += train(engine, data[2:])
    assert got == want


def train(engine, data):
    losses = []
    for ids in data:
        loss = engine.model(ids)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("error", [Boom("here"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_an_interrupt_in_the_middle_of_a_step_is_final_and_the_store_is_not_trusted(tmp_path, error):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    close_after(config)
    engine = infinity.initialize(tiny_gpt(), config)
    engine.model(batches(1)[0]).backward()
    kernel, calls = engine._parts.pipeline._cpu_kernel, []

    class Interrupted:
        def update(self, *args):
            calls.append(1)
            if len(calls) == 4:
                raise error
            kernel.update(*args)

    engine._parts.pipeline._cpu_kernel = Interrupted()
    with pytest.raises(type(error)):
        engine.optimizer.step()
    assert engine.global_step == 1
    for use in (lambda: step(engine), lambda: engine.save(tmp_path / "x")):
        with pytest.raises((RuntimeError, Boom)):
            use()
    engine.close()
    with pytest.raises(ConfigError, match="mix of two steps"):
        infinity.initialize(tiny_gpt(), config)


def test_leaving_with_an_exception_publishes_nothing(tmp_path):
    config = settings(known_rates(tmp_path), store={"resume": "auto"})
    with pytest.raises(Boom), infinity.initialize(tiny_gpt(), config) as engine:
        step(engine)
        raise Boom
    assert not files_below(tmp_path)


def test_what_a_publish_leaves_is_json_and_safetensors(tmp_path):
    from safetensors import safe_open

    close_after(settings(known_rates(tmp_path), store={"resume": "auto"}))
    for name in files_below(tmp_path):
        if name.endswith(".json"):
            json.loads((tmp_path / name).read_text())
        else:
            with safe_open(tmp_path / name, "pt") as opened:
                assert list(opened.keys())


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


def test_a_step_with_a_closure_leaves_no_old_values_ahead(tmp_path):
    """The closure's own forward and backward fetch ahead; evaluation after the step sees the new values."""
    plain, data = tiny_gpt(), batches(6)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path), NVME, optimizer={"lr": 1e-2, "weight_decay": 0.01})) as engine:

        def closure(model, chosen, ids):
            def run():
                chosen.zero_grad()
                loss = model(ids)
                loss.backward()
                return loss

            return run

        for ids in data:
            want = optimizer.step(closure(plain, optimizer, ids))
            assert torch.equal(engine.optimizer.step(closure(engine.model, engine.optimizer, ids)), want)
            with torch.no_grad():
                assert torch.equal(engine.model(data[0]), plain(data[0]))
        assert engine.global_step == len(data)
        engine.optimizer.zero_grad()
        engine.optimizer.step()
        assert engine.global_step == len(data)


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
