"""What autograd saves is freed with its graph, also where no backward comes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.runtime.saved import can_chain
from tests.runtime.in_memory import attach


class Token:
    """Lives as long as the node of autograd's graph that it is left with."""


class Block(nn.Module):
    """Its last operation saves its own output. `made` refers to tokens at its operations."""

    def __init__(self):
        super().__init__()
        self.linear, self.made = nn.Linear(8, 8), []

    def forward(self, x):
        hidden = self.linear(x).exp()
        out = torch.tanh(hidden)
        for tensor in (hidden, out):
            token = tensor.grad_fn.metadata["token"] = Token()
            self.made.append(weakref.ref(token))
        return out


class Model(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block() for _ in range(3)), recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.sum()


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.skipif(not can_chain(), reason="torch before 2.8"))])
def test_a_forward_without_a_backward_leaves_nothing_behind(recompute):
    model = Model(recompute)
    attach(model)
    gc.collect()
    gc.disable()
    try:
        loss = model(torch.ones(2, 8))
        made = [token for block in model.blocks for token in block.made]
        assert len(made) == 6 and all(token() is not None for token in made)
        del loss
        assert not any(token() is not None for token in made)
    finally:
        gc.enable()
