"""`infinity io --pattern=training`: what a step of a configuration costs the drives, as a report, before anything is trained."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from infinity import replay
from infinity.cli.interrupt import INTERRUPTED, Interrupt
from infinity.cli.io import check_report, hand_over
from infinity.cli.progress_line import ProgressLine
from infinity.config import Config, load_config
from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.functions import load_function
from infinity.kinds import Tier
from infinity.preparation import Preview, aio_options, preview
from infinity.replay.report import Report
from infinity.sizes import format_bytes, format_rate

PATTERNS = ("training",)

STEPS = 3
"""Where nobody says. The first counts too: the files are laid out, and nothing is learned or cached from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for."""

    config: Path
    settings: Sequence[str]
    steps: int


def read_request(
    pattern: str | None,
    words: Sequence[str],
    *,
    config: Path | None,
    settings: Sequence[str],
    model: str | None,
    steps: int | None,
    destroy_data: bool,
) -> Request:
    """Raises ConfigError naming the option that is wrong, missing or one too many."""
    given = {"--config": config, "--set": settings, "--model": model, "--steps": steps}
    if pattern is None:
        raise ConfigError(f"{next(name for name, value in given.items() if value)} belongs to --pattern=training, and fio's jobs have no use for it")
    if pattern not in PATTERNS:
        raise ConfigError(f"--pattern={pattern}: choose {', '.join(PATTERNS)}; patterns of fio's jobs are given with --rw")
    if words:
        raise ConfigError(
            f"--pattern={pattern} takes no fio jobs, the configuration says what is read and written: leave out {words[0]}, or --pattern"
        )
    if destroy_data:
        raise ConfigError(f"--pattern={pattern} makes files of its own and overwrites nobody's: leave out --destroy-data")
    if config is None:
        raise ConfigError(f"--pattern={pattern} needs --config=CONFIG, the configuration that `infinity train` would be given")
    return Request(config=config, settings=[*settings, *([f"train.model={model}"] if model else [])], steps=steps or STEPS)


def run_replay(request: Request, *, output: Path | None, output_format: str) -> int:
    """Replay the steps and print or write the report. 0, or 130 when it was ended early.

    Raises ConfigError for what cannot work, CapacityError for budgets that are too small, StorageError for I/O that fails.
    """
    check_report(output, output_format)
    config = load_config(request.config, request.settings)
    console = Console(stderr=True, soft_wrap=True)
    with Interrupt("the running phase is finished and reported") as interrupt, ProgressLine(console) as line:
        with contextlib.redirect_stdout(sys.stderr):  # what the model's module prints; standard output is the report's
            build = load_function("train.model", config.train.model, [request.config.absolute().parent, Path.cwd()])
            for sentence in replay.remove_leftovers([Path(entry.path) for entry in config.nvme.paths]):
                line.say(sentence)
            found = preview(build, config)
        _refuse_without_traffic(request.config, config, found)
        steps = _replayed(found, config, request.steps, line, lambda: not interrupt.requested)
    report = Report(
        config=request.config,
        model=str(config.train.model),
        accumulation=config.train.accumulation,
        plan=found.plan,
        paths=found.paths,
        aio=aio_options(config),
        steps=steps,
    )
    hand_over(report.render() if output_format == "normal" else report.render_json(), output)
    return INTERRUPTED if interrupt.requested else 0


def _refuse_without_traffic(source: Path, config: Config, found: Preview) -> None:
    if found.plan.resting(Tier.NVME):
        return
    held = ", ".join(f"{format_bytes(found.plan.resting(tier))} in {tier}" for tier in Tier if found.plan.resting(tier))
    where = "" if config.nvme.paths else "name a directory in nvme.paths, and "
    raise ConfigError(
        f"{source}: the plan puts nothing on NVMe ({held}), so a step of training moves nothing over a drive. To see what it would: "
        f"{where}pin states there, as with --set placement.optimizer=nvme, or lower budgets.cpu"
    )


def _replayed(found: Preview, config: Config, count: int, line: ProgressLine, is_wanted: Callable[[], bool]) -> list[replay.StepMoved]:
    """The steps, files gone. KeyboardInterrupt when it was ended before anything was measured."""
    steps = []
    with _named(found), replay.Replay(found, aio_options(config), watch=partial(_show, line)) as drives:
        places = ", ".join(str(path.path) for path in found.paths)
        line.say(f"laying out {format_bytes(found.plan.resting(Tier.NVME))} in {places}")
        drives.lay_out(is_wanted)
        for number in range(1, count + 1):
            step = drives.step(f"step {number} of {count}", is_wanted)
            if step.phases:
                steps.append(step)
    if not steps:
        raise KeyboardInterrupt
    return steps


@contextlib.contextmanager
def _named(found: Preview) -> Iterator[None]:
    """What the system refuses beside I/O, such as a directory, is an error of storage too."""
    try:
        yield
    except OSError as error:
        if isinstance(error, InfinityError):
            raise
        raise StorageError(error.errno or errno.EIO, str(error.filename or found.paths[0].path)) from error


def _show(line: ProgressLine, progress: replay.Progress) -> None:
    """The rate is that of the part so far, reads and writes together."""
    rate = format_rate(progress.done_bytes / progress.seconds) if progress.seconds else ""
    line.show(progress.what, progress.done_bytes, progress.total_bytes, rate)
