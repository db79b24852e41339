"""What some threads of this process cost: CPU time, context switches, page faults, from /proc/self/task."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

_TASKS = Path("/proc/self/task")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the threads began. The kernel counts CPU time in ticks of 10 ms."""

    user_s: float = 0.0
    system_s: float = 0.0
    switches: int = 0
    minor_faults: int = 0
    major_faults: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def thread_ids() -> frozenset[int]:
    """Threads of this process that are alive now."""
    return frozenset(int(name) for name in os.listdir(_TASKS))


def usage_of(threads: Iterable[int]) -> Usage:
    """The sum over those that are still there."""
    total = Usage()
    for thread in threads:
        try:
            fields = (_TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()
            status = (_TASKS / str(thread) / "status").read_text()
        except OSError:
            continue
        switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
        total += Usage(int(fields[11]) * _TICK_S, int(fields[12]) * _TICK_S, switches, int(fields[7]), int(fields[9]))
    return total
