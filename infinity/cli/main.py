"""The `infinity` command: reads words, calls one function each, and turns errors into a line and an exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.checkpoint.export import export_weights
from infinity.cli.clean import clean_run
from infinity.cli.doctor import run_doctor
from infinity.cli.interrupt import INTERRUPTED
from infinity.cli.io import help_text, run_io
from infinity.cli.job import join_job
from infinity.cli.replay import STEPS, run_replay
from infinity.cli.replay import read_request as read_replay
from infinity.cli.train import print_plan, run_training
from infinity.cli.tune import BS, IODEPTH, WORKERS, read_request, run_tune
from infinity.config import load_config, write_commented
from infinity.errors import ConfigError, InfinityError
from infinity.sharding.news import whose_news

FAILED = 1
"""The engine or its storage failed."""
REFUSED = 2
"""The command line or the configuration cannot work."""

app = typer.Typer(
    help="Train what does not fit: parameters, gradients and Adam states in HBM, CPU memory and NVMe files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A .toml or .json configuration.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as nvme.queue_depth=64. Repeatable.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point of the `infinity` script and of `python -m infinity`."""
    app(prog_name="infinity")


@app.command()
def train(
    config: ConfigPath,
    model: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help="What builds the model; overrides train.model.")] = None,
    data: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help="Where batches come from; overrides train.data.")] = None,
    settings: Settings = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on from this checkpoint.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what fits where and how long a step takes, then stop.")] = False,
    log_all: Annotated[bool, typer.Option("--log-all", help="Let every process talk, its rank before each line, not rank 0 alone.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model. Ctrl-C stops after the running step and saves; a second one aborts at once.

    Under torchrun its processes train one model together, each with its share of the states: torchrun --nproc-per-node N -m infinity train CONFIG
    """
    words = [*(settings or [])]
    words += [f"train.{key}={value}" for key, value in (("model", model), ("data", data)) if value is not None]
    folders = [config.absolute().parent, Path.cwd()]
    with _reported(debug), join_job(config, words, log_all=log_all) as job:
        code = print_plan(job, folders) if plan else run_training(job, folders, resume)
    raise typer.Exit(code)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A .toml or .json configuration. Without one: defaults, the current directory as the NVMe path."),
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine for what would slow a run down or stop it.

    Each line is ok, a warning or a failure, the latter two with the way out. With a CONFIG that names train.model, the plan of
    that model counts too. Nothing is left behind. Exit status: 0 all is ok, 1 a warning, 2 a failure.
    """
    with _reported(debug):
        code = run_doctor(config, settings or [], as_json)
    raise typer.Exit(code)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("infinity.toml"),
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Write a configuration in which every key is explained."""
    with _reported(debug):
        if path.suffix != ".toml":
            raise ConfigError(f"{path}: a commented configuration is TOML: name it {path.with_suffix('.toml').name}.")
        if path.exists():
            raise ConfigError(f"{path} exists and is left as it is: name another file or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_commented(load_config({}, settings or [])), encoding="utf-8")
    typer.echo(f"wrote {path}. Set nvme.paths, train.model and train.data, then: infinity train {path}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint that engine.save or `infinity train` wrote.")],
    out: Annotated[Path, typer.Argument(help="The directory or .safetensors file to write.")],
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as plain safetensors."""
    with _reported(debug):
        written = export_weights(checkpoint, out)
    typer.echo(f"wrote {written}")


@app.command()
def clean(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|PATH", help="A configuration, or the directory of a run.")],
    settings: Settings = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    debug: Debug = False,
) -> None:
    """Remove a run's state files from its NVMe paths. Checkpoints stay."""
    with _reported(debug):
        typer.echo(clean_run(target, settings or [], confirm=lambda question: yes or typer.confirm(question)))


@app.command(
    help="Measure the bandwidth and latency of storage, in fio's words.\n\n" + help_text(),
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "max_content_width": 120},
    options_metavar="[--KEY=VALUE]...",
)
def io(
    words: Annotated[list[str] | None, typer.Argument(metavar="JOBFILE", hidden=True)] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there.")] = None,
    output_format: Annotated[str, typer.Option(metavar="FORMAT", help="normal, or json with fio's field names.")] = "normal",
    destroy_data: Annotated[
        bool, typer.Option("--destroy-data", help="Write to block devices and to files that this command did not lay out, whatever they hold.")
    ] = False,
    pattern: Annotated[str | None, typer.Option(metavar="training", help="Replay the I/O of training steps in place of fio's jobs.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG", help="With --pattern: the configuration to train with.")] = None,
    settings: Settings = None,
    model: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help="With --pattern: what builds the model, train.model.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help=f"With --pattern: steps to replay, {STEPS} if left out.")] = None,
    debug: Debug = False,
) -> None:
    """See help_text."""
    with _reported(debug):
        if pattern is None and not (config or settings or model or steps):
            code = run_io(words or [], output=output, output_format=output_format, destroy_data=destroy_data)
        else:
            request = read_replay(pattern, words or [], config=config, settings=settings or [], model=model, steps=steps, destroy_data=destroy_data)
            code = run_replay(request, output=output, output_format=output_format)
    raise typer.Exit(code)


@app.command()
def tune(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Directories, one per drive.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The configuration to write, beside a .json and a .png.")] = Path("tuned.toml"),
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Of the file on each path. Default: 1g, or a quarter of what is free.")] = None,
    runtime: Annotated[str, typer.Option(metavar="TIME", help="Of each trial, such as 250ms or 2s.")] = "250ms",
    rounds: Annotated[int, typer.Option(min=2, help="Trials of each setting; how far they lie apart is the spread.")] = 3,
    bs: Annotated[str, typer.Option(metavar="SIZES", help="Block sizes to try, such as 512k,1m.")] = BS,
    iodepth: Annotated[str, typer.Option(metavar="DEPTHS", help="Blocks in flight per worker to try.")] = IODEPTH,
    workers: Annotated[str, typer.Option(metavar="COUNTS", help="Threads of each direction to try.")] = WORKERS,
    debug: Debug = False,
) -> None:
    """Find the block size, depth and workers that suit the drives, and write them as an [nvme] section.

    Reads, writes and both at once are timed through the engine that training uses, on a file without a name that is overwritten
    once first. The cheapest setting within 2 % of the best is recommended, with each path's rates and weight, unless the
    rounds lie too far apart to tell. Sizes and times are written as for fio. Exit status 1: measured, but nothing to recommend.
    """
    with _reported(debug):
        request = read_request(paths, output, size=size, runtime=runtime, rounds=rounds, bs=bs, iodepth=iodepth, workers=workers)
        code = run_tune(request)
    raise typer.Exit(code)


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """What goes wrong on purpose is one red line; what should not happen keeps its traceback. Ranks that fail alike tell it once."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        code = REFUSED if isinstance(error, ConfigError) else FAILED
        whose = whose_news(error)
        if whose is None:
            raise typer.Exit(code) from None
        if whose:  # once another rank has ended torchrun ends this one: not before it has told
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if debug or not isinstance(error, InfinityError):
            raise
        Console(stderr=True, soft_wrap=True).print(f"error{whose}: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(code) from None
