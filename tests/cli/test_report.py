"""What a run prints and records, computed from a timeline with known spans."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from infinity.cli import report as report_module
from infinity.cli.report import Meter, Reporter, StepReport, format_line, overlap_table, together
from infinity.kinds import Lane
from infinity.timeline import Timeline

SECOND = 1_000_000_000


def step_report(step: int, **changes: object) -> StepReport:
    values = {"loss": 2.0, "lr": 1e-3, "tokens": 100, "seconds": 0.5, "moved": {Lane.NVME_READ: 10_000_000}, "stalled_s": 0.05}
    return StepReport(step=step, **{**values, **changes})  # type: ignore[arg-type]


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def test_a_meter_gives_what_moved_since_the_last_step(monkeypatch):
    now = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(report_module.time, "monotonic", lambda: next(now))
    timeline = Timeline()
    timeline.record(Lane.NVME_READ, "before", 0, SECOND, 7)
    meter = Meter(timeline)
    timeline.record(Lane.NVME_READ, "first", 0, SECOND, 1000)
    first = meter.step(step=1, loss=3.0, lr=0.1, tokens=50)
    timeline.record(Lane.NVME_WRITE, "second", 0, SECOND, 300)
    second = meter.step(step=2, loss=2.0, lr=0.1, tokens=50)
    assert (first.seconds, second.seconds) == (2.0, 1.0)
    assert (first.moved[Lane.NVME_READ], first.moved[Lane.NVME_WRITE]) == (1000, 0)
    assert (second.moved[Lane.NVME_READ], second.moved[Lane.NVME_WRITE]) == (0, 300)


def test_a_step_of_ranks_is_the_mean_loss_all_bytes_and_tokens_and_the_longest_wait():
    moved = [{Lane.NVME_READ: 100, Lane.COMM: 7}, {Lane.NVME_READ: 20, Lane.COMM: 7}]
    mine = step_report(3, loss=1.0, tokens=10, seconds=0.5, moved=moved[0], stalled_s=0.1)
    others = step_report(3, loss=4.0, tokens=30, seconds=0.4, moved=moved[1], stalled_s=0.3)
    both = step_report(3, loss=2.5, tokens=40, seconds=0.5, moved={Lane.NVME_READ: 120, Lane.COMM: 14}, stalled_s=0.3)
    assert together([mine, others]) == both and together([mine]) == mine


def test_a_json_line_has_rates_and_shares():
    line = json.loads(step_report(4).as_json())
    assert line == {
        "step": 4,
        "loss": 2.0,
        "lr": 1e-3,
        "tokens_per_s": 200.0,
        "seconds": 0.5,
        "bytes": {"nvme-read": 10_000_000},
        "stalled_share": 0.1,
    }


def test_a_printed_line_is_the_mean_over_its_steps():
    line = format_line([step_report(9, loss=3.0), step_report(10, loss=2.0, seconds=1.5)])
    assert line == "step 10  loss 2.500  lr 1.0e-03  100 tokens/s  nvme-read 10.00 MB/s  stalled 5%"


def test_away_from_a_terminal_there_are_only_plain_lines(tmp_path):
    console = plain_console()
    with Reporter(console, tmp_path / "metrics.jsonl", steps=5, start=0, log_every=2) as reporter:
        for step in range(1, 6):
            reporter.step(step_report(step))
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0] for line in printed] == ["step 2", "step 4", "step 5"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(("start", "kept"), [(0, 0), (3, 1)])
def test_metrics_go_on_with_the_run_and_start_anew_with_a_new_one(tmp_path, start, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n')
    with Reporter(plain_console(), path, steps=9, start=start, log_every=1) as reporter:
        reporter.step(step_report(start + 1))
    assert len(path.read_text().splitlines()) == kept + 1


def test_the_lane_table_says_busy_hidden_and_exposed():
    timeline = Timeline()
    timeline.record(Lane.GPU, "block", 0, 4 * SECOND)
    timeline.record(Lane.NVME_READ, "fetch", 2 * SECOND, 6 * SECOND, 4_000_000_000)
    console = plain_console()
    console.print(overlap_table(timeline.summary(), 6.0))
    (row,) = [line for line in console.file.getvalue().splitlines() if "nvme-read" in line]  # type: ignore[attr-defined]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["nvme-read", "4.00", "2.00", "50%", "0.00", "3.73 GiB", "1.00 GB/s"]
