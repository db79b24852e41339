"""Any way of using blocks in a forward gives plain PyTorch's gradients: generated programs, plain against hooked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.in_memory import attach

BLOCKS = 4
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))

BLOCK = st.integers(0, BLOCKS - 1)
STEP = st.one_of(
    st.tuples(st.just("call"), BLOCK),
    st.tuples(st.just("part"), BLOCK),
    st.tuples(st.just("functional"), BLOCK),
    st.tuples(st.just("skip"), st.integers(0, 8)),
    st.tuples(st.just("no grad"), BLOCK),
)
PROGRAM = st.recursive(
    st.lists(STEP, min_size=1, max_size=4),
    lambda inner: st.lists(st.one_of(STEP, st.tuples(st.sampled_from(["checkpoint", "reentrant"]), inner)), min_size=1, max_size=5),
    max_leaves=4,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x))) * self.scale


class Runs(nn.Module):
    """Interprets a program: its forward calls blocks, parts of them and their weights in any order."""

    def __init__(self, program, frozen):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.gain, self.program = nn.Parameter(torch.ones(4)), program
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x):
        return self.run(self.program, x) * self.gain

    def run(self, program, x):
        seen = [x]
        for kind, what in program:
            x = self.step(kind, what, x, seen)
            seen.append(x)
        return x

    def step(self, kind, what, x, seen):
        if kind == "call":
            return self.blocks[what](x)
        if kind == "part":
            return self.blocks[what].linear(x)
        if kind == "functional":
            return torch.sin(nn.functional.linear(x, self.blocks[what].linear.weight)) * self.blocks[what].scale
        if kind == "skip":
            return x + seen[what % len(seen)]
        if kind == "no grad":
            with torch.no_grad():
                change = self.blocks[what](x)
            return x + change
        return checkpoint(lambda inner: self.run(what, inner), x, use_reentrant=kind == "reentrant")


def uses_parts_in_checkpoints(program, inside):
    """Autograd then saves parameters as themselves, and units stay live for it."""
    return any(
        uses_parts_in_checkpoints(what, True) if kind in ("checkpoint", "reentrant") else inside and kind in ("part", "functional")
        for kind, what in program
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@settings(max_examples=150)
@given(PROGRAM, st.sets(BLOCK, max_size=2), st.integers(1, 2), st.booleans())
def test_programs_train_like_plain_pytorch(program, frozen, forwards, around):
    torch.manual_seed(1)
    plain = Runs(program, frozen)
    torch.manual_seed(1)
    model = Runs(program, frozen)
    hooks, residency = attach(model)
    for net in (plain, model):
        x = X.clone().requires_grad_()
        call = (lambda y, net=net: checkpoint(net, y, use_reentrant=False)) if around else net
        losses = [call(x * (k + 1)).pow(2).sum() for k in range(forwards)]
        sum(losses).backward()
        if net is plain:
            want, want_x = sum(losses).item(), x.grad
    assert sum(losses).item() == want
    torch.testing.assert_close(x.grad, want_x)
    for name, param in plain.named_parameters():
        got = residency.grad(name)
        assert (got is None) == (param.grad is None), name
        if got is not None:
            torch.testing.assert_close(got, param.grad, msg=name)
    assert not residency.live
    assert residency.live_peak <= (BLOCKS + 1 if uses_parts_in_checkpoints(program, around) else 3)
    assert not hooks._calls and not hooks._armed
