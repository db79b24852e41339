"""What people do with a model between its steps: generate, evaluate, compile, feed it from workers, read and change it, take it away."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time

import pytest
import torch
from engines import CPU, NVME, descriptors, files_below, known_rates, mixed, params_and_masters, settings, threads, ulp_distance, values_of
from models import Keeps, batches, tiny_gpt
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.errors import CapacityError, ClosedError, StorageError, TraceError
from infinity.kinds import Group
from infinity.runtime.scheduler import Scheduler

IDS = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(0))


def train(model, optimizer, data):
    losses = []
    for ids in data:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def test_a_view_that_is_kept_is_not_overwritten_though_its_unit_stayed_for_backward(tmp_path):
    config = settings(tmp_path, NVME, units={"classes": ["Keeps"], "threshold": 1}, prefetch={"units": 1})
    x = torch.randn(2, 8)
    with infinity.initialize(nn.Sequential(*(Keeps() for _ in range(4))), config) as engine:
        *others, last = engine.model
        for step in range(4):
            last.keeps = step == 2  # it is the last of the forward, and the first of the backward
            if last.keeps:
                with engine.gathered(last):
                    expected = last.linear.weight.detach().t().clone()
            engine.model(x).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert torch.equal(last.kept, expected)


def t5():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config)


def llama():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=60
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("build", [llama, t5])
def test_generate_between_steps(tmp_path, build):
    def loop(model, step, zero):
        out = []
        for beams in (1, 2, 1):
            model.train()
            model(input_ids=IDS, labels=IDS).loss.backward()
            step()
            zero()
            model.eval()
            out.append(model.generate(IDS, max_new_tokens=4, do_sample=False, num_beams=beams))
        return out

    torch.manual_seed(1)
    plain = build()
    optimizer = adamw(plain)
    want = loop(plain, optimizer.step, optimizer.zero_grad)
    torch.manual_seed(1)
    with infinity.initialize(build(), settings(known_rates(tmp_path))) as engine:
        got = loop(engine.model, engine.optimizer.step, engine.optimizer.zero_grad)
        room = next(item.nbytes for item in engine.plan.working if item.name == "live units")
        assert engine.statistics()["peak_live_bytes"] <= room, "units of a decoder that loops do not pile up"
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_evaluation_between_steps_changes_nothing(tmp_path):
    data = batches(6)

    def run(path, evaluates):
        with infinity.initialize(tiny_gpt(), settings(path)) as engine:
            losses = []
            for ids in data:
                losses += train(engine.model, engine.optimizer, [ids])
                if evaluates:
                    engine.model.eval()
                    with torch.no_grad():
                        first = engine.model(ids)
                    with torch.inference_mode():
                        second = engine.model(ids)
                    assert torch.equal(first, second)
                    engine.model.train()
            return losses, values_of(engine)

    plain, values = run(known_rates(tmp_path / "plain"), False)
    evaluated, others = run(known_rates(tmp_path / "evaluated"), True)
    assert plain == evaluated
    assert all(torch.equal(values[name], others[name]) for name in values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles_inline_module_allowlist:UserWarning")  # torch 2.6
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains(tmp_path, backend):
    torch._dynamo.reset()
    plain = tiny_gpt(layers=2)
    want = train(plain, adamw(plain), batches(3))
    with infinity.initialize(tiny_gpt(layers=2), settings(known_rates(tmp_path))) as engine:
        got = train(torch.compile(engine.model, backend=backend), engine.optimizer, batches(3))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6 if backend == "aot_eager" else 1e-5, atol=0)


class Rows(torch.utils.data.Dataset):
    """Token rows; each is made in whichever process asks for it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randint(0, 61, (16,), generator=torch.Generator().manual_seed(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_forking_data_loader_workers_see_nothing_of_the_engine(tmp_path, persistent):
    """Workers are forked while threads run and direct I/O is under way; then everything that was opened is closed."""
    plain = tiny_gpt()
    want = train(plain, adamw(plain), list(DataLoader(Rows(), batch_size=2)) * 2)
    gc.collect()
    before = threads(), descriptors()
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        got = []
        for _ in range(2):
            got += train(engine.model, engine.optimizer, loader)
    del loader
    gc.collect()
    assert got == want
    until = time.monotonic() + 20
    while threads()[1] > before[0][1] and time.monotonic() < until:
        time.sleep(0.1)  # the loader's own threads end a moment after it
    after = threads(), descriptors()
    assert after[0][0] == before[0][0] and after[0][1] <= before[0][1]
    assert not set(after[1]) - set(before[1])


def test_param_groups_and_any_scheduler(tmp_path):
    """Groups with their own settings, added to later, under a scheduler that reads the loss."""

    def groups(named):
        named = list(named)
        return [
            {"params": [p for n, p in named if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6},
        ]

    def loop(model, optimizer):
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        losses = []
        for ids in batches(8):
            losses += train(model, optimizer, [ids])
            warm.step()
            plateau.step(losses[-1])
        return losses, [group["lr"] for group in optimizer.param_groups]

    plain = tiny_gpt()
    want = loop(plain, torch.optim.AdamW(groups(plain.named_parameters()), lr=1e-3, fused=True))
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path)), param_groups=groups) as engine:
        got = loop(engine.model, engine.optimizer)
        values = values_of(engine)
    assert got[1] == want[1]
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-6, atol=0)
    assert max(ulp_distance(values[name], p.detach()) for name, p in plain.named_parameters()) <= 8 * 16


