"""What replayed steps moved and how long it took, as values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from infinity.kinds import Lane
from infinity.timeline import Span, summarize


class Phase(StrEnum):
    """A stretch of a step in which the drives do one kind of thing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


STEP = "step"
"""What the three of them are together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMoved:
    """Of one path: bytes, and the seconds in which a request of that direction was under way."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0

    @classmethod
    def of(cls, spans: Sequence[Span]) -> PathMoved:
        lanes = {summary.lane: summary for summary in summarize(spans)}
        read, written = lanes.get(Lane.NVME_READ), lanes.get(Lane.NVME_WRITE)
        return cls(
            read_bytes=read.nbytes if read else 0,
            write_bytes=written.nbytes if written else 0,
            read_s=read.busy_s if read else 0.0,
            write_s=written.busy_s if written else 0.0,
        )

    def __add__(self, other: PathMoved) -> PathMoved:
        return PathMoved(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            read_s=self.read_s + other.read_s,
            write_s=self.write_s + other.write_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMoved:
    """One phase of one step, from its first request to the end of its last."""

    seconds: float
    paths: Mapping[Path, PathMoved]

    @property
    def read_bytes(self) -> int:
        return sum(moved.read_bytes for moved in self.paths.values())

    @property
    def write_bytes(self) -> int:
        return sum(moved.write_bytes for moved in self.paths.values())


@dataclass(frozen=True, slots=True)
class StepMoved:
    """One step, or the phases of it that were run before somebody ended it."""

    phases: Mapping[Phase, PhaseMoved]

    @property
    def is_whole(self) -> bool:
        return len(self.phases) == len(Phase)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def read_bytes(self) -> int:
        return sum(phase.read_bytes for phase in self.phases.values())

    @property
    def write_bytes(self) -> int:
        return sum(phase.write_bytes for phase in self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The median of `count` runs of one phase, or of whole steps. Bytes are the same in each."""

    name: str
    count: int
    seconds: float
    read_bytes: int
    write_bytes: int

    @property
    def read_rate(self) -> float:
        """Bytes per second of all of it."""
        return self.read_bytes / self.seconds if self.seconds else 0.0

    @property
    def write_rate(self) -> float:
        return self.write_bytes / self.seconds if self.seconds else 0.0


def rows(steps: Sequence[StepMoved]) -> list[Row]:
    """The phases that were run, and the whole step if there is one."""
    found = [_row(phase.value, [step.phases[phase] for step in steps if phase in step.phases]) for phase in Phase]
    return [row for row in (*found, _row(STEP, [step for step in steps if step.is_whole])) if row is not None]


def _row(name: str, runs: Sequence[PhaseMoved | StepMoved]) -> Row | None:
    if not runs:
        return None
    return Row(
        name=name,
        count=len(runs),
        seconds=statistics.median(run.seconds for run in runs),
        read_bytes=runs[0].read_bytes,
        write_bytes=runs[0].write_bytes,
    )


def of_paths(steps: Sequence[StepMoved]) -> dict[Path, PathMoved]:
    """What each path did in all of it."""
    total: dict[Path, PathMoved] = {}
    for moved in (phase for step in steps for phase in step.phases.values()):
        for path, part in moved.paths.items():
            total[path] = total.get(path, PathMoved()) + part
    return total


def by_path(spans: Sequence[Span], path_of: Callable[[str], Path]) -> dict[Path, PathMoved]:
    """Spans of a phase, told apart by the chunk that each is named after."""
    parts: dict[Path, list[Span]] = {}
    for span in spans:
        parts.setdefault(path_of(span.name), []).append(span)
    return {path: PathMoved.of(part) for path, part in parts.items()}
