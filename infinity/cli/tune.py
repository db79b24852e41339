"""`infinity tune`: how fast the paths are under which setting, as a table, a picture, JSON, and a configuration."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from infinity.cli.interrupt import Interrupt
from infinity.cli.io import write_output
from infinity.errors import ConfigError, StorageError
from infinity.sizes import SECTOR_BYTES, GiB, format_bytes
from infinity.storage.probe import check_path
from infinity.tune import Choice, Measured, Mode, Setting, choose, grid, setting, sweep
from infinity.tune.ground import LEAST_BYTES
from infinity.tune.heatmap import has_matplotlib, save_heatmap
from infinity.tune.section import render_json, render_toml
from infinity.workload.notation import format_size, parse_count, parse_seconds, parse_size

NOT_SUPPORTED = 1
"""Exit status where the measurements support no recommendation."""

BS = ",".join(format_size(block).removesuffix("iB").lower() for block in setting.BLOCKS)
IODEPTH = ",".join(map(str, setting.DEPTHS))
WORKERS = ",".join(map(str, setting.WORKERS))
"""What is tried where nobody says, as the options are written."""

_ROWS = 12
_GB_S = 1e9

Amount = TypeVar("Amount", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for."""

    paths: Sequence[Path]
    settings: Sequence[Setting]
    nbytes: int | None
    """Of each path's file; None: 1 GiB, or a quarter of what is free where that is less."""
    seconds: float
    rounds: int
    output: Path


def read_request(paths: Sequence[Path], output: Path, *, size: str | None, runtime: str, rounds: int, bs: str, iodepth: str, workers: str) -> Request:
    """The options as fio writes sizes and times. Raises ConfigError naming the option."""
    return Request(
        paths=[path.absolute() for path in paths],
        settings=_grid(bs, iodepth, workers),
        nbytes=None if size is None else _within("--size", size, parse_size, LEAST_BYTES, 1 << 50),
        seconds=_within("--runtime", runtime, parse_seconds, 0.01, 3600),
        rounds=rounds,
        output=output,
    )


def _grid(bs: str, iodepth: str, workers: str) -> tuple[Setting, ...]:
    """The settings to try, within what a configuration may say."""
    blocks = [_within("--bs", text, parse_size, SECTOR_BYTES, GiB) for text in bs.split(",")]
    if odd := [block for block in blocks if block % SECTOR_BYTES]:
        raise ConfigError(f"--bs={odd[0]}: direct I/O takes multiples of {SECTOR_BYTES} bytes")
    depths = [_within("--iodepth", text, parse_count, 1, 1024) for text in iodepth.split(",")]
    counts = [_within("--workers", text, parse_count, 1, 16) for text in workers.split(",")]
    if settings := grid(blocks, depths, counts):
        return settings
    raise ConfigError(
        f"--bs={bs} --iodepth={iodepth} --workers={workers}: all keep more than {setting.MOST_IN_FLIGHT} bytes in flight. Lower one of them"
    )


def _within(option: str, text: str, parse: Callable[[str], Amount], least: Amount, most: Amount) -> Amount:
    """The value of an option. Raises ConfigError for one that is malformed or out of range."""
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}={text}: {error}") from None
    if not least <= value <= most:
        raise ConfigError(f"{option}={text}: it must lie between {least} and {most}")
    return value


def run_tune(request: Request) -> int:
    """Sweep, print, write. 0, or 1 where nothing is recommended. Raises ConfigError before anything is touched, StorageError for I/O that fails."""
    picture, raw = request.output.with_suffix(".png"), request.output.with_suffix(".json")
    _check_outputs((request.output, picture, raw))
    paths = request.paths
    console = Console(stderr=True, soft_wrap=True)
    for path in _distinct(paths):
        if warning := check_path(path).warning:
            _say(console, f"warning: {warning}")
    nbytes = request.nbytes or _file_bytes(paths)
    trials = len(paths) * request.rounds * len(request.settings) * len(Mode)
    what = f"{len(request.settings)} settings, {request.rounds} rounds, files of {format_bytes(nbytes)}"
    _say(console, f"{what}: at least {trials * request.seconds:.0f} s")
    with Interrupt("nothing is written") as interrupt, _bar(console) as bar:
        task = bar.add_task("", total=trials)

        def watch(done: int, total: int, what: str) -> bool:
            bar.update(task, completed=done, description=what)
            return not interrupt.requested

        measured = sweep(paths, request.settings, nbytes=nbytes, seconds=request.seconds, rounds=request.rounds, watch=watch)
    choice = choose(measured)
    _show(measured, choice)
    conditions = {"kernel": platform.release(), "cores": os.cpu_count(), "file_bytes": nbytes, "seconds": request.seconds, "rounds": request.rounds}
    written = {raw: render_json(measured, choice, conditions)}
    if choice.setting is not None:
        written[request.output] = render_toml(measured, choice)
    for file, text in written.items():
        write_output(file, text)
    names = [str(file) for file in written]
    if has_matplotlib():
        save_heatmap(measured, choice.setting or choice.best, picture)
        names.append(str(picture))
    else:
        _say(console, "no heat map: matplotlib is not installed (pip install matplotlib)")
    print(f"{choice.reason}\nwrote {', '.join(names)}")
    if choice.setting is None:
        return NOT_SUPPORTED
    print(f"`infinity train {request.output} --model ... --data ...` uses it as it is; or copy the section")
    return 0


def _check_outputs(files: Sequence[Path]) -> None:
    """Before minutes of I/O, not after."""
    folder = files[0].parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--output={files[0]}: {folder} is not a directory that can be written to")
    if files[0].suffix != ".toml":
        raise ConfigError(f"--output={files[0]}: a configuration with comments is TOML: name it {files[0].with_suffix('.toml').name}")
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists and is left as it is: name another --output, or remove it")


def _distinct(paths: Sequence[Path]) -> Sequence[Path]:
    for path in paths:
        if sum(other.resolve() == path.resolve() for other in paths) > 1:
            raise ConfigError(f"{path} is named twice: give each path once")
    return paths


def _file_bytes(paths: Sequence[Path]) -> int:
    """A size that leaves room everywhere, also where several paths share a disk. Raises StorageError where there is none."""
    free = min(check_path(path).free_bytes for path in paths) // len(paths)
    nbytes = min(GiB, free // 4)
    if nbytes < LEAST_BYTES:
        hint = f"{format_bytes(free)} are free for each path, trials take files of {format_bytes(4 * LEAST_BYTES)}: free some, or give --size"
        raise StorageError(errno.ENOSPC, str(paths[0]), 0, LEAST_BYTES, hint)
    return nbytes


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _show(measured: Sequence[Measured], choice: Choice) -> None:
    """The best settings of each path, the recommended one marked."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    for path in measured:
        table = Table(title=f"{path.path}, GB/s, medians", title_justify="left")
        for name in ("", "block", "depth", "workers", *Mode, "spread"):
            table.add_column(str(name), justify="right")
        ranked = sorted(path.settings(), key=path.score, reverse=True)
        shown = [*ranked[:_ROWS], *(one for one in ranked[_ROWS:] if one == choice.setting)]
        for one in shown:
            rates = [f"{path.rate(one, mode) / _GB_S:.2f}" for mode in Mode]
            mark = "->" if one == choice.setting else ""
            table.add_row(mark, format_size(one.block_bytes), str(one.depth), str(one.workers), *rates, f"{path.spread(one):.1%}")
        console.print(table, highlight=False)