def test_autocast_over_fp32_parameters_is_named_once(tmp_path, caplog):
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine, caplog.at_level(logging.WARNING, "infinity"):
        for ids in batches(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = engine.model(ids)
            loss.backward()
            engine.optimizer.step()
    told = [record for record in caplog.records if "autocast" in record.message]
    assert len(told) == 1 and "precision.dtype" in told[0].message


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
def test_gathered_shows_the_whole_model_and_takes_changes(tmp_path, placement):
    config = settings(known_rates(tmp_path))
    plain = tiny_gpt()
    train(plain, adamw(plain), batches(2))
    with infinity.initialize(tiny_gpt(), mixed(config, tiny_gpt()) if placement == "mixed" else config) as engine:
        train(engine.model, engine.optimizer, batches(2))
        with engine.gathered():
            for name, p in engine.model.named_parameters():
                assert ulp_distance(p, dict(plain.named_parameters())[name]) <= 2 * 16
            with torch.no_grad():
                engine.model.blocks[1].up.weight.mul_(2.0)
                plain.blocks[1].up.weight.copy_(engine.model.blocks[1].up.weight)
        values = values_of(engine)
        assert torch.equal(values["blocks.1.up.weight"], plain.blocks[1].up.weight)
        param, master = params_and_masters(engine, "blocks.1.up.weight")
        assert torch.equal(param, master), "the optimizer goes on from the changed value"


def test_changed_bf16_values_bring_their_masters_along_and_others_keep_their_low_bits(tmp_path):
    config = settings(known_rates(tmp_path), precision={"dtype": "bf16"})
    with infinity.initialize(tiny_gpt(), config) as engine:
        train(engine.model, engine.optimizer, batches(3))
        name = "blocks.2.down.weight"
        param, before = params_and_masters(engine, name)
        assert not torch.equal(before, before.bfloat16().float()), "masters know more than parameters"
        with engine.gathered(engine.model.blocks[2]), torch.no_grad():
            engine.model.blocks[2].down.weight[:4] = 0.5
        param, after = params_and_masters(engine, name)
        changed = 4 * engine.model.blocks[2].down.in_features
        assert (after[:changed] == 0.5).all() and (param[:changed] == 0.5).all()
        assert torch.equal(after[changed:], before[changed:])


def test_gathering_more_than_the_budget_has_left_names_the_way_out(tmp_path):
    config = settings(known_rates(tmp_path))
    plan = infinity.plan(tiny_gpt(), config)
    least = {**config, "budgets": {"cpu": sum(item.nbytes for item in plan.working)}}
    with infinity.initialize(tiny_gpt(), least) as engine:
        with pytest.raises(CapacityError, match="one module at a time.*budgets.cpu"), engine.gathered():
            pass
        with pytest.raises(CapacityError, match="infinity export"):
            engine.model.state_dict()
        with engine.gathered(engine.model.blocks[0]):
            assert engine.model.blocks[0].up.weight.isfinite().all()
        assert len(train(engine.model, engine.optimizer, batches(2))) == 2, "the engine goes on"


def test_memory_for_a_large_gather_goes_back(tmp_path):
    config = settings(known_rates(tmp_path), optimizer={"chunk_size": "1MiB"})
    with infinity.initialize(tiny_gpt(dim=192, layers=6), config) as engine:
        slabs = engine._parts.scheduler._movers.slabs
        train(engine.model, engine.optimizer, batches(2))
        before = slabs.allocated_bytes
        with engine.gathered():
            assert slabs.allocated_bytes > before
        assert slabs.allocated_bytes <= before


def test_state_dict_and_load_state_dict(tmp_path):
    plain = tiny_gpt(seed=5)
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        engine.model.load_state_dict(plain.state_dict())
        assert train(engine.model, engine.optimizer, batches(2))[0] == plain(batches(1)[0]).item()
        train(plain, adamw(plain), batches(2))
        found = engine.model.state_dict()
    assert found.keys() == plain.state_dict().keys()
    assert all(ulp_distance(found[key], value) <= 2 * 16 for key, value in plain.state_dict().items())


def test_the_update_takes_the_threads_it_is_given_and_computes_the_same(tmp_path):
    def run(count):
        with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path), optimizer={"threads": count})) as engine:
            running = len(os.listdir("/proc/self/task"))
            train(engine.model, engine.optimizer, batches(2))
            return running, values_of(engine)

    (one, values), (five, same) = run(1), run(5)
    assert five - one == 4
    assert all(torch.equal(values[name], same[name]) for name in values)


