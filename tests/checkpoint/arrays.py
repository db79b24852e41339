"""A model's states as arrays in memory: what checkpoints are saved from and loaded into in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.kinds import OPTIMIZER_STATES, State
from infinity.sharding.layout import Interval


@dataclass(frozen=True)
class Named:
    name: str
    state: State
    dtype: torch.dtype
    shape: tuple[int, ...]


class Arrays:
    """Source and sink at once. `trained` parameters have fp32 masters and moments, `frozen` ones themselves."""

    def __init__(self, trained: dict[str, tuple[int, ...]], frozen: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None) -> None:
        named = [Named(name, state, torch.float32, shape) for name, shape in trained.items() for state in OPTIMIZER_STATES]
        named += [Named(name, State.PARAM, dtype, shape) for name, (dtype, shape) in (frozen or {}).items()]
        self.named = {(tensor.name, tensor.state): tensor for tensor in named}
        self.values = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in self.named.items()}
        self.largest_piece = 0
        self.writes = 0

    def fill(self, seed: int = 0) -> Arrays:
        """Random bytes, so that every bit pattern occurs: NaN payloads, denormals, negative zero."""
        generator = torch.Generator().manual_seed(seed)
        for values in self.values.values():
            data = values.view(-1).view(torch.uint8)
            data.copy_(torch.randint(0, 2 if values.dtype == torch.bool else 256, data.shape, generator=generator, dtype=torch.uint8))
        return self

    def tensors(self) -> Sequence[Named]:
        return list(self.named.values())

    def share(self, name: str) -> Sequence[Interval]:
        """All elements, as those of one rank."""
        return [Interval(0, next(values.numel() for (other, _), values in self.values.items() if other == name))]

    held = share

    def read(self, name: str, state: State, start: int, stop: int) -> torch.Tensor:
        self.largest_piece = max(self.largest_piece, (stop - start) * self.named[name, state].dtype.itemsize)
        return self.values[name, state].view(-1)[start:stop].clone()

    def write(self, name: str, state: State, start: int, values: torch.Tensor) -> None:
        self.writes += 1
        self.values[name, state].view(-1)[start : start + len(values)] = values


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return not a.numel() or a.detach().contiguous().as_strided((a.numel(),), (1,)).view(torch.uint8).equal(
        b.detach().contiguous().as_strided((b.numel(),), (1,)).view(torch.uint8)
    )
