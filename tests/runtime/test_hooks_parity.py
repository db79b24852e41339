"""A hooked model computes what the plain one does, to the bit, with few units live."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from infinity.runtime import saved
from tests.runtime.parity import check_parity

IDS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(0))
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
ADJACENCY = torch.rand(6, 6, generator=torch.Generator().manual_seed(4))
IMAGE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self, d=16, n=6, recompute="no", functional_head=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, d), nn.Linear(d, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks, self.recompute, self.functional_head = nn.ModuleList(Block(d) for _ in range(n)), recompute, functional_head

    def forward(self, ids):
        x = self.embed(ids)
        if self.recompute == "segments":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        elif self.recompute == "reentrant segments":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True)
        else:
            for block in self.blocks:
                x = block(x) if self.recompute == "no" else checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return nn.functional.linear(x, self.embed.weight) if self.functional_head else self.head(x)


def loss_of(out):
    return out.square().mean()


@pytest.mark.parametrize("recompute", ["no", "yes", "reentrant", "segments", "reentrant segments"])
@pytest.mark.parametrize("functional_head", [False, True])
@pytest.mark.parametrize("threshold_numel", [100, 1 << 30])
def test_tied_weights(recompute, functional_head, threshold_numel):
    check_parity(
        lambda: Tied(recompute=recompute, functional_head=functional_head), lambda m: loss_of(m(IDS)), threshold_numel=threshold_numel, steps=2
    )


def test_tied_weights_arrive_once_per_use():
    residency = check_parity(Tied, lambda m: loss_of(m(IDS)), threshold_numel=100)
    assert [flat for flat in residency.reductions if flat[0] == "embed"] == [("embed", 0, frozenset({0}))]


class InsideCheckpoint(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.norm, self.up, self.down, self.reentrant = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), reentrant

    def mlp(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_unit(reentrant):
    check_parity(lambda: nn.Sequential(*[InsideCheckpoint(reentrant) for _ in range(4)]), lambda m: m(X).pow(2).sum())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(reentrant):
    check_parity(
        lambda: nn.Sequential(*[Block(8) for _ in range(4)]),
        lambda m: checkpoint(m, X.clone().requires_grad_(), use_reentrant=reentrant).pow(2).sum(),
    )


def test_nested_checkpoints():
    def run(m):
        inner = lambda part, x: checkpoint(part, x, use_reentrant=False)  # noqa: E731
        outer = lambda x: inner(m[1], inner(m[0], x))  # noqa: E731
        return inner(m[2], checkpoint(outer, X, use_reentrant=False)).pow(2).sum()

    check_parity(lambda: nn.Sequential(*[Block(8) for _ in range(3)]), run)


@pytest.mark.parametrize("recompute", ["no", "yes", "reentrant", "segments"])
def test_a_torch_that_hides_its_saved_tensor_hooks(monkeypatch, recompute):
    monkeypatch.setattr(saved, "_TOP", None)
    check_parity(lambda: Tied(recompute=recompute), lambda m: loss_of(m(IDS)), threshold_numel=100, steps=2, most=4)
    around = lambda m: checkpoint(m, IDS, use_reentrant=False)  # noqa: E731
    check_parity(lambda: Tied(recompute=recompute), lambda m: loss_of(around(m)), threshold_numel=100, most=4)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x, adjacency):
        for layer in self.layers:
            x = torch.relu(adjacency @ layer(x))
        return self.out(x)


def test_two_forwards_before_a_backward():
    check_parity(Graph, lambda m: m(X, ADJACENCY).sum() + m(2 * X, ADJACENCY).pow(2).sum())


def test_sparse_inputs():
    check_parity(Graph, lambda m: m(X, ADJACENCY.to_sparse_coo()).pow(2).sum())


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return x + self.linears[1](x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(Expert() for _ in range(6)), nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_experts_that_get_no_tokens_get_no_gradient():
    residency = check_parity(Experts, lambda m: m(X).sum())
    assert residency.grad("layers.0.linears.0.weight") is None


def test_experts_in_units_of_their_own():
    check_parity(Experts, lambda m: m(X).sum(), max_unit_bytes=300)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 1)

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.out(self.blocks[1](x))


def test_a_block_used_three_times():
    check_parity(Reused, lambda m: m(X.clone().requires_grad_()).sum())


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.w.conj().T


def test_complex_weights_used_conjugated():
    z = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
    check_parity(lambda: nn.Sequential(Conjugate(), Conjugate(), Conjugate()), lambda m: m(z).abs().pow(2).sum())


def test_weight_norm():
    check_parity(lambda: nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(5)]), lambda m: m(X).pow(2).sum())


def test_convolutions_with_batch_norm_and_in_place_activations():
    def conv():
        stage = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3), nn.BatchNorm2d(o), nn.ReLU(inplace=True))  # noqa: E731
        return nn.Sequential(stage(3, 8), stage(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    check_parity(conv, lambda m: m(IMAGE).square().mean(), steps=2)


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.mul_(0.5).add_(1))


def test_a_unit_that_changes_its_input_in_place():
    check_parity(lambda: nn.Sequential(*[ChangesItsInput() for _ in range(4)]), lambda m: m(X.clone()).pow(2).sum())


class Skips(nn.Module):
    """Every block sees the first block's output too: one tensor that many units use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(5))

    def forward(self, x):
        x = first = self.first(x)
        for block in self.blocks:
            x = x + block(x, first)
        return x * first


