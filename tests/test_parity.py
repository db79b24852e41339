"""Training through the engine is training with torch: to 2 ulp a step, and no further apart than torch's own variants later."""

from __future__ import annotations

import pytest
import torch
from models import batches, tiny_gpt

import infinity

PLACEMENTS = {
    "cpu": {"param": "cpu", "grad": "cpu", "optimizer": "cpu"},
    "nvme": {"param": "nvme", "grad": "nvme", "optimizer": "nvme"},
    "param on nvme": {"param": "nvme", "grad": "cpu", "optimizer": "cpu"},
    "states on nvme": {"param": "cpu", "grad": "cpu", "optimizer": "nvme"},
    "grads on nvme": {"param": "cpu", "grad": "nvme", "optimizer": "cpu"},
}
MIXED_BUDGET = 1_500_000
"""Bytes: some chunks of one unit rest on the CPU and the others on NVMe."""


def settings(tmp_path, placement="nvme", **sections):
    config = {
        "device": "cpu",
        "budgets": {"cpu": MIXED_BUDGET if placement == "mixed" else "64MiB"},
        "nvme": {"paths": [str(tmp_path)]},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "chunk_size": "16KiB"},
        "precision": {"dtype": "fp32"},
        "store": {"resume": "never"},
        "placement": PLACEMENTS.get(placement, {}),
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys}
    return config


def ulp_distance(a, b):
    """How many floats lie between, element by element."""

    def ordered(x):
        bits = x.contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(a) - ordered(b)).abs().max().item()


def decay_groups(named):
    named = list(named)
    return [
        {"params": [p for n, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def values_of(engine):
    with engine.gathered(engine.model):
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def test_one_step_from_equal_state_is_within_2_ulp_of_torch(tmp_path):
    plain, data = tiny_gpt(), batches(1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    plain(data[0]).backward()
    optimizer.step()
    with infinity.initialize(tiny_gpt(), settings(tmp_path)) as engine:
        engine.model(data[0]).backward()
        engine.optimizer.step()
        after = values_of(engine)
    for name, want in plain.named_parameters():
        assert ulp_distance(after[name], want.detach()) <= 2, name


def train_plain(steps, accumulation, **kwargs):
    model = tiny_gpt(recompute=True)
    optimizer = torch.optim.AdamW(decay_groups(model.named_parameters()), lr=1e-3, **kwargs)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    data = iter(batches(steps * accumulation))
    for _ in range(steps):
        for _ in range(accumulation):
            (model(next(data)) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_engine(config, steps, accumulation):
    with infinity.initialize(tiny_gpt(recompute=True), config, param_groups=decay_groups) as engine:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, max_lr=3e-3, total_steps=steps)
        data = iter(batches(steps * accumulation))
        for _ in range(steps):
            for _ in range(accumulation):
                (engine.model(next(data)) / accumulation).backward()
            engine.optimizer.step()
            scheduler.step()
            engine.optimizer.zero_grad()
        return values_of(engine)


def distance(a, b):
    return sum((a[name].double() - b[name].double()).square().sum() for name in a).sqrt().item()


@pytest.fixture(scope="module")
def torch_runs():
    return train_plain(50, 3, fused=True), train_plain(50, 3, foreach=False)


@pytest.fixture(scope="module")
def results():
    """Parameters after training, by placement."""
    return {}


@pytest.mark.parametrize("placement", [*PLACEMENTS, "mixed"])
def test_50_steps_stay_as_close_to_torch_as_torchs_own_variants(tmp_path, torch_runs, results, placement):
    fused, loop = torch_runs
    config = settings(tmp_path, placement, optimizer={"max_grad_norm": 0.5}, train={"accumulation": 3})
    ours = results[placement] = train_engine(config, 50, 3)
    assert distance(ours, fused) <= 3 * distance(fused, loop)
    first = next(iter(results.values()))
    assert all(torch.equal(ours[name], first[name]) for name in first), "where a state rests changes what is computed"


def plain_mixed_precision(dtype, steps, scale=1.0):
    """What the engine does in bf16 and fp16, as a loop anyone can read: low-precision weights, fp32 masters."""
    model = tiny_gpt()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, fused=True)
    losses = []
    for ids in batches(steps):
        loss = model(ids)
        (loss * scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float() / scale, None
        optimizer.step()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data.copy_(master.data)
        losses.append(loss.item())
    return losses, {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("placement", ["cpu", "nvme", "mixed"])
def test_mixed_precision_equals_a_plain_loop_with_fp32_masters(tmp_path, dtype, placement):
    """Same gradients in, same formula: parameters agree to the rounding of the low precision after 20 steps."""
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    want_losses, want = plain_mixed_precision(torch_dtype, 20, scale=1.0 if dtype == "bf16" else 1024.0)
    config = settings(tmp_path, placement, precision={"dtype": dtype, **({"init_scale": 1024.0} if dtype == "fp16" else {})})
    losses = []
    with infinity.initialize(tiny_gpt(), config) as engine:
        for ids in batches(20):
            loss = engine.model(ids)
            engine.scale(loss).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        got = values_of(engine)
    assert losses[0] == want_losses[0]
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value, rtol=2 * torch.finfo(torch_dtype).eps, atol=1e-4)


def test_parameters_without_gradient_are_left_untouched(tmp_path):
    class Switch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x, left):
            return (self.left if left else self.right)(x).square().mean()

    def make():
        torch.manual_seed(0)
        return Switch()

    plain, x = make(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    with infinity.initialize(make(), settings(tmp_path, optimizer={"lr": 1e-2})) as engine:
        for left in (True, True, False, True):
            optimizer.zero_grad()
            plain(x, left).backward()
            optimizer.step()
            engine.model(x, left).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        got = values_of(engine)
    for name, want in plain.named_parameters():
        torch.testing.assert_close(got[name], want.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("on_device", [False, True], ids=["summed by the mover", "summed where computed, as on a GPU"])
@pytest.mark.parametrize("placement", ["cpu", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_norm_is_torchs(tmp_path, placement, on_device, accumulation):
    """Gradients that came down whole, chunk by chunk, or were added to later: one norm."""
    plain = tiny_gpt()
    with infinity.initialize(tiny_gpt(), settings(tmp_path, placement)) as engine:
        engine._parts.grads._sums_on_device = on_device
        for _ in range(2):
            for ids in batches(accumulation):
                plain(ids).backward()
                engine.model(ids).backward()
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            torch.testing.assert_close(engine.clip_grad_norm_(1e9), want, rtol=1e-6, atol=0.0)
            plain.zero_grad()
            engine.optimizer.zero_grad()
