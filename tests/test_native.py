"""Claims of the kernels in `infinity.native`: equal to torch to the bit where torch is equal to itself. Memory and disk: test_native_io.py."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity import native
from infinity._native import ffi, lib
from infinity.errors import CapacityError, ClosedError
from infinity.native import AdamSegment, ThreadPool

ISAS = native.available_isas()
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1024, 1039]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-40, 1.17549435e-38, 3.4e38, -3.4e38, 65504.0, 65519.9, 65520.0, 6e-8, 2.98e-8, 1.0, 0.1]

VECTOR_TORCH = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Without vector units torch fuses no multiplications with additions, so it rounds otherwise."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(2) as pool:
        yield pool


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, except that one NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


def special(n: int, seed: int = 0) -> Tensor:
    """Ordinary values with every kind of extraordinary one among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    picks = torch.randint(0, 3 * len(SPECIAL), (n,), generator=generator)
    return torch.where(picks < len(SPECIAL), torch.tensor(SPECIAL)[picks.clamp(max=len(SPECIAL) - 1)], x)


class State:
    """fp32 master, exp_avg, exp_avg_sq of n elements."""

    def __init__(self, n: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.master = torch.randn(n, generator=generator)
        self.exp_avg = torch.randn(n, generator=generator) * 0.1
        self.exp_avg_sq = torch.rand(n, generator=generator) * 0.1

    def clone(self) -> State:
        copy = State(0)
        copy.master, copy.exp_avg, copy.exp_avg_sq = (x.clone() for x in self.tensors())
        return copy

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq


def segment(
    start: int, stop: int, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.01, step: int = 7
) -> AdamSegment:
    return AdamSegment(start, stop, lr, beta1, beta2, 1e-8, weight_decay, step)


def torch_fused(state: State, grads: list[Tensor], one: AdamSegment) -> None:
    """torch.optim.AdamW(fused=True) on `state`, in place; `one.step` is that of the first gradient."""
    leaf = torch.nn.Parameter(state.master)
    optimizer = torch.optim.AdamW([leaf], lr=one.lr, betas=(one.beta1, one.beta2), eps=one.eps, weight_decay=one.weight_decay, fused=True)
    optimizer.state[leaf] = {"step": torch.tensor(float(one.step - 1)), "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    for grad in grads:
        leaf.grad = grad.clone()
        optimizer.step()


# ---- AdamW ----


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("beta1", [0.9, 0.5])
def test_every_isa_matches_the_plain_loop(pool: ThreadPool, isa: str, n: int, grad_dtype: torch.dtype, beta1: float) -> None:
    grad = special(n).to(grad_dtype)
    for out_dtype in (None, *DTYPES):
        plain, fast = State(n), State(n)
        plain.exp_avg_sq[::5] = 1e-42
        fast.exp_avg_sq[::5] = 1e-42
        outs = [None if out_dtype is None else torch.zeros(n, dtype=out_dtype) for _ in range(2)]
        native.adamw(pool, *plain.tensors(), grad, outs[0], [segment(0, n, beta1=beta1)], grad_scale=0.37, isa="plain")
        native.adamw(pool, *fast.tensors(), grad, outs[1], [segment(0, n, beta1=beta1)], grad_scale=0.37, isa=isa)
        assert all(same(a, b) for a, b in zip(plain.tensors(), fast.tensors(), strict=True))
        if outs[0] is not None and outs[1] is not None:
            assert same(outs[0], outs[1])
            assert same(outs[1], fast.master.to(outs[1].dtype))


@pytest.mark.skipif(not VECTOR_TORCH, reason="torch rounds otherwise without AVX2")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.5, 0.95), (0.1, 0.9)])
def test_twenty_steps_equal_torch_fused_to_the_bit(pool: ThreadPool, isa: str, weight_decay: float, beta1: float, beta2: float) -> None:
    n = 1 << 12  # a whole number of vectors for each of torch's threads
    ours, theirs = State(n, 1), State(n, 1)
    grads = [special(n, seed).nan_to_num(posinf=1e30, neginf=-1e30).clamp(-1e15, 1e15) for seed in range(20)]
    torch_fused(theirs, grads, segment(0, n, 1e-3, beta1, beta2, weight_decay, step=1))
    for step, grad in enumerate(grads, start=1):
        native.adamw(pool, *ours.tensors(), grad, None, [segment(0, n, 1e-3, beta1, beta2, weight_decay, step)], isa=isa)
    assert all(same_bits(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))


