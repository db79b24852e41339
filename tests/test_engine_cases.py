"""Every kind of model that the hooks are proven on, through the real engine: what plain PyTorch computes, to the bit, with few units live."""

from __future__ import annotations

import pytest
import torch
from engines import as_real, grads_of, known_rates, mixed, settings, ulp_distance, values_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")

IDS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(0))
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
Z = torch.randn(5, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(6))
ADJACENCY = torch.rand(6, 6, generator=torch.Generator().manual_seed(4))
IMAGE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5))
PREFETCH = 2


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks, self.recompute = nn.ModuleList(Block(32) for _ in range(6)), recompute

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 5)

    def forward(self, x, adjacency):
        for layer in self.layers:
            x = torch.relu(adjacency @ layer(x))
        return self.out(x)


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


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block(8) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        for block in self.blocks[1:]:
            x = block(x)
        return self.out(x)


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.w.conj().T


def conv():
    stages = [nn.Sequential(nn.Conv2d(i, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for i in (3, 8, 8, 8)]
    return nn.Sequential(nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def weight_norm():
    return nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(6)])


def llama(layers=6):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    return transformers.LlamaForCausalLM(config)


def compiled():
    model = llama(4)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return model


def checkpointed(reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def frozen():
    model = llama().requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    return model


def adapters(target):
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=[target]))


def loss_of(model):
    return model(IDS, labels=IDS).loss


CASES = {
    "tied": (lambda: Tied(False), lambda m: m(IDS).square().mean()),
    "tied, recompute": (lambda: Tied(True), lambda m: m(IDS).square().mean()),
    "graph, two forwards": (Graph, lambda m: m(X, ADJACENCY).sum() + m(2 * X, ADJACENCY).pow(2).sum()),
    "graph, sparse adjacency": (Graph, lambda m: m(X, ADJACENCY.to_sparse_coo()).pow(2).sum()),
    "experts never routed to": (Experts, lambda m: m(X).sum()),
    "block reused, reentrant": (Reused, lambda m: m(X.clone().requires_grad_()).sum()),
    "conjugate weights": (lambda: nn.Sequential(*[Conjugate() for _ in range(6)]), lambda m: m(Z.clone().requires_grad_()).abs().pow(2).sum()),
    "weight_norm": (weight_norm, lambda m: m(X).pow(2).sum()),
    "conv": (conv, lambda m: m(IMAGE).square().mean()),
    "llama": (llama, loss_of),
    "llama, checkpoints": (lambda: checkpointed(False), loss_of),
    "llama, reentrant checkpoints": (lambda: checkpointed(True), loss_of),
    "llama, frozen blocks": (frozen, loss_of),
    "llama, LoRA q_proj": (lambda: adapters("q_proj"), loss_of),
    "llama, LoRA down_proj": (lambda: adapters("down_proj"), loss_of),
    "llama, compiled blocks": (compiled, loss_of),
}
SLOW = {"llama, compiled blocks"}


def seeded(build):
    torch.manual_seed(1)
    return build()


def torch_step(model):
    """What torch's fused AdamW makes of the gradients; complex parameters as pairs, which it does not take otherwise."""
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    pairs = {name: nn.Parameter(as_real(p).clone()) for name, p in trained.items()}
    for name, pair in pairs.items():
        pair.grad = as_real(trained[name].grad).clone()
    torch.optim.AdamW(pairs.values(), lr=1e-3, weight_decay=0.1, fused=True).step()
    return {name: pairs[name].detach() if name in pairs else as_real(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_loss_and_gradients_are_plain_pytorchs_to_the_bit(tmp_path, case, placement):
    build, run = CASES[case]
    plain, config = seeded(build), settings(known_rates(tmp_path), prefetch={"units": PREFETCH})
    loss = run(plain)
    loss.backward()
    stepped = torch_step(plain)
    if placement == "mixed":
        config = mixed(config, seeded(build))
    with infinity.initialize(seeded(build), config) as engine:
        ours = run(engine.model)
        ours.backward()
        grads = grads_of(engine)
        live = engine.statistics()["peak_live_units"]
        has_root = any(unit.is_root for unit in engine._parts.units)
        engine.optimizer.step()
        after = values_of(engine)
    assert torch.equal(loss, ours)
    for name, p in plain.named_parameters():
        assert (p.grad is None) == (grads.get(name) is None), f"{name}: a gradient on one side only"
        assert p.grad is None or torch.equal(p.grad, grads[name]), name
        assert ulp_distance(after[name], stepped[name]) <= 2, name
    assert live <= PREFETCH + 2 + has_root
