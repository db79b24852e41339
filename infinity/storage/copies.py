"""Copies between CPU memory and HBM, each direction on its own CUDA stream. On a CPU device they are plain copies."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from infinity.errors import MoverError
from infinity.kinds import Lane
from infinity.storage.streams import OnStream
from infinity.storage.work import Work
from infinity.timeline import Timeline

_ANCHOR_EVERY_S = 10.0
"""CUDA event times are float32 milliseconds after an anchor: near anchors keep microseconds, and clocks drift apart."""

_MOST_UNMEASURED = 1024
"""Finished copies whose spans are not with the timeline yet; two CUDA events each."""

_DEADLINE_S = 120.0
_LONGEST_NAP_S = 5e-4


class CopyWork(Work):
    """An upload or download under way."""

    def sync_current_stream(self) -> None:
        """Work queued from now on to the current stream runs after the copy. Does not block the host."""


class _DoneCopy(CopyWork):
    """A copy on a CPU device: over when it returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def sync_current_stream(self) -> None:
        return


class Copies:
    """Moves tensors of equal numel between CPU memory and one compute device.

    Casts happen on the device, so the wire carries the dtype of the CPU side. `upload` starts once `after` has happened, but does not wait
    for the current stream: allocate its target on `upload_stream`, or hand in memory that nothing queued still uses.
    `download` starts once `after` has happened, or after the work that the caller's current stream has queued.
    """

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device = device
        self._timeline = timeline
        self._lanes = _CudaLanes(device, timeline) if device.type == "cuda" else None
        if self._lanes is not None:
            timeline.resolvers.append(self.drain_spans)

    @property
    def upload_stream(self) -> torch.cuda.Stream | None:
        """The stream that uploads run on; None on a CPU device."""
        return self._lanes.up if self._lanes is not None else None

    def upload(
        self,
        source: torch.Tensor,  # [n] CPU, pinned for speed, or on the device; unchanged until the work is over
        target: torch.Tensor,  # [n] on the device
        name: str = "upload",
        after: torch.cuda.Event | None = None,
    ) -> CopyWork:
        assert source.numel() == target.numel(), f"{name}: {source.numel()} elements into {target.numel()}"
        if self._lanes is None:
            return self._copy(Lane.UPLOAD, source, target, name)
        return self._lanes.upload(source, target, name, after)

    def download(
        self,
        source: torch.Tensor,  # [n] on the device; kept alive until the work is over
        target: torch.Tensor,  # [n] CPU, pinned for speed; undefined until the work is over
        name: str = "download",
        after: torch.cuda.Event | None = None,
    ) -> CopyWork:
        assert source.numel() == target.numel(), f"{name}: {source.numel()} elements into {target.numel()}"
        if self._lanes is None:
            return self._copy(Lane.DOWNLOAD, source, target, name)
        return self._lanes.download(source, target, name, after)

    def wait_for_uploads(self, timeout_s: float) -> None:
        """Every upload started so far is over: their sources may be written. Raises MoverError at the deadline."""
        if self._lanes is not None:
            self._lanes.wait_for(Lane.UPLOAD, timeout_s)
            self._lanes.sweep()  # no compute is being launched now, which this would hold up

    def drain_spans(self) -> None:
        """Hand the spans of finished copies to the timeline. Never waits for the device."""
        if self._lanes is not None:
            self._lanes.sweep()

    def close(self) -> None:
        """Wait for the copies under way."""
        if self._lanes is not None:
            self._lanes.close()
            self._timeline.resolvers.remove(self.drain_spans)

    def _copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, name: str) -> CopyWork:
        with self._timeline.span(lane, name, target.nbytes):
            target.copy_(source.view(target.shape))
        return _DONE


_DONE = _DoneCopy()


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A CUDA event and the host's clock when it was recorded on an idle stream."""

    event: torch.cuda.Event
    ns: int


