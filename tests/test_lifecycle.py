"""From initialize to close: who may open a run, what a step refuses, and what an exception, an interrupt or a kill leaves behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import weakref

import pytest
import torch
from engines import CPU, NVME, files_below, known_rates, mixed, settings, states_of, step, train_and_die, try_to_open, values_of
from models import batches, tiny_gpt

import infinity
from infinity.errors import ClosedError, ConfigError, LockError, TraceError
from infinity.runtime.parameter import _Grad


def close_after(config, steps=1):
    with infinity.initialize(tiny_gpt(), config) as engine:
        step(engine, steps)
        return engine.global_step


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
    loss = engine.model(batches(1)[0])
    with engine.gathered():
        penalty = sum(param.sum() for param in engine.model.parameters())
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
        lambda: loss.backward(),
        lambda: penalty.backward(),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="close"):
            use()
    with torch._C.DisableTorchFunctionSubclass():
        assert all(_Grad.__get__(param) is None for param in engine.model.parameters())
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


def test_of_a_closed_engine_no_parameter_has_values(tmp_path):
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        step(engine, 1)
    with pytest.raises(ClosedError, match=r"needs the values of parameter 'position.weight', whose engine is closed: call infinity.initialize"):
        engine.model.position.weight.sum()


class KeepsALoss(torch.nn.Module):
    """Holds on to a tensor with its graph, as modules do that report an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_gpt()

    def forward(self, ids):
        self.last = self.inner(ids)
        return self.last


@pytest.mark.parametrize("build", [tiny_gpt, KeepsALoss])
def test_of_a_closed_engine_that_nobody_holds_nothing_is_left(tmp_path, build):
    with infinity.initialize(build(), settings(known_rates(tmp_path))) as engine:
        step(engine, 2)
    parts = engine._parts
    left = [weakref.ref(part) for part in (engine, engine.model, parts.scheduler, parts.pipeline, parts.grads, parts.store, parts.ranks)]
    del engine, parts
    gc.collect()
    assert [part() for part in left] == [None] * len(left)


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
