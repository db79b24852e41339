"""Works end once, say how, and let go of nothing that a device may still touch."""

from __future__ import annotations

import errno

import pytest

from infinity.errors import StorageError
from infinity.kinds import Lane
from infinity.storage.work import COMPLETED, AioWork, Window, join
from infinity.timeline import Timeline


class FakeRequest:
    """A request that ends when told."""

    def __init__(self, code: int | None = None, failed_offset: int = -1) -> None:
        self.code = code
        self.started_ns, self.finished_ns, self.failed_offset = 100, 250, failed_offset

    def wait(self, timeout_s: float | None = None) -> int:
        if self.code is None:
            raise TimeoutError("the transfer is still under way")
        return self.code

    def done(self) -> bool:
        return self.code is not None


def aio_work(request: FakeRequest, timeline: Timeline) -> AioWork:
    return AioWork(request, Lane.NVME_READ, "u0", "/mnt/file", 8192, 4096, timeline)


def test_a_span_is_recorded_once_with_the_times_of_the_device():
    timeline, request = Timeline(), FakeRequest()
    work = aio_work(request, timeline)
    assert not work.is_completed()
    request.code = 0
    work.wait()
    work.wait()
    assert work.is_completed()
    (span,) = timeline.spans()
    assert (span.lane, span.start_ns, span.stop_ns, span.nbytes) == (Lane.NVME_READ, 100, 250, 4096)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT])
def test_a_failure_names_errno_path_offset_and_bytes_every_time(code):
    work = aio_work(FakeRequest(-code, failed_offset=8704), Timeline())
    for _ in range(2):
        with pytest.raises(StorageError, match="at byte 8704, 4096 bytes") as caught:
            work.wait()
        assert (caught.value.errno, caught.value.filename, caught.value.offset, caught.value.nbytes) == (code, "/mnt/file", 8704, 4096)


def test_impatience_is_not_failure():
    request = FakeRequest()
    work = aio_work(request, Timeline())
    with pytest.raises(StorageError, match="Still under way"):
        work.wait(0.01)
    request.code = 0
    work.wait()


def test_a_join_ends_with_the_last_and_raises_the_first_failure():
    timeline = Timeline()
    requests = [FakeRequest(0), FakeRequest(-errno.EIO, 8192), FakeRequest(-errno.ENOSPC, 8192), FakeRequest(0)]
    joined = join(aio_work(request, timeline) for request in requests)
    with pytest.raises(StorageError) as caught:
        joined.wait()
    assert caught.value.errno == errno.EIO
    assert len(timeline.spans()) == len(requests), "every part was waited for"


def test_joining_nothing_is_completed():
    assert join([]) is COMPLETED
    assert join([COMPLETED, COMPLETED]) is COMPLETED
    only = aio_work(FakeRequest(0), Timeline())
    assert join([COMPLETED, only]) is only


def test_a_window_waits_for_the_oldest_when_it_is_full():
    ended: list[int] = []

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self, timeout_s: float | None = None) -> None:
            ended.append(self.number)

        def is_completed(self) -> bool:
            return self.number in ended

    window = Window(2)
    for number in range(4):
        window.add(Numbered(number))
    assert ended == [0, 1]
    window.drain()
    assert ended == [0, 1, 2, 3]