class _CudaLanes:
    """Two streams, and the copies on them that are not known to be over."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device = device
        self.timeline = timeline
        self.up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._spare: list[torch.cuda.Event] = []
        """Of copies that have been measured: to make a new one takes longer than to record it."""
        self._anchor = self._drop_anchor()
        self._under_way: dict[Lane, deque[_CudaCopy]] = {Lane.UPLOAD: deque(), Lane.DOWNLOAD: deque()}
        """Per direction, oldest first: a download that waits for compute holds no upload's tensors."""
        self._over: deque[_CudaCopy] = deque()
        """To be measured. Whoever finds that a copy is over may be launching compute, and reading the times of events takes long."""
        self._lock = threading.Lock()

    def upload(self, source: torch.Tensor, target: torch.Tensor, name: str, after: torch.cuda.Event | None) -> CopyWork:
        if after is not None:
            self.up.wait_event(after)
        with OnStream(self.up):
            start = self._mark(self.up)
            if source.dtype == target.dtype:
                target.copy_(_shaped(source, target), non_blocking=True)
            else:
                target.copy_(_shaped(source.to(self.device, non_blocking=True), target))
            return self._track(Lane.UPLOAD, name, source.nbytes, start, self._mark(self.up), (source, target))

    def download(self, source: torch.Tensor, target: torch.Tensor, name: str, after: torch.cuda.Event | None) -> CopyWork:
        self.down.wait_event(after or torch.cuda.current_stream(self.device).record_event())
        with OnStream(self.down):
            start = self._mark(self.down)
            target.copy_(_shaped(source.to(target.dtype), target), non_blocking=True)
            return self._track(Lane.DOWNLOAD, name, target.nbytes, start, self._mark(self.down), (source, target))

    def wait_for(self, lane: Lane, timeout_s: float) -> None:
        with self._lock:
            under_way = list(self._under_way[lane])
        for copy in under_way:
            copy.wait(timeout_s)

    def sweep(self) -> None:
        """Let go of the tensors of finished copies, and record their spans."""
        with self._lock:
            for lane, copies in self._under_way.items():
                self._under_way[lane] = deque(copy for copy in copies if not copy.finish())
            self._measure()

    def _measure(self, most_left: int = 0) -> None:
        while len(self._over) > most_left:
            self._spare += self._over.popleft().measure()

    def measure_later(self, copy: _CudaCopy) -> None:
        """It is over; called once, by any thread."""
        self._over.append(copy)

    def close(self) -> None:
        for copy in [copy for copies in self._under_way.values() for copy in copies]:
            copy.wait()
        self.sweep()

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _track(
        self, lane: Lane, name: str, nbytes: int, start: torch.cuda.Event, stop: torch.cuda.Event, tensors: tuple[torch.Tensor, torch.Tensor]
    ) -> CopyWork:
        copy = _CudaCopy(self, lane, name, nbytes, start, stop, self._anchor, tensors)
        with self._lock:
            for copies in self._under_way.values():
                while copies and copies[0].finish():
                    copies.popleft()
            self._measure(_MOST_UNMEASURED)  # no burst: as many as have come
            self._under_way[lane].append(copy)
            if time.monotonic_ns() - self._anchor.ns > _ANCHOR_EVERY_S * 1e9:
                self._anchor = self._drop_anchor()
        return copy

    def _drop_anchor(self) -> _Anchor:
        """Nothing else runs on this stream, so the event happens as it is recorded."""
        return _Anchor(self._mark(self._idle), time.monotonic_ns())


class _CudaCopy(CopyWork):
    """One copy on one of the streams. It holds both tensors until the stop event has happened."""

    def __init__(
        self,
        lanes: _CudaLanes,
        lane: Lane,
        name: str,
        nbytes: int,
        start: torch.cuda.Event,
        stop: torch.cuda.Event,
        anchor: _Anchor,
        tensors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._lanes = lanes
        self.lane = lane
        self._name = name
        self._nbytes = nbytes
        self._start = start
        self._stop = stop
        self._anchor = anchor
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = tensors
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep in short naps: synchronizing the event would burn a core and could not time out."""
        deadline = time.monotonic() + (_DEADLINE_S if timeout_s is None else timeout_s)
        nap_s = 1e-5
        while not self.finish():
            if time.monotonic() > deadline:
                raise MoverError(f"{self.lane} of {self._name}, {self._nbytes} bytes: not over at its deadline. Is the device hung?")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def is_completed(self) -> bool:
        return self.finish()

    def sync_current_stream(self) -> None:
        if self._tensors is not None:  # else it is over, and its events may serve another copy
            torch.cuda.current_stream(self._lanes.device.index).wait_event(self._stop)

    def finish(self) -> bool:
        """True once the stop event has happened; the first time, let go of the tensors."""
        if self._tensors is None:
            return True
        if not self._stop.query():  # type: ignore[no-untyped-call]
            return False
        with self._lock:
            tensors, self._tensors = self._tensors, None
        if tensors is not None:
            self._lanes.measure_later(self)
        return True

    def measure(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Hand the span of a finished copy to the timeline, and its events back."""
        if self._anchor.event.query():  # type: ignore[no-untyped-call]
            start_ns, stop_ns = (self._anchor.ns + int(1e6 * self._anchor.event.elapsed_time(event)) for event in (self._start, self._stop))
            self._lanes.timeline.record(self.lane, self._name, start_ns, stop_ns, self._nbytes)
        return self._start, self._stop


def _shaped(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return source if source.shape == target.shape else source.view(target.shape)
