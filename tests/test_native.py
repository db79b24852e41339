"""Claims of `infinity.native`: equal to torch to the bit where torch is itself, and disk transfers that arrive or say why not."""

from __future__ import annotations

import errno
import gc
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity import native
from infinity._native import ffi, lib
from infinity.errors import CapacityError, ClosedError, StorageError
from infinity.native import AdamSegment, Aio, Mapping, ThreadPool

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
def test_one_step_is_within_two_ulp_of_torch(n: int, lr: float, beta1: float, beta2: float, weight_decay: float, step: int) -> None:
    """Also in the elements behind the last vector, where torch computes in another order."""
    one = segment(0, n, lr, beta1, beta2, weight_decay, step)
    grad = special(n, step).nan_to_num(posinf=1.0, neginf=1.0).abs().clamp(max=1e15)
    before = State(n, n)
    before.exp_avg.abs_()  # the signs agree, so that no cancellation magnifies a last place
    ours, theirs = before.clone(), before.clone()
    with ThreadPool(1) as alone:
        native.adamw(alone, *ours.tensors(), grad, None, [one])
    torch_fused(theirs, [grad], one)
    for a, b, old in zip(ours.tensors(), theirs.tensors(), before.tensors(), strict=True):
        scale = torch.maximum(torch.maximum(a.abs(), b.abs()), old.abs())
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
    assert lib.inf_crc32c_table(0, ffi.cast("void *", data.data_ptr()), n) == whole


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


# ---- memory ----


def smaps_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds `address`."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            inside = low <= address < high
        elif inside:
            fields[head.rstrip(":")] = rest.strip()
    return fields


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1, 10 << 20])
def test_a_mapping_is_zeroed_touched_and_kept_from_children(nbytes: int) -> None:
    mapping = Mapping(nbytes, threads=3)
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    assert tensor.data_ptr() == mapping.address and mapping.address % (2 << 20) == 0
    assert tensor.numel() == mapping.nbytes == nbytes
    assert not tensor.any()
    flags = smaps_of(mapping.address)["VmFlags"].split()
    assert "dc" in flags  # MADV_DONTFORK
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags  # MADV_HUGEPAGE


def test_a_mapping_lives_as_long_as_its_last_view() -> None:
    mapping = Mapping(4 << 20, threads=1)
    address = mapping.address
    view = torch.frombuffer(mapping.buffer, dtype=torch.float32)[1000:2000]
    del mapping
    gc.collect()
    view.fill_(3.0)
    assert view.sum() == 3000
    assert smaps_of(address)
    del view
    gc.collect()
    assert "dc" not in smaps_of(address).get("VmFlags", "").split()


def test_a_mapping_that_cannot_be_is_refused() -> None:
    with pytest.raises(CapacityError, match="mapping 4503599627370496 bytes"):
        Mapping(1 << 52, threads=1)
    with pytest.raises(ValueError, match="0 bytes"):
        Mapping(0, threads=1)


# ---- disk ----

BACKENDS = [name for name in ("libaio", "kernel", "threads") if lib.inf_backend_find(name.encode())]
BLOCK = 64 << 10
NBYTES = 1 << 20


def sectors(nbytes: int, seed: int | None = None) -> Tensor:
    tensor = torch.frombuffer(Mapping(nbytes, threads=1).buffer, dtype=torch.uint8)
    if seed is not None:
        tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor


def open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # this file system has no direct I/O


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = open_direct(tmp_path / "data")
    yield fd
    os.close(fd)


