"""One line of what the doctor found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a finding bears on a run; in ascending order of weight."""

    OK = "ok"
    WARNING = "warning"
    """The run works, but slower or with less than it could have."""
    FAILURE = "failure"
    """The run will not start, or will not end."""


_EXIT_STATUS = {Status.OK: 0, Status.WARNING: 1, Status.FAILURE: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw."""

    subject: str
    """What was looked at. A stable name: docs/doctor.md lists them."""
    status: Status
    found: str
    """The facts, with their units."""
    way_out: str = ""
    """The command, key or file that changes it; never empty for a warning or a failure."""
    path: str | None = None
    """The NVMe path it is about, where it is about one."""

    def __post_init__(self) -> None:
        assert self.way_out or self.status is Status.OK, f"{self.subject}: a {self.status} needs a way out"


def ok(subject: str, found: str, path: str | None = None) -> Finding:
    return Finding(subject=subject, status=Status.OK, found=found, path=path)


def warning(subject: str, found: str, way_out: str, path: str | None = None) -> Finding:
    return Finding(subject=subject, status=Status.WARNING, found=found, way_out=way_out, path=path)


def failure(subject: str, found: str, way_out: str, path: str | None = None) -> Finding:
    return Finding(subject=subject, status=Status.FAILURE, found=found, way_out=way_out, path=path)


def exit_status(findings: Iterable[Finding]) -> int:
    """That of the worst: 0 all is ok, 1 a warning, 2 a failure."""
    return max((_EXIT_STATUS[finding.status] for finding in findings), default=0)
