"""The kernels against the formula, and the formula against torch."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import native
from infinity.native import AdamSegment
from infinity.optim import gpu_adamw
from infinity.optim.adamw import CpuKernel, Kernel, reference_step
from infinity.optim.gpu_adamw import GpuKernel, TorchKernel
from infinity.storage.chunks import as_bytes

POOL = native.ThreadPool(2)
KERNELS = [pytest.param(CpuKernel(POOL), id="cpu"), pytest.param(TorchKernel(), id="torch")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULE = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def states_of(numel: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)


def test_the_formula_is_torchs_to_the_bit():
    ours = (torch.linspace(-2, 2, 1000), torch.zeros(1000), torch.zeros(1000))
    param = torch.nn.Parameter(ours[0].clone())
    torchs = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(1, 21):
        param.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        torchs.step()
        reference_step(*ours, param.grad, None, [AdamSegment(0, 1000, **RULE, step=step)])
        assert torch.equal(ours[0], param.detach())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_kernel_computes_the_formula_for_its_segments_and_nothing_else(kernel: Kernel, grad_dtype: torch.dtype, out_dtype: torch.dtype):
    numel = 5000
    parts = [AdamSegment(3, 1200, **RULE, step=1), AdamSegment(1200, 1201, **{**RULE, "lr": 0.5}, step=7), AdamSegment(2048, 4999, **RULE, step=1)]
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(5)).to(grad_dtype)
    expected, got = states_of(numel), states_of(numel)
    expected_out, out = torch.full((numel,), 7.0, dtype=out_dtype), torch.full((numel,), 7.0, dtype=out_dtype)
    reference_step(*expected, grad, expected_out, parts, grad_scale=0.25)
    kernel.update(got, grad, out, parts, 0.25)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-7, atol=1e-7)
    inside = torch.zeros(numel, dtype=torch.bool)
    for part in parts:
        inside[part.start : part.stop] = True
    assert torch.equal(out[inside], got[0][inside].to(out_dtype))
    assert torch.equal(out[~inside], torch.full_like(out[~inside], 7.0))
    for ours, before in zip(got, states_of(numel), strict=True):
        assert torch.equal(ours[~inside], before[~inside])


@pytest.mark.parametrize("kernel", KERNELS)
def test_zeros_stay_zeros(kernel: Kernel):
    """What lets a segment run across the padding between parameters."""
    states = (torch.zeros(300), torch.zeros(300), torch.zeros(300))
    out = torch.zeros(300, dtype=torch.bfloat16)
    for step in range(1, 4):
        kernel.update(states, torch.zeros(300, dtype=torch.bfloat16), out, [AdamSegment(0, 300, **RULE, step=step)], 0.5)
    assert not any(tensor.any() for tensor in (*states, out))


@given(
    cuts=st.lists(st.integers(0, 3000), min_size=2, max_size=12, unique=True).map(sorted),
    steps=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    scale=st.sampled_from([1.0, 1 / 65536, 0.37]),
)
@settings(max_examples=40, deadline=None)
def test_the_cpu_kernel_and_torchs_agree_on_any_segments(cuts: list[int], steps: list[int], scale: float):
    parts = [AdamSegment(a, b, **RULE, step=step) for a, b, step in zip(cuts[::2], cuts[1::2], steps, strict=False)]
    grad = torch.randn(3000, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, torchs = states_of(3000), states_of(3000)
    outs = torch.zeros(3000, dtype=torch.bfloat16), torch.zeros(3000, dtype=torch.bfloat16)
    CpuKernel(POOL).update(ours, grad, outs[0], parts, scale)
    TorchKernel().update(torchs, grad, outs[1], parts, scale)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-7, atol=1e-7)


def test_torchs_kernel_takes_a_long_segment_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_adamw, "PIECE_NUMEL", 1000)
    taken = []
    fused = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda params, *rest, **rule: (taken.append(params[0].numel()), fused(params, *rest, **rule)))
    parts = [AdamSegment(3, 2503, **RULE, step=2)]
    expected, got = states_of(3000), states_of(3000)
    reference_step(*expected, torch.ones(3000), None, parts)
    TorchKernel().update(got, torch.ones(3000), torch.zeros(3000), parts, 1.0)
    assert taken == [1000, 1000, 500]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-7, atol=1e-7)


def test_where_triton_does_not_work_torchs_kernel_updates_and_the_log_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "infinity.optim.triton_adamw", raising=False)
    parts = [AdamSegment(0, 100, **RULE, step=2)]
    ours, torchs = states_of(100), states_of(100)
    kernel = GpuKernel()
    for _ in range(2):
        kernel.update(ours, torch.ones(100), torch.zeros(100), parts, 1.0)
        TorchKernel().update(torchs, torch.ones(100), torch.zeros(100), parts, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(ours, torchs, strict=True))
    (message,) = caplog.messages
    assert "Triton does not work here" in message


NUMEL = 100_003
WIDE = torch.logspace(-44, 3, NUMEL)
"""From the smallest denormals on."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("beta1", "scale"), [(0.9, 0.37), (0.3, 0.37), (0.9, 1.0), (0.9, 1 / 65536)])
def test_on_cuda_the_gpu_kernel_is_the_cpu_kernel_to_the_bit(grad_dtype: torch.dtype, out_dtype: torch.dtype, beta1: float, scale: float):
    rule = {**RULE, "beta1": beta1}
    ends = [(0, 5000, 3), (5003, 5004, 3), (5120, 90_000, 1000), (90_001, NUMEL, 1)]
    parts = [AdamSegment(start, stop, **rule, step=step) for start, stop, step in ends]
    grad = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)) * WIDE).to(grad_dtype)
    grad[::7] = -0.0
    master, exp_avg, exp_avg_sq = states_of(NUMEL)
    on_cpu = (master, exp_avg * WIDE, exp_avg_sq * WIDE)
    on_cpu[0][::14] = on_cpu[1][::14] = -0.0
    on_gpu = tuple(state.cuda() for state in on_cpu)
    outs = torch.full((NUMEL,), 7.0, dtype=out_dtype), torch.full((NUMEL,), 7.0, dtype=out_dtype, device="cuda")
    CpuKernel(POOL).update(on_cpu, grad, outs[0], parts, scale)
    GpuKernel().update(on_gpu, grad.cuda(), outs[1], parts, scale)
    for cpu, gpu in zip((*on_cpu, outs[0]), (*on_gpu, outs[1]), strict=True):
        assert torch.equal(as_bytes(cpu), as_bytes(gpu.cpu())), "also the sign of a zero"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_on_cuda_torchs_kernel_computes_the_formula(grad_dtype: torch.dtype):
    parts = [AdamSegment(0, 2000, **RULE, step=3), AdamSegment(2304, 5000, **RULE, step=3), AdamSegment(5000, 5100, **RULE, step=1)]
    grad = torch.randn(6000, generator=torch.Generator().manual_seed(5)).to(grad_dtype)
    expected, expected_out = states_of(6000), torch.zeros(6000, dtype=torch.bfloat16)
    got, out = tuple(state.cuda() for state in states_of(6000)), torch.zeros(6000, dtype=torch.bfloat16, device="cuda")
    reference_step(*expected, grad, expected_out, parts, grad_scale=0.25)
    TorchKernel().update(got, grad.cuda(), out, parts, 0.25)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=5e-7, atol=1e-7)
