"""AdamW for states in HBM: in one pass over memory where Triton works, by torch's fused AdamW elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.native import AdamSegment
from infinity.optim.adamw import Kernel, States

PIECE_NUMEL = 1 << 22
"""Elements that torch's kernel takes at a time: one gradient of so many in fp32 is what it borrows."""

_log = logging.getLogger(__name__)


class GpuKernel:
    """Chooses at the first update of each pair of dtypes, so that nothing is compiled that is not used. Works on the current stream."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[torch.dtype, torch.dtype], Kernel] = {}

    def update(self, states: States, grad: Tensor, param_out: Tensor, segments: Sequence[AdamSegment], grad_scale: float) -> None:
        dtypes = grad.dtype, param_out.dtype
        if dtypes not in self._chosen:
            self._chosen[dtypes] = _choose(grad.device, *dtypes)
        self._chosen[dtypes].update(states, grad, param_out, segments, grad_scale)


def _choose(device: torch.device, grad_dtype: torch.dtype, param_dtype: torch.dtype) -> Kernel:
    """Triton's kernel if an update of a few zeros succeeds."""
    try:
        from infinity.optim.triton_adamw import TritonKernel  # comes with torch's builds for GPUs only

        kernel = TritonKernel()
        numel = 64
        zeros = torch.zeros(numel, device=device)
        trial = AdamSegment(0, numel, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
        kernel.update((zeros, zeros.clone(), zeros.clone()), zeros.to(grad_dtype), zeros.to(param_dtype), [trial], 1.0)
        return kernel
    except Exception as error:  # of an import, of Triton, or of the compilers that it calls
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        _log.warning("Triton does not work here (%s): torch's fused AdamW updates what rests in HBM, slower and with other last bits", found)
        return TorchKernel()


class TorchKernel:
    """Four launches or so per piece: gradient to fp32 times scale, torch's fused AdamW, cast. Borrows from torch's allocator while it runs."""

    def update(self, states: States, grad: Tensor, param_out: Tensor, segments: Sequence[AdamSegment], grad_scale: float) -> None:
        # A one-element tensor, unlike a number, takes part in type promotion: the product is fp32 in a single pass.
        scale = torch.full((1,), grad_scale, dtype=torch.float32, device=grad.device)
        for segment in segments:
            for start in range(segment.start, segment.stop, PIECE_NUMEL):
                run = slice(start, min(start + PIECE_NUMEL, segment.stop))
                _fused_adamw([tensor[run] for tensor in states], torch.mul(grad[run], scale), segment)
                param_out[run].copy_(states[0][run])


def _fused_adamw(states: Sequence[Tensor], grad: Tensor, rule: AdamSegment) -> None:
    """torch's multi-tensor kernel on one tensor of each kind."""
    master, exp_avg, exp_avg_sq = states
    torch._fused_adamw_(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(rule.step), dtype=torch.float32, device=master.device)],
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )
