"""Spans in time, per lane: what was busy while what else ran, as a table and as a Chrome trace of all ranks."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy

from infinity.kinds import Lane

COMPUTE_LANES = (Lane.GPU, Lane.ADAM)
"""A motion is hidden while one of these is busy."""


@dataclass(frozen=True, slots=True)
class Span:
    """One motion or one wait: [start_ns, stop_ns) on CLOCK_MONOTONIC."""

    lane: Lane
    name: str
    start_ns: int
    stop_ns: int
    nbytes: int = 0
    is_stall: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """What one lane did in a stretch of time, in seconds and bytes."""

    lane: Lane
    busy_s: float
    hidden_s: float
    """Busy while compute (gpu or adam) was busy too."""
    exposed_s: float
    """The training thread stood still for this lane."""
    nbytes: int
    count: int

    @property
    def rate(self) -> float:
        """Bytes per second while busy."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one process recorded, and by which clock."""

    spans: list[Span]
    host: str
    """Which boot of which machine: processes of one have the same CLOCK_MONOTONIC."""
    wall_ns: int
    """What is added to CLOCK_MONOTONIC for the time of day."""


class _Packed:
    """Spans in 28 bytes each: a long run records hundreds of thousands. Their names, a few for each chunk and unit, are kept once."""

    _LANES = tuple(Lane)

    def __init__(self) -> None:
        self._numbers = array("q")
        """start_ns, stop_ns and nbytes of the first span, of the second, ..."""
        self._kinds = array("i")
        """Index of the name, lane and is_stall."""
        self._names: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def nbytes(self) -> int:
        return len(self._numbers) * self._numbers.itemsize + len(self._kinds) * self._kinds.itemsize

    def append(self, span: Span) -> None:
        self._numbers.extend((span.start_ns, span.stop_ns, span.nbytes))
        name = self._names.setdefault(span.name, len(self._names))
        self._kinds.append((name * len(self._LANES) + self._LANES.index(span.lane)) * 2 + span.is_stall)

    def drop(self, count: int) -> None:
        """Forget the oldest."""
        del self._numbers[: 3 * count]
        del self._kinds[:count]

    def since(self, ns: int) -> list[Span]:
        """Those that end after `ns`."""
        names = list(self._names)
        times = numpy.array(self._numbers).reshape(-1, 3)
        kinds = numpy.array(self._kinds)
        late = times[:, 1] > ns
        found = []
        for (start_ns, stop_ns, nbytes), kind in zip(times[late].tolist(), kinds[late].tolist(), strict=True):
            name, lane = divmod(kind >> 1, len(self._LANES))
            found.append(Span(self._LANES[lane], names[name], start_ns, stop_ns, nbytes, bool(kind & 1)))
        return found


