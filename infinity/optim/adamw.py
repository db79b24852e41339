"""AdamW on flat tensors: the formula to read, and the kernel for states in CPU memory. That for HBM is in gpu_adamw.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from infinity import native
from infinity.native import AdamSegment

States = tuple[Tensor, ...]
"""A chunk's optimizer states, [numel] fp32 each, in the order of kinds.OPTIMIZER_STATES."""


def reference_step(
    master: Tensor,  # [numel] fp32, in place
    exp_avg: Tensor,  # [numel] fp32, in place
    exp_avg_sq: Tensor,  # [numel] fp32, in place
    grad: Tensor,  # [numel] fp32, bf16 or fp16
    param_out: Tensor | None,  # [numel] fp32, bf16 or fp16, written
    segments: Iterable[AdamSegment],
    grad_scale: float = 1.0,
) -> None:
    """One AdamW update of the elements in `segments`; the others are left alone.

    Loshchilov and Hutter 2019, algorithm 2, with the decay multiplied by the learning rate as torch.optim.AdamW does.
    """
    for start, stop, lr, beta1, beta2, eps, weight_decay, step in segments:
        param, mean, square = master[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]
        g = grad[start:stop].float() * grad_scale

        param.mul_(1 - lr * weight_decay)
        mean.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)

        mean_correction = 1 - beta1**step
        square_correction = 1 - beta2**step
        denominator = (square.sqrt() / math.sqrt(square_correction)).add_(eps)
        param.addcdiv_(mean, denominator, value=-lr / mean_correction)

        if param_out is not None:
            param_out[start:stop].copy_(param)


class Kernel(Protocol):
    """An optimizer's arithmetic on one chunk, on the device where the chunk's states are."""

    def update(self, states: States, grad: Tensor, param_out: Tensor, segments: Sequence[AdamSegment], grad_scale: float) -> None:
        """Update `states` in place and write the new parameters, for the elements in `segments` only."""


class CpuKernel:
    """One pass over memory: unscale, clip, AdamW, cast. Runs on a native thread pool without the GIL."""

    def __init__(self, pool: native.ThreadPool) -> None:
        self._pool = pool

    def update(self, states: States, grad: Tensor, param_out: Tensor, segments: Sequence[AdamSegment], grad_scale: float) -> None:
        master, exp_avg, exp_avg_sq = states
        native.adamw(self._pool, master, exp_avg, exp_avg_sq, grad, param_out, segments, grad_scale=grad_scale)
