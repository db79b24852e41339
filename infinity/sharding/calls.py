"""What the ranks' hosts call of torch.distributed, one after the other, so that whoever waits may look up in between."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By their names since torch 2.13, or the older ones."""


class Call(NamedTuple):
    """One that has been made."""

    work: dist.Work | None
    """Under way; None where the device has it, on the current stream."""
    group: Any
    """In which it is done."""
    tensors: tuple[torch.Tensor, ...]
    """Read and written until then."""


Calls = Generator[Call, None, T]
"""The way to a T: each call is over before the next is made."""


def no_calls() -> Calls[None]:
    yield from ()


def finish(calls: Calls[T], wait: Callable[[Call, dist.Work], object]) -> T:
    """One after the other, to their end; `wait` for each that the device does not have."""
    while True:
        try:
            call = next(calls)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if call.work is not None:
            wait(call, call.work)


def telling(group: Any, mine: T) -> Calls[list[T]]:
    """What each rank of the group has, in its order; anything that pickles. torch's all_gather_object waits by itself."""
    said = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    size = dist.get_world_size(group)
    length, lengths = torch.tensor([said.numel()]), torch.empty(size, dtype=torch.int64)
    yield Call(all_gather(lengths, length, group=group, async_op=True), group, (lengths, length))
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: said.numel()] = said
    everybodys = torch.empty(size * padded.numel(), dtype=torch.uint8)
    yield Call(all_gather(everybodys, padded, group=group, async_op=True), group, (everybodys, padded))
    parts = everybodys.view(size, -1)
    return [pickle.loads(part[:count].numpy().tobytes()) for part, count in zip(parts, lengths.tolist(), strict=True)]