class Timeline:
    """A bounded record of spans. Recording is cheap and thread-safe; the arithmetic happens when somebody asks.

    `resolvers` are called before spans are read: movers whose times arrive late (CUDA events) hand them in there.
    """

    def __init__(self, max_spans: int = 500_000) -> None:
        self._max_spans = max_spans
        self._spans = _Packed()
        self._lock = threading.Lock()
        self._totals: dict[Lane, tuple[int, int]] = {lane: (0, 0) for lane in Lane}
        self._stalled_ns: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self.resolvers: list[Callable[[], None]] = []

    @property
    def nbytes(self) -> int:
        """Memory that the record takes by now: it grows up to `max_spans`."""
        return self._spans.nbytes

    def record(self, lane: Lane, name: str, start_ns: int, stop_ns: int, nbytes: int = 0) -> None:
        """A motion that is over."""
        self._add(Span(lane, name, start_ns, stop_ns, nbytes))

    def record_stall(self, lane: Lane, name: str, start_ns: int, stop_ns: int) -> None:
        """A wait for `lane` that is over."""
        self._add(Span(lane, name, start_ns, stop_ns, is_stall=True))

    @contextmanager
    def span(self, lane: Lane, name: str, nbytes: int = 0) -> Iterator[None]:
        """The body is the motion."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(lane, name, start_ns, time.monotonic_ns(), nbytes)

    @contextmanager
    def stall(self, lane: Lane, name: str) -> Iterator[None]:
        """The body is the training thread waiting for `lane`."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record_stall(lane, name, start_ns, time.monotonic_ns())

    def _add(self, span: Span) -> None:
        with self._lock:
            if span.is_stall:
                self._stalled_ns[span.lane] += span.stop_ns - span.start_ns
            else:
                nbytes, count = self._totals[span.lane]
                self._totals[span.lane] = (nbytes + span.nbytes, count + 1)
            if len(self._spans) >= self._max_spans:
                self._spans.drop(self._max_spans // 10)
            self._spans.append(span)

    def spans(self, since_ns: int = 0) -> list[Span]:
        """Spans that end after `since_ns`, oldest first."""
        for resolve in self.resolvers:
            resolve()
        with self._lock:
            kept = self._spans.since(since_ns)
        return sorted(kept, key=lambda span: span.start_ns)

    def moved_bytes(self) -> dict[Lane, int]:
        """Bytes each lane has moved since the start."""
        for resolve in self.resolvers:
            resolve()
        with self._lock:
            return {lane: nbytes for lane, (nbytes, _) in self._totals.items()}

    def stalled_s(self) -> dict[Lane, float]:
        """Seconds the training thread has waited for each lane since the start."""
        with self._lock:
            return {lane: ns / 1e9 for lane, ns in self._stalled_ns.items()}

    def summary(self, since_ns: int = 0) -> list[LaneSummary]:
        """Per lane: busy, hidden and exposed seconds since `since_ns`."""
        return summarize(self.spans(since_ns))

    def recording(self, since_ns: int = 0) -> Recording:
        """The spans that end after `since_ns`, to be laid beside those of other processes."""
        return Recording(
            spans=self.spans(since_ns),
            host=this_host(),
            wall_ns=time.time_ns() - time.monotonic_ns(),
        )

    def save_chrome_trace(self, path: str | Path, since_ns: int = 0) -> None:
        """As `save_chrome_trace` of this process alone."""
        save_chrome_trace(path, [self.recording(since_ns)])


def this_host() -> str:
    """The machine, and since which boot: the processes in which it is the same share a monotonic clock, memory and disks (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def save_chrome_trace(path: str | Path, recordings: Sequence[Recording]) -> None:
    """Write the Trace Event Format (JSON) that Perfetto and chrome://tracing open: one process per rank, in it a row per lane and one for the waits.

    Ranks on one host share its monotonic clock; those on others lie beside them as well as the hosts' wall clocks agree.
    """
    wall_ns: dict[str, int] = {}
    for recording in recordings:
        wall_ns.setdefault(recording.host, recording.wall_ns)
    events: list[dict[str, object]] = []
    for rank, recording in enumerate(recordings):
        events += _chrome_events(rank, recording.spans, ahead_ns=wall_ns[recording.host] - wall_ns[recordings[0].host])
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _chrome_events(rank: int, spans: Iterable[Span], ahead_ns: int) -> Iterator[dict[str, object]]:
    """One process of the trace, with `ahead_ns` added to the times of its clock."""
    rows = {lane: row for row, lane in enumerate(Lane, start=1)}
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    for row, name in enumerate(["waits", *map(str, Lane)]):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
    for span in spans:
        row = 0 if span.is_stall else rows[span.lane]
        name = f"wait for {span.lane}: {span.name}" if span.is_stall else span.name
        ts, duration, args = (span.start_ns + ahead_ns) / 1e3, (span.stop_ns - span.start_ns) / 1e3, {"bytes": span.nbytes}
        yield {"name": name, "ph": "X", "pid": rank, "tid": row, "ts": ts, "dur": duration, "args": args}


def summarize(spans: Iterable[Span]) -> list[LaneSummary]:
    """Busy is the union of a lane's spans; hidden is its overlap with compute; exposed is the sum of the waits for it."""
    spans = list(spans)
    moving = {lane: _union([span for span in spans if span.lane is lane and not span.is_stall]) for lane in Lane}
    compute = _union([span for span in spans if span.lane in COMPUTE_LANES and not span.is_stall])
    summaries = []
    for lane in Lane:
        mine = [span for span in spans if span.lane is lane]
        if not mine:
            continue
        hidden_ns = 0 if lane in COMPUTE_LANES else _overlap(moving[lane], compute)
        summaries.append(
            LaneSummary(
                lane=lane,
                busy_s=_length(moving[lane]) / 1e9,
                hidden_s=hidden_ns / 1e9,
                exposed_s=sum(span.stop_ns - span.start_ns for span in mine if span.is_stall) / 1e9,
                nbytes=sum(span.nbytes for span in mine),
                count=sum(not span.is_stall for span in mine),
            )
        )
    return summaries


def _union(spans: Sequence[Span]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        if runs and span.start_ns <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], span.stop_ns))
        else:
            runs.append((span.start_ns, span.stop_ns))
    return runs


def _length(runs: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in runs)


def _overlap(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> int:
    total, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total
