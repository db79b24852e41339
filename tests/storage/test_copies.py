"""Copies move values, cast on the device, and leave spans. CUDA claims run where there is CUDA."""

from __future__ import annotations

import time

import pytest
import torch

from infinity.kinds import Lane
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.streams import OnStream
from infinity.timeline import Timeline


def test_on_a_cpu_device_copies_are_over_at_once():
    timeline = Timeline()
    copies = Copies(torch.device("cpu"), timeline)
    source, up, down = torch.arange(10.0), torch.empty(10), torch.empty(2, 5, dtype=torch.bfloat16)
    work = copies.upload(source, up)
    assert work.is_completed() and torch.equal(up, source)
    work.sync_current_stream()
    copies.download(up, down, "grads").wait()
    assert torch.equal(down.view(-1), source.bfloat16())
    spans = timeline.spans()
    assert [(span.lane, span.name, span.nbytes) for span in spans] == [(Lane.UPLOAD, "upload", 40), (Lane.DOWNLOAD, "grads", 20)]
    assert copies.upload_stream is None
    copies.drain_spans()
    copies.close()


def test_lengths_must_agree():
    with pytest.raises(AssertionError):
        Copies(torch.device("cpu"), Timeline()).upload(torch.empty(3), torch.empty(4))


@pytest.fixture
def cuda():
    timeline, pool = Timeline(), SlabPool(pin=True, threads=4)
    copies = Copies(torch.device("cuda", torch.cuda.current_device()), timeline)
    yield copies, timeline, pool
    copies.close()
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("home", [torch.float32, torch.bfloat16])
def test_values_go_up_and_come_down(cuda, wire, home):
    copies, _, pool = cuda
    n = 1 << 20
    source, back = pool.take(n * wire.itemsize).view(wire), pool.take(n * wire.itemsize).view(wire)
    source.copy_(torch.randn(n))
    with torch.cuda.stream(copies.upload_stream):
        target = torch.empty(n, dtype=home, device=copies.device)
    up = copies.upload(source, target)
    up.sync_current_stream()
    copies.download(target * 1, back).wait(30)
    assert torch.equal(back, source.to(home).to(wire))


@pytest.mark.gpu
def test_a_download_follows_the_work_queued_before_it(cuda):
    copies, _, pool = cuda
    value, back = torch.zeros(1 << 22, device=copies.device), pool.take(4 << 22).view(torch.float32)
    torch.cuda._sleep(100_000_000)
    value += 3
    work = copies.download(value, back)
    assert not work.is_completed()
    work.wait(30)
    assert bool((back == 3).all())


@pytest.mark.gpu
def test_dropped_works_keep_their_tensors_until_the_copy_is_over(cuda):
    copies, _, pool = cuda
    torch.cuda._sleep(100_000_000)
    expected = []
    for index in range(8):
        value, back = torch.full((1 << 20,), float(index), device=copies.device), pool.take(4 << 20).view(torch.float32)
        copies.download(value, back)
        expected.append((index, back))
        del value
        torch.full((1 << 20,), -1.0, device=copies.device)
    copies.close()
    assert all(bool((back == index).all()) for index, back in expected)
    copies._timeline.resolvers.append(copies._motions.sweep)


@pytest.mark.gpu
def test_a_finished_copys_events_serve_the_next_and_its_work_stays_over(cuda):
    copies, timeline, pool = cuda
    source, target = pool.take(1 << 20), torch.empty(1 << 20, dtype=torch.uint8, device=copies.device)
    first = copies.upload(source, target, "first")
    first.wait(30)
    copies.drain_spans()
    torch.cuda._sleep(100_000_000)
    second = copies.download(target, source, "second")
    assert second._stop in (first._start, first._stop)
    assert first.is_completed() and not second.is_completed(), "also while its events belong to a copy under way"
    first.wait(0)
    first.sync_current_stream()
    second.wait(30)
    assert [span.name for span in timeline.spans()] == ["first", "second"]


@pytest.mark.gpu
def test_a_stream_is_current_inside_and_the_one_before_after(cuda):
    copies, _, _ = cuda
    with torch.cuda.stream(torch.cuda.Stream()):
        before, device = torch.cuda.current_stream(), torch.cuda.current_device()
        with pytest.raises(RuntimeError, match="inside"), OnStream(copies.upload_stream):
            assert torch.cuda.current_stream() == copies.upload_stream
            raise RuntimeError("inside")
        assert torch.cuda.current_stream() == before and torch.cuda.current_device() == device


@pytest.mark.gpu
def test_spans_lie_where_the_copies_were(cuda):
    copies, timeline, pool = cuda
    source, target = pool.take(256 << 20), torch.empty(256 << 20, dtype=torch.uint8, device=copies.device)
    torch.cuda.synchronize()
    before_ns = time.monotonic_ns()
    copies.upload(source, target, "u1").wait(30)
    after_ns = time.monotonic_ns()
    (span,) = timeline.spans()
    assert (span.lane, span.name, span.nbytes) == (Lane.UPLOAD, "u1", 256 << 20)
    slack_ns = 1_000_000
    assert before_ns - slack_ns <= span.start_ns < span.stop_ns <= after_ns + slack_ns