class Held:
    """Writes that are not over before somebody lets them be."""

    def __init__(self, work, gate):
        self.work, self.gate = work, gate

    def is_completed(self):
        return self.gate.is_set() and self.work.is_completed()

    def wait(self, timeout_s=None):
        assert self.gate.wait(timeout_s)
        self.work.wait(timeout_s)


def test_the_next_forward_begins_to_arrive_during_the_update(tmp_path, monkeypatch):
    """Units whose new values are at rest come ahead while the others are still updated; none comes before."""
    plain = tiny_gpt()
    wanted = train(plain, adamw(plain), batches(4))
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        losses = train(engine.model, engine.optimizer, batches(2))
        pipeline, scheduler = engine._parts.pipeline, engine._parts.scheduler
        run_unit, finish, gate = pipeline.run_unit, pipeline.finish, threading.Event()
        updated, seen = [], []

        def look():
            seen.append((list(updated), list(scheduler._fetches)))

        def run_to_the_end(unit):
            look()
            promise = pipeline._updated[unit]
            if unit == 1:
                keep = promise.keep
                monkeypatch.setattr(promise, "keep", lambda writes: keep(Held(writes, gate)))
            run_unit(unit)
            if unit != 1:
                pipeline.updated(unit).wait()
                updated.append(unit)

        def finish_all():
            look()
            gate.set()
            finish()

        monkeypatch.setattr(pipeline, "run_unit", run_to_the_end)
        monkeypatch.setattr(pipeline, "finish", finish_all)
        losses += train(engine.model, engine.optimizer, batches(3)[2:])
        monkeypatch.undo()
        losses += train(engine.model, engine.optimizer, batches(4)[3:])
    ahead = [0, 5]  # the first unit, and the root, which every forward begins with and whose update comes last; 1 is still being written
    assert [fetched for _, fetched in seen] == [[unit for unit in ahead if unit in updated] for updated, _ in seen]
    assert [updated for updated, _ in seen] == [[], [0], [0], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4, 5]]
    assert losses == pytest.approx(wanted, rel=1e-5)


