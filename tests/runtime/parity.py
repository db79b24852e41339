"""Training a model plain and hooked, and what must be equal afterwards."""

from __future__ import annotations

import torch

from infinity.runtime.saved import can_chain
from tests.runtime.in_memory import attach


def seeded(build):
    def make():
        torch.manual_seed(1)
        return build()

    return make


def check_parity(build, run, *, most=3, steps=1, **options):
    """`run(model)` gives a loss; loss and gradients are plain PyTorch's to the bit, at most `most` units are live. Returns the residency."""
    make = seeded(build)
    plain, hooked = make(), make()
    hooks, residency = attach(hooked, **options)
    for _ in range(steps):
        torch.manual_seed(2)
        loss = run(plain)
        loss.backward()
        torch.manual_seed(2)
        ours = run(hooked)
        ours.backward()
        assert torch.equal(loss, ours)
        assert not residency.live
    wrong = [name for name, param in plain.named_parameters() if not same(param.grad, residency.grad(name))]
    assert not wrong
    assert residency.live_peak <= most or not can_chain()  # before torch 2.8 a checkpoint around several units keeps them live
    assert not hooks._calls and not hooks._armed
    return residency


def same(left, right):
    if left is None or right is None:
        return left is right
    return torch.equal(left.to_dense() if left.is_sparse else left, right)