@pytest.mark.skipif(not VECTOR_TORCH, reason="torch rounds otherwise without AVX2")
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    lr=st.floats(1e-8, 1.0),
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.0, 0.9999),
    weight_decay=st.floats(0.0, 1.0),
    step=st.integers(1, 100_000),
)
@example(n=1, lr=0.875, beta1=0.953125, beta2=0.125, weight_decay=0.0, step=1)  # the parameter changes its sign
@example(n=1, lr=1.0, beta1=0.0, beta2=0.9531417364464134, weight_decay=0.0, step=1)
def test_one_step_is_within_two_ulp_of_torch(n: int, lr: float, beta1: float, beta2: float, weight_decay: float, step: int) -> None:
    """An ulp of the largest: old, new, or what was added. torch gets whole vectors, our segment may end in the middle of one: behind its last
    vector torch computes in another order, and is 3 ulp from itself in the second example.
    """
    one, whole = segment(0, n, lr, beta1, beta2, weight_decay, step), -(-n // 64) * 64
    grad = special(whole, step).nan_to_num(posinf=1.0, neginf=1.0).abs().clamp(max=1e15)
    before = State(whole, n)
    before.exp_avg.abs_()  # the signs agree, so that no cancellation magnifies a last place
    ours, theirs = before.clone(), before.clone()
    with ThreadPool(1) as alone:
        native.adamw(alone, *ours.tensors(), grad, None, [one])
    torch_fused(theirs, [grad], one)
    for a, b, old in zip(*((x[:n] for x in state.tensors()) for state in (ours, theirs, before)), strict=True):
        scale = torch.stack((a.abs(), b.abs(), old.abs(), (a - old).abs())).amax(0)
        ulp = torch.nextafter(scale, torch.tensor(INF)) - scale
        assert bool(((a.double() - b.double()).abs() <= 2 * ulp.double()).all())


def test_segments_have_their_own_settings_and_leave_the_rest_alone(pool: ThreadPool) -> None:
    n = 200_003
    grad = torch.randn(n)
    segments = [segment(5, 6), segment(6, 40_001, lr=0.1, weight_decay=0.0), segment(70_001, 200_000, beta1=0.4, step=1)]
    whole, parts, untouched = State(n), State(n), State(n)
    out = torch.full((n,), 5.0, dtype=torch.bfloat16)
    native.adamw(pool, *whole.tensors(), grad, out, segments)
    expected_out = torch.full((n,), 5.0, dtype=torch.bfloat16)
    for one in segments:
        views = [x[one.start : one.stop] for x in parts.tensors()]
        native.adamw(pool, *views, grad[one.start : one.stop], None, [one._replace(start=0, stop=one.stop - one.start)])
        expected_out[one.start : one.stop] = views[0].bfloat16()
    assert all(same_bits(a, b) for a, b in zip(whole.tensors(), parts.tensors(), strict=True))
    assert same_bits(out, expected_out)
    outside = torch.ones(n, dtype=torch.bool)
    for one in segments:
        outside[one.start : one.stop] = False
    assert all(same_bits(a[outside], b[outside]) for a, b in zip(whole.tensors(), untouched.tensors(), strict=True))


def test_grad_scale_multiplies_the_gradient(pool: ThreadPool) -> None:
    n = 1000
    grad = torch.randn(n).half()
    scaled, before = State(n), State(n)
    native.adamw(pool, *scaled.tensors(), grad, None, [segment(0, n)], grad_scale=1 / 1024)
    native.adamw(pool, *before.tensors(), grad.float() * (1 / 1024), None, [segment(0, n)])
    assert all(same_bits(a, b) for a, b in zip(scaled.tensors(), before.tensors(), strict=True))


def test_threads_do_not_show_in_the_result() -> None:
    n = 300_001
    grad = torch.randn(n)
    results = []
    for threads in (1, 2, 5):
        state = State(n)
        with ThreadPool(threads) as pool:
            native.adamw(pool, *state.tensors(), grad, None, [segment(0, n)])
        results.append(state.master)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("segments", [[(0, 11)], [(-1, 5)], [(5, 4)], [(0, 5), (4, 6)], [(6, 8), (0, 2)]])
def test_segments_that_do_not_fit_are_refused(pool: ThreadPool, segments: list[tuple[int, int]]) -> None:
    state = State(10)
    with pytest.raises(ValueError, match="segments must ascend"):
        native.adamw(pool, *state.tensors(), torch.zeros(10), None, [segment(*bounds) for bounds in segments])
    with pytest.raises(ValueError, match="step >= 1"):
        native.adamw(pool, *state.tensors(), torch.zeros(10), None, [segment(0, 10, step=0)])


def test_tensors_that_do_not_fit_are_named(pool: ThreadPool) -> None:
    state = State(10)
    with pytest.raises(ValueError, match=r"grad is 9 elements on cpu: expected 10"):
        native.adamw(pool, *state.tensors(), torch.zeros(9), None, [])
    with pytest.raises(TypeError, match=r"exp_avg is torch.float64"):
        native.adamw(pool, state.master, state.exp_avg.double(), state.exp_avg_sq, torch.zeros(10), None, [])
    with pytest.raises(ValueError, match="scattered"):
        native.sum_of_squares(pool, torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="instruction set 'sse9' does not run here"):
        native.sum_of_squares(pool, torch.zeros(4), isa="sse9")
    with pytest.raises(TypeError, match="addend is torch.float32"):
        native.accumulate(pool, torch.zeros(4).half(), torch.zeros(4))


# ---- casts ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", HALVES)
def test_every_16_bit_value_widens_as_in_torch(pool: ThreadPool, isa: str, half: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(half)
    wide = torch.empty(65536)
    native.cast(pool, every, wide, isa=isa)
    assert same(wide, every.float())
    back = torch.empty(65536, dtype=half)
    native.cast(pool, wide, back, isa=isa)
    assert same(back, every)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", HALVES)
def test_narrowing_equals_torch_over_the_whole_range(pool: ThreadPool, isa: str, half: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32).view(torch.float32)
    # and what lies on, just under and just over the midpoint of two neighbours: where rounding decides
    every = torch.arange(0, 0x7C00 if half == torch.float16 else 0x7F80, dtype=torch.int32).to(torch.int16).view(half).float()
    middle = bits(every) + (0x1000 if half == torch.float16 else 0x8000)
    halfway = torch.cat([(middle + off).view(torch.float32) for off in (-1, 0, 1)])
    tiny = torch.arange(0, 1 << 12, dtype=torch.float32) * 2.0**-27  # midpoints of fp16 denormals among them
    for source in (anything, halfway, -halfway, tiny, special(4097)):
        target = torch.empty(source.numel(), dtype=half)
        native.cast(pool, source, target, isa=isa)
        assert same(target, source.to(half))


@pytest.mark.parametrize("isa", ISAS)
def test_nan_becomes_torchs_nan(pool: ThreadPool, isa: str) -> None:
    nans = torch.tensor([0x7F800001, 0x7FC00000, -1, 0x7FABCDEF] * 16, dtype=torch.int32).view(torch.float32)
    for half in HALVES:
        target = torch.empty(nans.numel(), dtype=half)
        native.cast(pool, nans, target, isa=isa)
        assert bool(target.isnan().all())
        if VECTOR_TORCH:
            assert same_bits(target, nans.to(half))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_half_types_convert_through_fp32(pool: ThreadPool, isa: str, n: int) -> None:
    source = special(n).bfloat16()
    target = torch.empty(n, dtype=torch.float16)
    native.cast(pool, source, target, isa=isa)
    assert same(target, source.float().half())


# ---- sums ----


def fixed_order_sum(x: Tensor) -> float:
    """The definition: lane i % 16 in fp64 within blocks of 65536, lanes folded as a tree, blocks in order."""
    total = 0.0
    for block in x.double().split(65536):
        padded = torch.nn.functional.pad(block, (0, -block.numel() % 16)).view(-1, 16)
        lanes = torch.zeros(16, dtype=torch.float64)
        for row in padded:
            lanes += row * row
        while lanes.numel() > 1:
            lanes = lanes[: lanes.numel() // 2] + lanes[lanes.numel() // 2 :]
        total += float(lanes)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 4097, 65537])
def test_sum_of_squares_follows_its_definition_on_every_isa(pool: ThreadPool, dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    expected = fixed_order_sum(x)
    for isa in ISAS:
        assert native.sum_of_squares(pool, x, isa=isa) == expected


def test_sum_of_squares_is_the_same_for_every_thread_count() -> None:
    x = torch.randn(500_003)
    sums = set()
    for threads in (1, 2, 7):
        with ThreadPool(threads) as pool:
            sums |= {native.sum_of_squares(pool, x, isa=isa) for isa in ISAS}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(math.fsum(v * v for v in x.tolist()), rel=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_inf_and_nan_come_out_of_a_sum(pool: ThreadPool, isa: str) -> None:
    x = torch.ones(70_000)
    x[69_999] = -INF
    assert native.sum_of_squares(pool, x, isa=isa) == INF
    x[3] = NAN
    assert math.isnan(native.sum_of_squares(pool, x, isa=isa))
    assert native.sum_of_squares(pool, torch.full((100,), 3e38), isa=isa) == pytest.approx(100 * 9e76)  # no overflow in fp64


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [*SIZES, 131_073])
@pytest.mark.parametrize(("total_dtype", "addend_dtype"), [(torch.float32, d) for d in DTYPES] + [(d, d) for d in HALVES])
def test_accumulate_is_torchs_addition_and_its_norm(pool: ThreadPool, isa: str, n: int, total_dtype: torch.dtype, addend_dtype: torch.dtype) -> None:
    total, addend = special(n, 1).nan_to_num(0.5).to(total_dtype), special(n, 2).to(addend_dtype)
    expected = total + addend
    norm = native.accumulate(pool, total, addend, isa=isa)
    assert same(total, expected)
    again = native.sum_of_squares(pool, total, isa=isa)
    assert norm == again or (math.isnan(norm) and math.isnan(again))


# ---- crc32c ----


def test_crc32c_gives_the_published_values() -> None:
    """RFC 3720, appendix B.4."""
    for data, crc in [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (b"123456789", 0xE3069283)]:
        tensor = torch.tensor(list(data), dtype=torch.uint8)
        assert native.crc32c(tensor) == crc
        assert lib.inf_crc32c_table(0, ffi.from_buffer(data), len(data)) == crc
    assert native.crc32c(torch.empty(0, dtype=torch.uint8)) == 0


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 40_000), cut=st.floats(0, 1), seed=st.integers(0, 1000))
def test_crc32c_of_parts_is_that_of_the_whole(n: int, cut: float, seed: int) -> None:
    data = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    at = int(n * cut)
    whole = native.crc32c(data)
    assert native.crc32c(data[at:], native.crc32c(data[:at])) == whole
    assert native.crc32c_combine(native.crc32c(data[:at]), native.crc32c(data[at:]), n - at) == whole
    assert lib.inf_crc32c_table(0, ffi.cast("void *", data.data_ptr()), n) == whole