class Counts(nn.Module):
    """Counts its calls in a buffer, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.norm(self.linear(x)).square().mean()


def test_detach_gives_back_the_plain_module_with_what_it_learned(tmp_path):
    torch.manual_seed(0)
    config, x = settings(known_rates(tmp_path)), torch.randn(4, 8)
    engine = infinity.initialize(Counts(), config)
    for _ in range(3):
        engine.model(x).backward()
        engine.optimizer.step()
    values = values_of(engine)
    names = [name for name, _ in engine.model.named_parameters()]
    model = engine.detach()
    assert model.calls == 3 and model.norm.num_batches_tracked == 3
    assert all(type(p) is nn.Parameter and torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert [name for name, _ in model.named_parameters()] == names
    model(x).backward()
    optimizer = adamw(model)
    optimizer.step()
    assert all(p.grad is not None and not torch.equal(p, values[name]) for name, p in model.named_parameters() if name != "linear.bias")
    model.zero_grad()
    with infinity.initialize(model, config) as again:
        assert values_of(again).keys() == values.keys(), "and an engine can have it again"


def test_loss_closure(tmp_path):
    """`step(closure)` as torch has it."""
    plain, data = tiny_gpt(), batches(3)
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:

        def closure(model, optimizer, ids):
            optimizer.zero_grad()
            loss = model(ids)
            loss.backward()
            return loss

        optimizer = adamw(plain)
        want = [optimizer.step(lambda ids=ids: closure(plain, optimizer, ids)).item() for ids in data]
        got = [engine.optimizer.step(lambda ids=ids: closure(engine.model, engine.optimizer, ids)).item() for ids in data]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


def test_two_engines_in_one_graph(tmp_path):
    """A generator and its critic, each with an engine, an optimizer and a store of its own."""

    def make():
        torch.manual_seed(0)
        build = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 8))  # noqa: E731
        return build(), build()

    def play(generator, critic, optimizers):
        noise, losses = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), []
        for turn in range(4):
            loss = critic(generator(noise)).square().mean() * (1 if turn % 2 else -0.1)
            loss.backward()
            optimizers[turn % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = make()
    want = play(*plain, [adamw(model) for model in plain])
    places = [known_rates(tmp_path / name) for name in ("generator", "critic")]
    engines = [infinity.initialize(model, settings(place)) for model, place in zip(make(), places, strict=True)]
    got = play(*[engine.model for engine in engines], [engine.optimizer for engine in engines])
    for engine in engines:
        engine.close()
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


def test_an_engine_among_plain_modules(tmp_path):
    """Adapters around the engine's model have torch's own optimizer; gradients flow through."""

    def run(model, optimizer):
        torch.manual_seed(3)
        adapter = nn.Linear(8, 8)
        own = torch.optim.SGD(adapter.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        losses = []
        for _ in range(3):
            loss = (adapter(model(adapter(x)))).square().mean()
            loss.backward()
            for each in (own, optimizer):
                each.step()
                each.zero_grad()
            losses.append(loss.item())
        return losses

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    plain = build()
    want = run(plain, adamw(plain))
    with infinity.initialize(build(), settings(known_rates(tmp_path))) as engine:
        got = run(engine.model, engine.optimizer)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("placement", [NVME, CPU], ids=["nvme", "cpu"])
def test_a_forked_child_cannot_touch_the_run(tmp_path, placement):
    """It is refused before it touches memory that it does not have, and its close() leaves the parent's files alone."""
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path), placement, store={"resume": "auto"})) as engine:
        train(engine.model, engine.optimizer, batches(2))
        before = files_below(tmp_path)

        def inside():
            with engine.gathered():
                in_child(lambda: engine.model(batches(1)[0]))

        def in_child(use):
            child = os.fork()
            if not child:
                code = 1
                try:
                    try:
                        use()
                    except TraceError as error:
                        code = 0 if "forked from" in str(error) else 2
                    engine.close()
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert files_below(tmp_path) == before

        in_child(lambda: engine.model(batches(1)[0]))
        in_child(lambda: engine.gathered().__enter__())
        in_child(engine.model.state_dict)
        in_child(lambda: engine.save(tmp_path / "checkpoint"))
        in_child(engine.detach)
        inside()
        engine.model(batches(1)[0]).backward()  # and there are gradients, some still on their way
        in_child(engine.optimizer.step)
        in_child(engine.optimizer.zero_grad)
        in_child(lambda: engine.clip_grad_norm_(1.0))
        engine.optimizer.zero_grad()
        train(engine.model, engine.optimizer, batches(1))
    with infinity.initialize(tiny_gpt(), settings(tmp_path, placement, store={"resume": "must"})) as engine:
        assert engine.global_step == 3


