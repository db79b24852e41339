"""When compute ran and when it waited: spans of the gpu lane, from CUDA events or, on a CPU device, from the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from infinity.kinds import Lane
from infinity.timeline import Timeline

MIN_STALL_NS = 20_000
"""A shorter gap is the cost of asking, not a wait."""


class Mark(Protocol):
    """An instant of the compute stream."""

    def time_ns(self) -> int | None: ...


class _HostMark:
    def __init__(self) -> None:
        self._at = time.monotonic_ns()

    def time_ns(self) -> int | None:
        return self._at


class _StreamMark:
    """An instant on the device's current stream; its time is known once the event has completed."""

    def __init__(self, device: torch.device, anchor: torch.cuda.Event, anchor_ns: int) -> None:
        self._anchor, self._anchor_ns = anchor, anchor_ns
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device.index))

    def time_ns(self) -> int | None:
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        return self._anchor_ns + int(self._anchor.elapsed_time(self._event) * 1e6)


class ComputeClock:
    """Cuts a forward and a backward into compute and waits.

    The thread that launches compute calls `begin`, `waiting` around each wait for a unit, and `end`. Between them
    the gpu lane is busy: launches run ahead of the stream, so what is not a wait is compute.
    """

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline = timeline
        self._device, self._cuda = device, device.type == "cuda"
        self._open: tuple[str, Mark] | None = None
        self._unresolved: list[tuple[str, Lane | None, Mark, Mark]] = []
        self._lock = threading.Lock()
        if self._cuda:
            torch.cuda.synchronize(device)
            self._anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._anchor.record(torch.cuda.current_stream(device.index))
            self._anchor.synchronize()
            self._anchor_ns = time.monotonic_ns()
        timeline.resolvers.append(self._resolve)

    def begin(self, phase: str) -> None:
        """Compute of `phase` ("forward", "backward") is launched from here on."""
        if self._open is not None:
            self.end()
        self._open = (phase, self._mark())

    @contextmanager
    def waiting(self, lane: Lane, name: str) -> Iterator[None]:
        """The body makes the stream (or, on a CPU device, the thread) wait for a unit that comes over `lane`."""
        opened, start = self._open, self._mark()
        yield
        stop = self._mark()
        if opened is not None:
            self._keep(opened[0], None, opened[1], start)
            self._open = (opened[0], stop)
        self._keep(name, lane, start, stop)

    def end(self) -> None:
        """The phase has been launched to its end."""
        if self._open is not None:
            phase, start = self._open
            self._open = None
            self._keep(phase, None, start, self._mark())

    def _mark(self) -> Mark:
        return _StreamMark(self._device, self._anchor, self._anchor_ns) if self._cuda else _HostMark()

    def _keep(self, name: str, stalled_for: Lane | None, start: Mark, stop: Mark) -> None:
        with self._lock:
            self._unresolved.append((name, stalled_for, start, stop))
        if len(self._unresolved) > 1024:
            self._resolve()

    def _resolve(self) -> None:
        with self._lock:
            waiting, self._unresolved = self._unresolved, []
            for at, (name, lane, start, stop) in enumerate(waiting):
                stop_ns, start_ns = stop.time_ns(), start.time_ns()
                if stop_ns is None or start_ns is None:
                    self._unresolved = waiting[at:]
                    return
                if lane is None:
                    self._timeline.record(Lane.GPU, name, start_ns, stop_ns)
                elif stop_ns - start_ns >= MIN_STALL_NS:
                    self._timeline.record_stall(lane, name, start_ns, stop_ns)
