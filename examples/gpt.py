"""A byte-level GPT and the text it learns: the sources of Python's standard library, which every machine has.

The model is plain PyTorch and knows nothing of infinity. `build` and `data` are what `infinity train` is pointed at.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the model is. Elements: about 12 * layers * width**2."""

    layers: int = 6
    heads: int = 8
    width: int = 512
    context: int = 256
    vocabulary: int = 256  # one symbol for each byte
    recompute: bool = False  # keep only each block's input, and compute the rest again in backward


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP; each reads a normalised stream and adds to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes in; a loss out when targets are given, the next byte's logits otherwise."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied: what reads a byte also writes it
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """GPT-2's initial values: 0.02 wide, and the projections into the stream narrower by sqrt(2 * layers)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for projection in (module.attention.out, module.down):
                nn.init.normal_(projection.weight, std=0.02 / (2 * self.shape.layers) ** 0.5)

    def forward(
        self,
        tokens: Tensor,  # [batch, time] int64
        targets: Tensor | None = None,  # [batch, time] int64, each the byte after
    ) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.recompute else block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # nats per byte


def build() -> GPT:
    """The model of tiny.toml."""
    return GPT(Shape())


def build_toy() -> GPT:
    """A model for a quick look: it trains in seconds."""
    return GPT(Shape(layers=3, heads=2, width=64, context=64))


def build_billion() -> GPT:
    """1.3 billion elements, for one GPU."""
    return GPT(Shape(layers=24, heads=16, width=2048, context=1024, recompute=True))


def read_sources() -> Tensor:
    """Every .py file of the standard library end to end, in the order of their names: uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = sorted(path for path in folder.rglob("*.py") if skipped.isdisjoint(path.relative_to(folder).parts))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Windows:
    """Batches of windows of a text, without end, shuffled anew in each pass; a function of seed, rank and batch number alone."""

    def __init__(self, text: Tensor, *, batch_size: int, length: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.text, self.batch_size, self.length = text, batch_size, length
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.batches_per_pass = (len(text) - 1) // length // (batch_size * world_size)
        self.batch = 0  # batches handed out
        if not self.batches_per_pass:
            raise ValueError(f"{len(text)} bytes of text do not fill one batch of {batch_size} windows of {length} on {world_size} ranks")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            number, start = divmod(self.batch, self.batches_per_pass)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            starts = torch.randperm((len(self.text) - 1) // self.length, generator=generator) * self.length
            for place in range(start, self.batches_per_pass):
                first = (place * self.world_size + self.rank) * self.batch_size
                self.batch += 1
                yield self._batch(starts[first : first + self.batch_size])

    def _batch(self, starts: Tensor) -> dict[str, Tensor]:
        rows = torch.stack([self.text[start : start + self.length + 1] for start in starts.tolist()]).long()
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


def data(config, rank: int, world_size: int) -> Windows:
    """Batches for `infinity train`; `config` is the whole configuration."""
    train = config.train
    return Windows(
        read_sources(), batch_size=train.batch_size, length=train.sequence_length, seed=train.seed, rank=rank, world_size=world_size
    )