def test_a_batch_that_is_left_out_after_clipping_leaves_no_trace(tmp_path):
    ids = batches(1)[0]
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        norms = []
        for _ in range(2):
            engine.model(ids).backward()
            norms.append(engine.clip_grad_norm_(1e-3).item())
            engine.model.zero_grad()
        assert norms[0] == norms[1] > 1e-2


def test_an_engine_that_is_never_closed_reminds(tmp_path, caplog):
    config = settings(known_rates(tmp_path))
    with caplog.at_level(logging.WARNING, "infinity"):
        with infinity.initialize(tiny_gpt(), config):
            pass
        assert not caplog.records
        for resume, told in (("never", "never closed. Use it"), ("auto", "never closed: its last steps are not published")):
            caplog.clear()
            engine = infinity.initialize(tiny_gpt(), {**config, "store": {"resume": resume}})
            closers = engine._parts.closers
            del engine
            gc.collect()
            closers.close()
            assert any(told in record.message for record in caplog.records)


def fail(store, group):
    """The store's writes of one group fail from now on."""
    write_back = store.write_back

    def refuse(key, source):
        if key.group is group:
            raise StorageError(errno.EIO, "a file", 0, source.numel())
        return write_back(key, source)

    store.write_back = refuse


def interrupt(engine):
    def stop(*_):
        raise KeyboardInterrupt

    engine.model.blocks[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        engine.model(batches(1)[0])


def fail_a_step(engine):
    engine.model(batches(1)[0]).backward()
    fail(engine._parts.store, Group.OPTIMIZER)
    with pytest.raises(StorageError):
        engine.optimizer.step()


def fail_a_gradient(engine):
    fail(engine._parts.store, Group.GRAD)
    with pytest.raises(StorageError):
        engine.model(batches(1)[0]).backward()
        engine.optimizer.step()


def close_inside_gathered(engine):
    with pytest.raises(ClosedError, match="closed inside gathered"), engine.gathered():
        engine.close()


@pytest.mark.parametrize("live", [interrupt, fail_a_step, fail_a_gradient, close_inside_gathered], ids=lambda live: live.__name__)
def test_a_closed_engine_holds_nothing_however_its_life_went(tmp_path, live):
    engine = infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path)))
    live(engine)
    engine.close()
    gc.collect()
    assert engine.statistics()["cpu_bytes"] == 0
    with pytest.raises(ClosedError):
        engine.model(batches(1)[0])


class Lookups(nn.Module):
    """Each block adds a row of a table of its own, looked up inside the block, which is not its module (value embeddings)."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, table, ids):
            return x + self.after(torch.tanh(self.before(x)) + table(ids))

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(97, 32) for _ in range(3))
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, ids):
        x = torch.ones(*ids.shape, 32)
        for block, table in zip(self.blocks, self.tables, strict=True):
            x = block(x, table, ids)
        return x.square().mean()


def test_a_lookup_inside_a_block_does_not_end_the_blocks_backward(tmp_path, monkeypatch):
    """Its gradients would go down in two parts, the second with a read and an addition, and the block would be fetched twice."""
    log = []
    fetch, reduce = Scheduler.fetch, Scheduler.reduce
    monkeypatch.setattr(Scheduler, "fetch", lambda self, unit: (log.append(f"fetch {unit.name}"), fetch(self, unit))[1])
    monkeypatch.setattr(Scheduler, "reduce", lambda self, unit, *rest: (log.append(f"down {unit.name}"), reduce(self, unit, *rest))[1])
    ids = batches(1)[0]
    with infinity.initialize(Lookups(), settings(known_rates(tmp_path))) as engine:
        for _ in range(2):
            loss = engine.model(ids)
            log.clear()
            loss.backward()
            engine.optimizer.zero_grad()
    names = [f"{kind}.{index}" for kind in ("blocks", "tables") for index in range(3)]
    assert sorted(entry for entry in log if entry.startswith("down")) == [f"down {name}" for name in names]
    assert [entry for entry in log if entry.startswith("fetch")] == ["fetch blocks.2", "fetch blocks.1", "fetch blocks.0"]