def test_an_input_shared_by_all_units():
    check_parity(Skips, lambda m: m(X).pow(2).sum())


def test_two_towers():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ModuleList(Block(8) for _ in range(3)), nn.ModuleList(Block(8) for _ in range(3))

        def forward(self, x):
            a = b = x
            for left, right in zip(self.a, self.b, strict=True):
                a, b = left(a), right(b)
            return (a * b).sum()

    check_parity(Towers, lambda m: m(X))


def test_recurrent_layers():
    build = lambda: nn.ModuleDict({"rnn": nn.LSTM(8, 8, num_layers=2), "out": nn.Linear(8, 2)})  # noqa: E731
    check_parity(build, lambda m: m["out"](m["rnn"](X.view(2, 3, 8))[0]).pow(2).sum())


def test_attention_that_reads_its_childs_weights():
    layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)  # noqa: E731
    check_parity(lambda: nn.Sequential(*[layer() for _ in range(3)]), lambda m: m(X.view(2, 3, 8)).pow(2).sum())


def test_sparse_gradients():
    check_parity(lambda: nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)), lambda m: m(IDS).pow(2).sum())


def test_several_dtypes_and_frozen_parameters_in_one_unit():
    def build():
        blocks = nn.Sequential(*[Block(8) for _ in range(3)])
        for block in blocks:
            block.norm.double()
            block.up.bias.requires_grad_(False)
            block.norm.register_forward_pre_hook(lambda m, args: (args[0].double(),))
            block.norm.register_forward_hook(lambda m, args, out: out.float())
        return blocks

    residency = check_parity(build, lambda m: m(X).pow(2).sum())
    assert all(len(unit.layout.flats) == 3 for unit in residency.units)


def test_gradient_penalty():
    def run(m):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).tanh().sum(), x, create_graph=True)
        return slope.pow(2).sum() + m(x).sum()

    check_parity(lambda: nn.Sequential(*[Block(8) for _ in range(3)]), run, most=4)


def test_a_backward_inside_forward():
    class Adapts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Sequential(Block(8), Block(8)), nn.Sequential(Block(8), Block(8))

        def forward(self, x):
            x = x.clone().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.inner(x).pow(2).sum(), x)
            return self.outer(self.inner(x + slope)).pow(2).sum()

    check_parity(Adapts, lambda m: m(X), most=4)