def test_crc32c_combines_runs_longer_than_memory() -> None:
    """In any order of combining, and two halves of zeros are twice as many zeros."""
    n = (1 << 40) + 5
    a, b, c = 0x12345678, 0xE3069283, 0x8A9136AA
    left = native.crc32c_combine(native.crc32c_combine(a, b, n), c, 7)
    assert left == native.crc32c_combine(a, native.crc32c_combine(b, c, 7), n + 7)
    zeros, nbytes = native.crc32c(torch.zeros(1 << 10, dtype=torch.uint8)), 1 << 10
    while nbytes < 1 << 24:
        zeros, nbytes = native.crc32c_combine(zeros, zeros, nbytes), 2 * nbytes
    assert zeros == native.crc32c(torch.zeros(nbytes, dtype=torch.uint8))


# ---- pool ----


def test_a_closed_pool_says_so() -> None:
    pool = ThreadPool(1)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError, match=r"used after close\(\)"):
        native.sum_of_squares(pool, torch.zeros(1))


def test_a_pool_can_be_pinned_and_refuses_what_it_cannot() -> None:
    core = min(os.sched_getaffinity(0))
    with ThreadPool(2, cores=[core, core]) as pool:
        assert native.sum_of_squares(pool, torch.ones(200_000)) == 200_000
    with pytest.raises(ValueError, match="2 threads and 1 cores"):
        ThreadPool(2, cores=[core])
    with pytest.raises(ValueError, match=r"thread pool on cores \[100000\]"):
        ThreadPool(1, cores=[100_000])
    with pytest.raises(ValueError, match="at least 1"):
        ThreadPool(0)


def test_answers_become_exceptions() -> None:
    """What a forked child is told is tested in tests/native; here what becomes of it."""
    cases = [(errno.ECHILD, RuntimeError, r"fork\(\)"), (errno.ENOMEM, CapacityError, "no memory left"), (errno.EIO, OSError, "it: Input")]
    for code, kind, text in cases:
        with pytest.raises(kind, match=text):
            native._check(-code, "it")
