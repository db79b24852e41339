"""`infinity io`: fio's words in, fio's report out, a line of progress in between."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from infinity.cli.interrupt import INTERRUPTED, Interrupt
from infinity.cli.progress_line import ProgressLine
from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.workload import run
from infinity.workload.fio_json import render_json
from infinity.workload.job import FLAGS, Job
from infinity.workload.jobfile import read_words
from infinity.workload.marks import open_hint
from infinity.workload.report import binary, decimal, render

FORMATS = ("normal", "json")
_WIDTH = 118
_KEY_WIDTH = 14


def run_io(words: Sequence[str], *, output: Path | None, output_format: str, destroy_data: bool) -> int:
    """Run the jobs that the words describe and print or write their report. 0, or 130 when it was ended early.

    Raises ConfigError for words that cannot work, StorageError for I/O that fails.
    """
    check_report(output, output_format)
    groups = read_words(words)
    console = Console(stderr=True, soft_wrap=True)
    with Interrupt("blocks under way are finished and reported") as interrupt, ProgressLine(console) as line:
        pace = _Pace(line)

        def watch(progress: run.Progress) -> bool:
            pace.show(progress)
            return not interrupt.requested

        try:
            results = run.run_jobs(groups, destroy_data=destroy_data, say=line.say, watch=watch, is_wanted=lambda: not interrupt.requested)
        except OSError as error:  # a path that the system does not even want to look at
            if isinstance(error, InfinityError):
                raise
            raise StorageError(error.errno or errno.EIO, str(error.filename), hint=open_hint(error.errno)) from error
    hand_over(render(results) if output_format == "normal" else render_json(results), output)
    return INTERRUPTED if interrupt.requested else 0


class _Pace:
    """Shows where the jobs are, with their rate since the last look."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line
        self._before: run.Progress | None = None

    def show(self, progress: run.Progress) -> None:
        before = self._before
        if before is not None and progress.elapsed_s < before.elapsed_s:
            before = None  # the next group
        seconds = progress.elapsed_s - (before.elapsed_s if before else 0.0)
        if seconds < 1e-3:
            return
        self._line.show(f"{progress.jobs} jobs", progress.share, 1.0, format_rates(before, progress, seconds))
        self._before = progress


def format_rates(before: run.Progress | None, now: run.Progress, seconds: float) -> str:
    """`r=1.20GiB/s (1.29GB/s) w=0B/s (0B/s) 9.8k IOPS`, of the time between two looks."""
    read = (now.read_bytes - (before.read_bytes if before else 0)) / seconds
    written = (now.write_bytes - (before.write_bytes if before else 0)) / seconds
    ios = (now.ios - (before.ios if before else 0)) / seconds
    return f"r={binary(read)}/s ({decimal(read)}/s) w={binary(written)}/s ({decimal(written)}/s) {ios:,.0f} IOPS"


def help_text() -> str:
    """What `--help` says above its own options: every key, as fio names it."""
    lines = ["\b", "Jobs are given as to fio: --name=NAME begins a job, keys before the first --name hold for all jobs, words"]
    lines += ["without dashes are job files. Blocks go through the I/O engine that training uses. fio's keys, as fio means them:"]
    lines += ["", "\b"]
    for name, field in Job.model_fields.items():
        left = f"--{name}" if name in FLAGS else f"--{name}="
        wrapped = textwrap.wrap(" ".join((field.description or "").split()), _WIDTH - _KEY_WIDTH - 2)
        lines.append(f"  {left:<{_KEY_WIDTH}}{wrapped[0]}")
        lines += [" " * (_KEY_WIDTH + 2) + line for line in wrapped[1:]]
    lines += ["", "\b", "Sizes are whole numbers with k, m, g, t, p (1024 and its powers) or ki, mi, ... (1000); times with ms, s, m, h, d.", ""]
    lines += ["\b", "  infinity io --name=seq --rw=read --bs=1m --iodepth=32 --ioengine=libaio --size=16g --directory=/mnt/nvme0"]
    lines += ["  infinity io --name=rand --rw=randrw --rwmixread=70 --bs=4k --iodepth=32 --ioengine=libaio --numjobs=4 \\"]
    lines += ["              --size=4g --directory=/mnt/nvme0 --time_based --runtime=30 --ramp_time=5 --output-format=json"]
    lines += ["  infinity io --name=hbm --rw=read --bs=1m --iodepth=32 --ioengine=libaio --size=16g --directory=/mnt/nvme0 \\"]
    lines += ["              --target=cuda"]
    lines += ["  infinity io job.fio --output=report.txt"]
    lines += ["", "\b", "In place of jobs, --pattern=training --config=CONFIG lays out the files that `infinity train CONFIG` would, reads and"]
    lines += ["writes them as its steps would, with nothing computed, and removes them: what a step costs these drives.", "", "\b"]
    lines += ["  infinity io --pattern=training --config=run.toml --steps=5"]
    return "\n".join(lines)


def check_report(output: Path | None, output_format: str) -> None:
    """Whether a report can be made and written, before hours of I/O and not after. Raises ConfigError naming the option."""
    if output_format not in FORMATS:
        raise ConfigError(f"--output-format={output_format}: choose {' or '.join(FORMATS)}")
    if output is not None:
        _check_output(output)


def _check_output(path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--output={path}: cannot be written: {'it is a directory' if path.is_dir() else f'look at {folder}'}")


def hand_over(text: str, output: Path | None) -> None:
    """A report goes where it is wanted: to standard output where nobody names a file."""
    if output is None:
        sys.stdout.write(text)
    else:
        write_output(output, text)


def write_output(path: Path, text: str) -> None:
    """Raises StorageError that names the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, str(path), 0, len(text), open_hint(error.errno)) from error
