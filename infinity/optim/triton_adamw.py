"""AdamW on the GPU in one pass over memory: unscale, clip, AdamW, cast. Equal to the native CPU kernel to the bit.

Imported where Triton is, which comes with torch's builds for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from infinity.native import AdamSegment
from infinity.optim.adamw import States

_BLOCK = 1024
"""Elements per program: 8 for each of 128 threads, so that loads and stores take 16 bytes where a segment's length allows."""


@triton.jit
def _adamw(
    master,  # pointers to the first of `numel` elements
    exp_avg,
    exp_avg_sq,
    grad,
    param_out,
    numel,
    grad_scale,  # fp32 from here on, as in native/plain.c
    decay,
    weight,
    beta2,
    square_weight,
    correction2_sqrt,
    eps,
    minus_step_size,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad + at, mask=inside).to(tl.float32) * grad_scale
    p = tl.load(master + at, mask=inside) * decay
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)

    m = tl.fma(weight, g - m, m if NEAR else g)
    v = tl.fma(square_weight * g, g, v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction2_sqrt) + eps
    p += tl.div_rn(minus_step_size * m, denominator)

    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    tl.store(param_out + at, p.to(param_out.dtype.element_ty), mask=inside)


class TritonKernel:
    """One launch per segment on the current stream. Compiled at the first use of each combination of dtypes, and kept on disk by Triton."""

    def update(self, states: States, grad: Tensor, param_out: Tensor, segments: Sequence[AdamSegment], grad_scale: float) -> None:
        with torch.cuda.device(grad.device):  # Triton launches on the current one
            for segment in segments:
                start, stop, *rule = segment
                numel, tensors = stop - start, (*states, grad, param_out)
                _adamw[(triton.cdiv(numel, _BLOCK),)](
                    *(tensors if numel == grad.numel() else [tensor[start:stop] for tensor in tensors]),
                    numel,
                    grad_scale,
                    **_scalars(*rule),
                    BLOCK=_BLOCK,
                    enable_fp_fusion=False,  # a multiplication and an addition are one rounding where tl.fma says so, and nowhere else
                )


@lru_cache(maxsize=16)
def _scalars(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Mapping[str, float | bool]:
    """In fp64 to the end, rounded to fp32 once, as native/adam.c does. The parameters of a group mostly have the same."""
    from_mean = np.float32(1 - beta1)
    near = bool(from_mean < 0.5)  # the mean's own end is the nearer one to interpolate from
    return {
        "decay": 1 - lr * weight_decay,
        "weight": float(from_mean if near else from_mean - np.float32(1)),
        "beta2": beta2,
        "square_weight": 1 - beta2,
        "correction2_sqrt": math.sqrt(1 - beta2**step),
        "eps": eps,
        "minus_step_size": -(lr / (1 - beta1**step)),
        "NEAR": near,
    }
