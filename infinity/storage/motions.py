"""What runs on CUDA streams of the engine's own, from one event to another, and when it ran: spans of the stream's lane."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import MoverError
from infinity.kinds import Lane
from infinity.storage.streams import DEADLINE_S, OnStream, nap_until
from infinity.timeline import Timeline

_ANCHOR_EVERY_S = 10.0
"""CUDA event times are float32 milliseconds after an anchor: near anchors keep microseconds, and clocks drift apart."""

_URGENT = -1
"""A stream's priority before that of streams made without one, 0 (CUDA programming guide, stream priorities)."""

_MOST_UNMEASURED = 1024
"""Finished motions whose spans are not with the timeline yet; two CUDA events each."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A CUDA event and the host's clock when it was recorded on an idle stream."""

    event: torch.cuda.Event
    ns: int


class Motions:
    """A stream for each lane, and the motions on them that are not known to be over."""

    def __init__(self, device: torch.device, timeline: Timeline, lanes: Sequence[Lane], *, is_urgent: bool = False) -> None:
        """`is_urgent`: kernels on these streams get processors before those of compute that are not running yet."""
        self.device = device
        self.timeline = timeline
        priority = _URGENT if is_urgent else 0
        self._streams = {lane: torch.cuda.Stream(device, priority=priority) for lane in lanes}  # type: ignore[no-untyped-call]
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._spare: list[torch.cuda.Event] = []
        """Of motions that have been measured: to make a new one takes longer than to record it."""
        self._anchor = self._drop_anchor()
        self._under_way: dict[Lane, deque[Motion]] = {lane: deque() for lane in lanes}
        """Per lane, oldest first: a download that waits for compute holds no upload's tensors."""
        self._over: deque[Motion] = deque()
        """To be measured. Whoever finds that a motion is over may be launching compute, and reading the times of events takes long."""
        self._lock = threading.Lock()
        timeline.resolvers.append(self.sweep)

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """On which the lane's motions run, one after the other."""
        return self._streams[lane]

    def run(self, lane: Lane, name: str, nbytes: int, operation: Callable[[], object], tensors: Sequence[torch.Tensor] = ()) -> Motion:
        """Queue what `operation` does on the lane's stream, which is current meanwhile. `tensors` are held until it has run there."""
        stream = self._streams[lane]
        with OnStream(stream):
            start = self._mark(stream)
            operation()
            motion = Motion(self, lane, name, nbytes, start, self._mark(stream), self._anchor, tensors)
        self._track(motion)
        return motion

    def wait_for(self, lane: Lane, timeout_s: float) -> None:
        """Everything started on the lane so far is over."""
        with self._lock:
            under_way = list(self._under_way[lane])
        for motion in under_way:
            motion.wait(timeout_s)

    def sweep(self) -> None:
        """Let go of the tensors of finished motions, and hand their spans to the timeline. Never waits for the device."""
        with self._lock:
            for lane, motions in self._under_way.items():
                self._under_way[lane] = deque(motion for motion in motions if not motion.finish())
            self._measure()

    def measure_later(self, motion: Motion) -> None:
        """It is over; called once, by any thread."""
        self._over.append(motion)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way. Raises MoverError at the deadline."""
        try:
            for motion in [motion for motions in self._under_way.values() for motion in motions]:
                motion.wait(timeout_s)
            self.sweep()
        finally:
            self.timeline.resolvers.remove(self.sweep)

    def _measure(self, most_left: int = 0) -> None:
        while len(self._over) > most_left:
            self._spare += self._over.popleft().measure()

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _track(self, motion: Motion) -> None:
        with self._lock:
            for motions in self._under_way.values():
                while motions and motions[0].finish():
                    motions.popleft()
            self._measure(_MOST_UNMEASURED)  # no burst: as many as have come
            self._under_way[motion.lane].append(motion)
            if time.monotonic_ns() - self._anchor.ns > _ANCHOR_EVERY_S * 1e9:
                self._anchor = self._drop_anchor()

    def _drop_anchor(self) -> _Anchor:
        """Nothing else runs on this stream, so the event happens as it is recorded."""
        return _Anchor(self._mark(self._idle), time.monotonic_ns())


class Motion:
    """One of them. It holds its tensors until the stop event has happened."""

    def __init__(
        self,
        motions: Motions,
        lane: Lane,
        name: str,
        nbytes: int,
        start: torch.cuda.Event,
        stop: torch.cuda.Event,
        anchor: _Anchor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._motions = motions
        self.lane = lane
        self._name = name
        self._nbytes = nbytes
        self._start = start
        self._stop = stop
        self._anchor = anchor
        self._tensors: Sequence[torch.Tensor] | None = tensors
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises MoverError past the deadline."""
        if not nap_until(self.finish, DEADLINE_S if timeout_s is None else timeout_s):
            raise MoverError(f"{self.lane} of {self._name}, {self._nbytes} bytes: not over at its deadline. Is the device hung?")

    def is_completed(self) -> bool:
        return self.finish()

    def sync_current_stream(self) -> None:
        """Work queued from now on to the current stream runs after this. Does not block the host."""
        with self._lock:
            if self._tensors is not None:  # else it is over, and its events may serve another motion
                torch.cuda.current_stream(self._motions.device.index).wait_event(self._stop)

    def finish(self) -> bool:
        """True once the stop event has happened; the first time, let go of the tensors."""
        if self._tensors is None:
            return True
        if not self._stop.query():  # type: ignore[no-untyped-call]
            return False
        with self._lock:
            tensors, self._tensors = self._tensors, None
        if tensors is not None:
            self._motions.measure_later(self)
        return True

    def measure(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Hand the span of a finished motion to the timeline, and its events back."""
        if self._anchor.event.query():  # type: ignore[no-untyped-call]
            start_ns, stop_ns = (self._anchor.ns + int(1e6 * self._anchor.event.elapsed_time(event)) for event in (self._start, self._stop))
            self._motions.timeline.record(self.lane, self._name, start_ns, stop_ns, self._nbytes)
        return self._start, self._stop