def engine(backend: str = "auto", deadline_s: float = 60.0, **counts: int) -> Aio:
    return Aio(block_bytes=BLOCK, queue_depth=4, deadline_s=deadline_s, backend=backend, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("readers", [1, 3])
def test_bytes_survive_the_disk(file: int, backend: str, readers: int) -> None:
    sent, got = sectors(NBYTES, 1), sectors(NBYTES)
    with engine(backend, readers=readers, writers=readers) as aio:
        assert aio.backend == backend or backend == "auto"
        # pieces of uneven length, all under way at once
        cuts = [0, 4096, 4096 * 3, BLOCK * 2, BLOCK * 2 + 4096, NBYTES]
        pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
        writes = [aio.write(file, a, sent.data_ptr() + a, b - a, keep=sent) for a, b in pieces]
        assert [request.wait() for request in writes] == [0] * len(pieces)
        reads = [aio.read(file, a, got.data_ptr() + a, b - a, keep=got) for a, b in reversed(pieces)]
        assert [request.wait(timeout_s=60.0) for request in reads] == [0] * len(pieces)
        assert all(r.done() and 0 < r.started_ns <= r.finished_ns and r.failed_offset == -1 for r in writes + reads)
        assert max(r.finished_ns for r in writes) <= min(r.finished_ns for r in reads)
    assert torch.equal(sent, got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_the_file_is_an_error_at_its_place(file: int, backend: str) -> None:
    buffer = sectors(NBYTES, 2)
    with engine(backend) as aio:
        assert aio.write(file, 0, buffer.data_ptr(), NBYTES).wait() == 0
        request = aio.read(file, NBYTES - BLOCK, buffer.data_ptr(), 2 * BLOCK)
        assert request.wait() == -errno.EIO
        assert request.failed_offset == NBYTES


@pytest.mark.parametrize("backend", BACKENDS)
def test_unaligned_direct_requests_are_refused_by_the_kernel_and_reported(file: int, backend: str) -> None:
    buffer = sectors(NBYTES, 2)
    with engine(backend) as aio:
        assert aio.write(file, 0, buffer.data_ptr(), NBYTES).wait() == 0
        request = aio.read(file, 100, buffer.data_ptr(), 4096)
        error = request.wait()
    if error == 0:
        pytest.skip("this file system takes unaligned requests")
    assert error == -errno.EINVAL and request.failed_offset == 100


def test_a_full_device_is_enospc() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    buffer = sectors(4096)
    with engine("threads") as aio:
        request = aio.write(fd, 4096, buffer.data_ptr(), 4096)
        assert request.wait() == -errno.ENOSPC and request.failed_offset == 4096
    os.close(fd)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_opened_for_reading_only_refuses_writes(tmp_path: Path, backend: str) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    buffer = sectors(4096)
    with engine(backend) as aio:
        assert aio.write(fd, 0, buffer.data_ptr(), 4096).wait() == -errno.EBADF
    os.close(fd)


def test_memory_is_kept_while_the_device_may_write_to_it(file: int) -> None:
    sent = sectors(NBYTES, 3)
    with engine() as aio:
        aio.write(file, 0, sent.data_ptr(), NBYTES, keep=sent).wait()
        for _ in range(20):  # nobody holds the buffers or the requests
            aio.read(file, 0, (target := sectors(NBYTES)).data_ptr(), NBYTES, keep=target)
            del target
        gc.collect()
        assert aio.read(file, 0, sent.data_ptr(), NBYTES, keep=sent).wait() == 0
    assert not aio._pending


def test_a_dead_drive_times_out_and_its_memory_is_never_let_go() -> None:
    """An empty pipe stands in for the drive: the kernel accepts the read and never answers."""
    class Owner:
        pass

    reader, writer = os.pipe()
    buffer, owner = sectors(4096), Owner()
    with engine("threads" if "kernel" not in BACKENDS else "kernel", deadline_s=0.3) as aio:
        request = aio.read(reader, 0, buffer.data_ptr(), 4096, keep=owner)
        code = request.wait()
        if code == -errno.ESPIPE or code == -errno.EINVAL:
            pytest.skip("this kernel reads no pipes asynchronously")
        assert code == -errno.ETIMEDOUT
        assert request in native._lost and request._keep is owner
        later = aio.read(reader, 0, buffer.data_ptr(), 4096)
        assert later.wait() == -errno.EIO  # no reader is left: it fails at once
    os.write(writer, bytes(4096))  # the drive comes back, to nobody


def test_a_wait_may_be_shorter_than_the_transfer() -> None:
    reader, writer = os.pipe()
    buffer = sectors(4096)
    with engine("kernel", deadline_s=30.0) as aio:
        request = aio.read(reader, 0, buffer.data_ptr(), 4096, keep=buffer)
        if request.done():
            pytest.skip("this kernel reads no pipes asynchronously")
        with pytest.raises(TimeoutError, match=r"still under way after 0.05 s"):
            request.wait(timeout_s=0.05)
        assert not request.done()
        os.write(writer, bytes([7]) * 4096)
        assert request.wait() == 0
    assert bool((buffer[:4096] == 7).all())


def test_many_threads_wait_for_one_request(file: int) -> None:
    buffer = sectors(NBYTES, 5)
    answers: list[int] = []
    with engine() as aio:
        request = aio.write(file, 0, buffer.data_ptr(), NBYTES, keep=buffer)
        threads = [threading.Thread(target=lambda: answers.append(request.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [0] * 4


def test_close_finishes_what_is_under_way(file: int) -> None:
    sent, got = sectors(NBYTES, 6), sectors(NBYTES)
    aio = engine()
    request = aio.write(file, 0, sent.data_ptr(), NBYTES, keep=sent)
    aio.close()
    aio.close()
    assert request.wait() == 0
    with pytest.raises(ClosedError):
        aio.read(file, 0, got.data_ptr(), NBYTES)
    with pytest.raises(ClosedError):
        _ = aio.backend
    with engine() as other:
        assert other.read(file, 0, got.data_ptr(), NBYTES, keep=got).wait() == 0
    assert torch.equal(sent, got)


def test_impossible_engines_and_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="'floppy'"):
        engine("floppy")
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        Aio(block_bytes=0, queue_depth=1)
    with engine() as aio, pytest.raises(OSError, match="read of 4096 bytes at 0") as caught:
        aio.read(-1, 0, 0, 4096)
    assert caught.value.errno == errno.EBADF


def test_more_contexts_than_the_host_gives_fall_back_to_threads() -> None:
    """fs.aio-max-nr is shared by the host: "auto" takes plain calls then, a backend asked for by name says what to raise."""
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    depth = min(65536, limit)
    with Aio(block_bytes=4096, queue_depth=depth, readers=2, writers=2) as aio:
        if aio.backend != "threads":
            pytest.skip(f"the host gives four contexts of {depth}")
    with pytest.raises(StorageError, match=r"fs\.aio-max-nr"):
        Aio(block_bytes=4096, queue_depth=depth, readers=2, writers=2, backend="kernel")
