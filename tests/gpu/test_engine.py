"""The claims of the parity tests on a CUDA device: any tier, any mixture, the same training."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from models import batches, tiny_gpt

import infinity
from infinity.config import Config
from infinity.kinds import Group, Lane, Tier
from infinity.optim.grad_mover import GradMover
from infinity.planner.working import ACTIVATIONS
from infinity.preparation import preview
from infinity.runtime.ascent import Ascent
from infinity.sizes import KiB, MiB

pytestmark = pytest.mark.gpu

PLACEMENTS = [
    *[("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("hbm", "hbm", "cpu"), ("hbm", "cpu", "nvme"), ("cpu", "nvme", "nvme")],  # the CPU updates
    *[("hbm", "hbm", "hbm"), ("cpu", "cpu", "hbm"), ("nvme", "cpu", "hbm"), ("nvme", "nvme", "hbm")],  # the GPU does
]
"""Of (param, grad, optimizer)."""


def settings(tmp_path, placement, **sections):
    config = {
        "device": "cuda",
        "budgets": {"cpu": "256MiB", "hbm": "1GiB"},
        "nvme": {"paths": [str(tmp_path)], "deadline_s": 30},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "chunk_size": "16KiB"},
        "store": {"resume": "never"},
        "placement": dict(zip(("param", "grad", "optimizer"), placement, strict=True)),
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys}
    return config


def train(config, steps=10, accumulation=1, **shape):
    """(losses, parameters) after some steps."""
    losses = []
    with infinity.initialize(tiny_gpt(recompute=True, **shape), config) as engine:
        data = iter(batches(steps * accumulation))
        for _ in range(steps):
            for _ in range(accumulation):
                loss = engine.model(next(data)) / accumulation
                engine.scale(loss).backward()
            losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return losses, values_of(engine)


def values_of(engine):
    """Module by module: neither HBM nor CPU memory need hold the whole model."""
    values = {}
    for prefix, module in engine.model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            with engine.gathered(module):
                values.update((name, p.detach().cpu().clone()) for name, p in module.named_parameters(prefix, recurse=False))
    return {name: values[name] for name, _ in engine.model.named_parameters()}  # tied ones once


def plain(steps=10, accumulation=1, max_norm=None, **variant):
    model = tiny_gpt(recompute=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **variant)
    data = iter(batches(steps * accumulation))
    for _ in range(steps):
        for _ in range(accumulation):
            (model(next(data).cuda()) / accumulation).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def distance(a, b):
    return sum((a[name].double() - b[name].double()).square().sum() for name in a).sqrt().item()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_where_states_rest_and_who_updates_them_does_not_change_a_bit(tmp_path, dtype):
    runs = [train(settings(tmp_path, placement, precision={"dtype": dtype})) for placement in PLACEMENTS]
    for placement, (losses, values) in zip(PLACEMENTS, runs, strict=True):
        assert losses == runs[0][0], placement
        assert all(torch.equal(values[name], runs[0][1][name]) for name in values), placement


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_fp32_training_on_the_gpu_stays_as_close_to_torch_as_torchs_own_variants(tmp_path, placement):
    """Clipped and accumulated. Single elements may part further: a key's bias has no gradient but rounding, which Adam blows up."""
    fused, loop = (plain(accumulation=2, max_norm=0.5, **variant) for variant in ({"fused": True}, {"foreach": False}))
    _, ours = train(settings(tmp_path, placement, optimizer={"max_grad_norm": 0.5}, train={"accumulation": 2}), accumulation=2)
    assert distance(ours, fused) <= 3 * distance(fused, loop)


DEEP = {"layers": 20, "dim": 64}
SPLIT = {"cpu kernel, rest in cpu": ("cpu", "nvme"), "cpu kernel, rest on nvme": ("nvme", "nvme"), "gpu kernel": ("hbm", "hbm")}
"""Homes of (grad, optimizer); parameters rest in HBM as far as its budget goes."""


