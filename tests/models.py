"""Small real models that the claims are tested on."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """forward(ids) -> mean next-token loss. The head shares the embedding when `tied`."""

    def __init__(
        self, vocab: int = 61, dim: int = 32, layers: int = 4, heads: int = 4, length: int = 16, tied: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.recompute = recompute
        self.register_buffer("index", torch.arange(length), persistent=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids[:, :-1]) + self.position(self.index[: ids.shape[1] - 1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


def tiny_gpt(seed: int = 0, **options: object) -> TinyGPT:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return TinyGPT(**options)  # type: ignore[arg-type]


def batches(count: int, batch: int = 2, length: int = 16, vocab: int = 61, seed: int = 1) -> list[torch.Tensor]:
    """Learnable token batches: one fixed pool, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(0, vocab, (8, length), generator=generator)
    return [pool[torch.randint(0, 8, (batch,), generator=generator)] for _ in range(count)]


class Keeps(nn.Module):
    """Keeps a view of a weight beyond its call, if it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.keeps, self.kept = False, None

    def forward(self, x):
        if self.keeps:
            self.kept = self.linear.weight.detach().t()
        return self.linear(x).relu()
