"""What a run says while it goes: a line now and then, a bar on a terminal, every step in metrics.jsonl, the lanes at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from infinity.kinds import Lane
from infinity.sizes import format_bytes, format_rate
from infinity.timeline import COMPUTE_LANES, LaneSummary, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step: how it went, in seconds and bytes."""

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    moved: Mapping[Lane, int]
    """Bytes per lane."""
    stalled_s: float
    """Seconds in which the training thread waited for any lane; over ranks, that of the rank that waited longest."""

    def as_json(self) -> str:
        """One line of metrics.jsonl."""
        return json.dumps(
            {
                "step": self.step,
                "loss": self.loss,
                "lr": self.lr,
                "tokens_per_s": self.tokens / self.seconds,
                "seconds": self.seconds,
                "bytes": {lane.value: nbytes for lane, nbytes in self.moved.items() if nbytes},
                "stalled_share": self.stalled_s / self.seconds,
            }
        )


def together(reports: Sequence[StepReport]) -> StepReport:
    """One step of all ranks, from what each measured: the mean of the losses, all tokens and bytes, the longest time and the longest wait."""
    first = reports[0]
    return StepReport(
        step=first.step,
        loss=sum(report.loss for report in reports) / len(reports),
        lr=first.lr,
        tokens=sum(report.tokens for report in reports),
        seconds=max(report.seconds for report in reports),
        moved={lane: sum(report.moved[lane] for report in reports) for lane in first.moved},
        stalled_s=max(report.stalled_s for report in reports),
    )


class Meter:
    """Turns the timeline's running totals into what one step moved."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._mark()

    def _mark(self) -> None:
        self._at_s = time.monotonic()
        self._moved = self._timeline.moved_bytes()
        self._stalled = sum(self._timeline.stalled_s().values())

    def step(self, *, step: int, loss: float, lr: float, tokens: int) -> StepReport:
        """The step that ends now and began at the last call."""
        at_s, moved, stalled = self._at_s, self._moved, self._stalled
        self._mark()
        return StepReport(
            step=step,
            loss=loss,
            lr=lr,
            tokens=tokens,
            seconds=max(self._at_s - at_s, 1e-9),
            moved={lane: nbytes - moved.get(lane, 0) for lane, nbytes in self._moved.items()},
            stalled_s=self._stalled - stalled,
        )


class Reporter:
    """Writes steps to the screen and to `metrics.jsonl`. Close it, or use it under `with`."""

    def __init__(self, console: Console, metrics: Path, *, steps: int, start: int, log_every: int) -> None:
        self._console = console
        self._log_every = log_every
        self._since_line: list[StepReport] = []
        self._file = metrics.open("a" if start else "w", encoding="utf-8")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("training", total=steps, completed=start)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def step(self, report: StepReport) -> None:
        """One more step; every `log_every`-th prints the means since the last line."""
        self._file.write(report.as_json() + "\n")
        self._file.flush()
        self._since_line.append(report)
        self._bar.update(self._task, completed=report.step, description=f"loss {report.loss:.3f}")
        if report.step % self._log_every == 0:
            self._print_line()

    def _print_line(self) -> None:
        if self._since_line:
            self._console.print(format_line(self._since_line), markup=False, highlight=False, soft_wrap=True)
        self._since_line = []

    def close(self) -> None:
        """The rest of the last line, and the terminal as it was."""
        self._print_line()
        self._bar.stop()
        self._file.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def format_line(reports: list[StepReport]) -> str:
    """`step 20  loss 2.913  lr 1.0e-03  1,204 tokens/s  nvme-read 0.41 GB/s ...  stalled 3 %`, means over `reports`."""
    seconds = sum(report.seconds for report in reports)
    loss = sum(report.loss for report in reports) / len(reports)
    tokens = sum(report.tokens for report in reports)
    words = [f"step {reports[-1].step}", f"loss {loss:.3f}", f"lr {reports[-1].lr:.1e}", f"{tokens / seconds:,.0f} tokens/s"]
    for lane in Lane:
        if nbytes := sum(report.moved.get(lane, 0) for report in reports):
            words.append(f"{lane.value} {format_rate(nbytes / seconds)}")
    words.append(f"stalled {sum(report.stalled_s for report in reports) / seconds:.0%}")
    return "  ".join(words)


def overlap_table(summaries: list[LaneSummary], seconds: float, whose: str = "lanes") -> Table:
    """Per lane: how long it was busy, how much of that lay under compute, how long the training thread waited for it."""
    table = Table(title=f"{whose} over the last {seconds:.1f} s", title_justify="left")
    for heading in ("lane", "busy s", "hidden s", "hidden", "exposed s", "moved", "rate"):
        table.add_column(heading, justify="left" if heading == "lane" else "right", no_wrap=True)
    for lane in summaries:
        is_motion = lane.lane not in COMPUTE_LANES
        table.add_row(
            lane.lane.value,
            f"{lane.busy_s:.2f}",
            f"{lane.hidden_s:.2f}" if is_motion else "",
            f"{lane.hidden_s / lane.busy_s:.0%}" if is_motion and lane.busy_s else "",
            f"{lane.exposed_s:.2f}",
            format_bytes(lane.nbytes) if lane.nbytes else "",
            format_rate(lane.rate) if lane.nbytes else "",
        )
    return table
