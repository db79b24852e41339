"""What a replay tells people and programs: phases, paths, and what the plan expects beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.kinds import Lane
from infinity.planner.plan import Plan
from infinity.replay.measured import STEP, PathMoved, Row, StepMoved, of_paths, rows
from infinity.sizes import format_bytes, format_rate
from infinity.storage.probe import facts
from infinity.storage.store import AioOptions, NvmePath

SHORT_S = 3.0
"""Drives and their caches take seconds to settle."""

Table = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Steps that were replayed, and of what."""

    config: Path
    model: str
    accumulation: int
    plan: Plan
    paths: Sequence[NvmePath]
    aio: AioOptions
    steps: Sequence[StepMoved]

    def render(self) -> str:
        """For people."""
        lines = [*self._head(), *(f"warning: {warning}" for warning in self.warnings())]
        lines += ["", *_phase_table(rows(self.steps)), "", *self._path_table(), "", *self._expected()]
        return "\n".join(lines) + "\n"

    def render_json(self) -> str:
        """For programs: seconds, bytes, bytes per second."""
        table = {
            "pattern": "training",
            "config": str(self.config),
            "model": self.model,
            "parameters": self.plan.num_params,
            "chunk_elements": self.plan.chunk_numel,
            "prefetch_units": self.plan.prefetch_units,
            "busy_paths": self.plan.busy_paths,
            "block_bytes": self.aio.block_bytes,
            "queue_depth": self.aio.queue_depth,
            "readers": self.aio.readers,
            "writers": self.aio.writers,
            "accumulation": self.accumulation,
            "warnings": self.warnings(),
            "medians": {row.name: _row_table(row) for row in rows(self.steps)},
            "paths": [_path_row(path, moved, self._share(moved)) for path, moved in self._by_path().items()],
            "plan": self._plan_table(),
            "steps": [_step_table(step) for step in self.steps],
        }
        return json.dumps(table, indent=2) + "\n"

    def warnings(self) -> list[str]:
        """What a reader of the figures must know."""
        said = [warning for path in self.paths if (warning := facts(path.path).warning)]
        seconds = sum(step.seconds for step in self.steps)
        if seconds < SHORT_S:
            said.append(f"the steps took {seconds:.2f} s together: too short for a drive to settle. Give more --steps")
        if self.accumulation > 1:
            said.append(
                f"train.accumulation = {self.accumulation}: the step replayed is of one micro-step, which is what a plan counts. A real one has "
                f"forward and backward {self.accumulation} times, and all but the first read gradients that rest on NVMe, to add to them"
            )
        return said

    def _head(self) -> Iterator[str]:
        plan, aio = self.plan, self.aio
        whole = sum(step.is_whole for step in self.steps)
        count = f"{whole} step{'' if whole == 1 else 's'}" + (" and a part of one" if whole < len(self.steps) else "")
        yield f"infinity io: training with {self.config} replayed, I/O alone: {count}, {self.model}, {plan.num_params:,} parameters"
        yield (
            f"block_size={format_bytes(aio.block_bytes)} queue_depth={aio.queue_depth} readers={aio.readers} writers={aio.writers}, "
            f"chunks of {plan.chunk_numel:,} elements, {plan.prefetch_units} units ahead"
        )

    def _expected(self) -> Iterator[str]:
        """The plan's seconds beside what was measured."""
        traffic, times = self.plan.traffic, self.plan.seconds()
        lanes = [f"{lane} {format_bytes(traffic[lane])}{_at(traffic[lane], times.get(lane))}" for lane in (Lane.NVME_READ, Lane.NVME_WRITE)]
        yield f"the plan expects, from each path's rates: {', '.join(lanes)}"
        whole = next((row for row in rows(self.steps) if row.name == STEP), None)
        measured = "the time that one spends on I/O, and none was finished here" if whole is None else f"{whole.seconds:.3f} s"
        yield f"a real step takes at least as long as the larger of its compute and {measured}"

    def _path_table(self) -> Iterator[str]:
        """Rates of the time in which the path had a request of that direction under way."""
        width = max(len(str(path.path)) for path in self.paths)
        yield f"{'path':<{width}} {'share':>8} {'while reading':>16} {'while writing':>16}"
        for path, moved in self._by_path().items():
            read, written = _rate(moved.read_bytes, moved.read_s), _rate(moved.write_bytes, moved.write_s)
            yield f"{path!s:<{width}} {self._share(moved):>8.1%} {read:>16} {written:>16}"

    def _by_path(self) -> dict[Path, PathMoved]:
        """As the configuration lists them, also those that got nothing."""
        found = of_paths(self.steps)
        return {path.path: found.get(path.path, PathMoved()) for path in self.paths}

    def _share(self, moved: PathMoved) -> float:
        """A path's part of all bytes, 0 to 1."""
        return (moved.read_bytes + moved.write_bytes) / max(1, sum(step.read_bytes + step.write_bytes for step in self.steps))

    def _plan_table(self) -> Table:
        times = self.plan.seconds()
        return {
            "read_bytes": self.plan.traffic[Lane.NVME_READ],
            "write_bytes": self.plan.traffic[Lane.NVME_WRITE],
            "read_seconds": times.get(Lane.NVME_READ),
            "write_seconds": times.get(Lane.NVME_WRITE),
        }


def _at(nbytes: int, seconds: float | None) -> str:
    return f" in {seconds:.3f} s at {format_rate(nbytes / seconds)}" if seconds else ""


def _phase_table(found: Sequence[Row]) -> Iterator[str]:
    yield _line("medians", "seconds", "read", "at", "written", "at")
    for row in found:
        read, written = _amount(row.read_bytes, row.read_rate), _amount(row.write_bytes, row.write_rate)
        yield _line(row.name, f"{row.seconds:.3f}", *read, *written)


def _line(name: str, *cells: str) -> str:
    return f"{name:<10} " + " ".join(f"{cell:>12}" for cell in cells)


def _amount(nbytes: int, rate: float) -> tuple[str, str]:
    return (format_bytes(nbytes), format_rate(rate)) if nbytes else ("-", "-")


def _rate(nbytes: int, seconds: float) -> str:
    return format_rate(nbytes / seconds) if seconds else "-"


def _row_table(row: Row) -> Table:
    return {
        "count": row.count,
        "seconds": row.seconds,
        "read_bytes": row.read_bytes,
        "write_bytes": row.write_bytes,
        "read_rate": row.read_rate,
        "write_rate": row.write_rate,
    }


def _path_row(path: Path, moved: PathMoved, share: float) -> Table:
    return {
        "path": str(path),
        "share": share,
        "read_bytes": moved.read_bytes,
        "write_bytes": moved.write_bytes,
        "read_seconds": moved.read_s,
        "write_seconds": moved.write_s,
        "read_rate": moved.read_bytes / moved.read_s if moved.read_s else 0.0,
        "write_rate": moved.write_bytes / moved.write_s if moved.write_s else 0.0,
    }


def _step_table(step: StepMoved) -> Table:
    phases = {
        phase.value: {"seconds": moved.seconds, "read_bytes": moved.read_bytes, "write_bytes": moved.write_bytes}
        for phase, moved in step.phases.items()
    }
    return {"whole": step.is_whole, "seconds": step.seconds, "read_bytes": step.read_bytes, "write_bytes": step.write_bytes, "phases": phases}