def split_settings(path, grad, optimizer, precision):
    """The first budget for HBM, in steps, that holds some chunks of a flat buffer's parameters and not all."""

    def under(hbm, cpu, param):
        budgets = {"hbm": hbm, "cpu": cpu, "activations": "1MiB"}
        return settings(
            path, (param, grad, optimizer), budgets=budgets, optimizer={"chunk_size": "64KiB"}, prefetch={"units": 1}, precision=precision
        )

    def plan(*limits):
        return preview(tiny_gpt(recompute=True, **DEEP), Config(**under(*limits))).plan

    away = plan("1GiB", "256MiB", "nvme")
    cpu = 256 * MiB if grad == "cpu" else away.held_bytes(Tier.CPU) + 256 * KiB
    for extra in range(128 * KiB, 4 * MiB, 128 * KiB):
        limits = (away.held_bytes(Tier.HBM) + extra, cpu, "auto")
        homes = {}
        for spec in plan(*limits).specs:
            if spec.key.group is Group.PARAM:
                homes.setdefault((spec.key.unit, spec.key.flat), set()).add(spec.tier)
        if any(Tier.HBM in tiers and len(tiers) > 1 for tiers in homes.values()):
            return under(*limits)
    raise AssertionError("no budget divides a flat buffer")


@pytest.mark.parametrize("homes", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_flat_buffer_that_rests_partly_in_hbm_trains_as_one_that_rests_in_one_place(tmp_path, homes, dtype):
    """Its chunks in HBM are copied for each visit after the update that was queued for them, not before."""
    precision = {"dtype": dtype}
    losses, values = train(split_settings(tmp_path, *homes, precision), **DEEP)
    expected_losses, expected = train(settings(tmp_path, ("cpu", *homes), precision=precision), **DEEP)
    assert losses == expected_losses
    assert all(torch.equal(values[name], expected[name]) for name in values)


def test_hbm_at_rest_is_nothing_when_everything_is_on_nvme(tmp_path):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with infinity.initialize(tiny_gpt(), settings(tmp_path, ("nvme", "nvme", "nvme"))) as engine:
        for ids in batches(2):
            engine.model(ids).backward()
            engine.optimizer.step()
        torch.cuda.synchronize()
        engine._parts.scheduler.invalidate()
        held = torch.cuda.memory_allocated() - before
        live = engine.plan.working_bytes(Tier.HBM) - engine.plan.working_bytes(Tier.HBM, ACTIVATIONS)
        assert held <= live + 2**20
        assert engine.statistics()["bytes"][Lane.UPLOAD] > 0


def test_nobody_but_the_training_threads_moves_what_rests_in_pinned_memory(tmp_path, monkeypatch):
    """Other threads would take turns with the one that launches compute."""
    starters = set()
    begin, finish = Ascent.begin, GradMover._finish
    monkeypatch.setattr(Ascent, "begin", lambda *args: (starters.add(threading.current_thread().name), begin(*args)))
    monkeypatch.setattr(GradMover, "_finish", lambda *args: (starters.add(threading.current_thread().name), finish(*args)))
    train(settings(tmp_path, ("cpu", "cpu", "cpu")))
    assert starters
    assert not {name for name in starters if name.startswith("infinity")}


class Asks(torch.nn.Module):
    """Notes whether the collector is on while a forward runs; may fail."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.fails = torch.nn.Linear(4, 4), [], False

    def forward(self, x):
        self.seen.append(gc.isenabled())
        if self.fails:
            raise RuntimeError("out of memory")
        return self.linear(x).sum()


def test_pythons_collector_waits_for_a_forward_and_no_longer(tmp_path):
    x = torch.ones(2, 4, device="cuda")
    with infinity.initialize(Asks(), settings(tmp_path, PLACEMENTS[0])) as engine:
        loss = engine.model(x)
        assert gc.isenabled()
        loss.backward()
        engine.model.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.model(x)
        assert gc.isenabled() and engine.model.seen == [False, False]


def test_a_checkpoint_of_one_placement_goes_on_in_another(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    data = batches(6)

    def steps(engine, some):
        losses = []
        for ids in some:
            loss = engine.model(ids)
            loss.backward()
            engine.optimizer.step()
            losses.append(loss.item())
        return losses

    with infinity.initialize(tiny_gpt(), settings(tmp_path / "a", ("nvme", "cpu", "nvme"))) as engine:
        steps(engine, data[:3])
        engine.save(tmp_path / "checkpoint").wait()
        want = steps(engine, data[3:])
    config = settings(tmp_path / "b", ("hbm", "hbm", "cpu"))
    with infinity.initialize(tiny_gpt(1), config, checkpoint=tmp_path / "checkpoint") as engine:
        assert engine.global_step == 3
        assert steps(engine, data[3:]) == want
