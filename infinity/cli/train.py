"""`infinity train`: the plain loop of PyTorch around an engine, with checkpoints, a schedule and Ctrl-C."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.checkpoint import Manifest
from infinity.cli.interrupt import INTERRUPTED, Interrupt
from infinity.cli.report import Meter, Reporter, overlap_table
from infinity.config import Config, Train
from infinity.errors import ConfigError
from infinity.functions import load_function
from infinity.timeline import Timeline

TRACED_STEPS = 20
"""Steps that trace.json covers, the last ones."""

Batch = dict[str, Tensor]


def print_plan(config: Config, folders: Sequence[Path]) -> int:
    """`--plan`: what fits where. Builds and writes nothing."""
    build = load_function("train.model", config.train.model, folders)
    _say(Console(), infinity.plan(build, config).render())
    return 0


def run_training(config: Config, folders: Sequence[Path], resume: Path | None) -> int:
    """Train to `train.steps` and save; returns the exit code.

    A run goes on from the checkpoint that `resume` names, else from its store or the latest checkpoint in
    `train.output`, whichever has more steps.
    """
    console = Console()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "infinity train is one process so far. For several ranks call infinity.initialize in a script of your own, and start that with torchrun"
        )
    build = load_function("train.model", config.train.model, folders)
    draw = load_function("train.data", config.train.data, folders)
    output = Path(config.train.output)
    latest = _latest(output)
    if resume is not None and not resume.is_dir():
        raise ConfigError(f"--resume {resume}: no such checkpoint.")
    if resume is not None and latest is not None and _step_of(latest) > Manifest.read(resume).step:
        raise ConfigError(f"--resume {resume}: {latest} is further and would stay in the way. Choose another directory: --set train.output=DIR.")
    if resume is None and latest is not None:
        _refuse_if_never(config, latest)
        if _step_of(latest) >= config.train.steps:
            _say(console, _finished(latest, config))
            return 0
    random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    with Interrupt() as interrupt, infinity.initialize(build, config, checkpoint=resume) as engine:
        data = draw(config, 0, 1)
        scheduler = LambdaLR(engine.optimizer, lambda step: learning_rate_factor(config.train, step))
        engine.register(scheduler=scheduler, **({"data": data} if _keeps_its_place(data) else {}))
        if resume is None and latest is not None and _step_of(latest) > engine.global_step:
            engine.load(latest)  # the run's own store is behind: on another disk, or removed
        _apply_learning_rate(scheduler)
        if engine.global_step:
            _say(console, f"going on from step {engine.global_step} of {config.train.steps}")
        _say(console, engine.plan.render())
        if interrupt.requested:
            _say(console, "stopped before the first step.")
            return INTERRUPTED
        output.mkdir(parents=True, exist_ok=True)
        _loop(engine, data, scheduler, config.train, interrupt, console)
        saved = _save(engine, output)
        done = f"step {engine.global_step} of {config.train.steps}, saved in {saved}"
    if interrupt.requested:
        _say(console, f"stopped at {done}. The same command goes on from there.")
        return INTERRUPTED
    _say(console, f"finished {done}. `infinity export {saved} OUT` writes the weights alone.")
    return 0


def _latest(output: Path) -> Path | None:
    """The checkpoint of the most steps. One that is being written, or was cut short, has another name."""
    checkpoints = [path for path in output.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return max(checkpoints, key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _refuse_if_never(config: Config, latest: Path) -> None:
    if config.store.resume == "never":
        raise ConfigError(
            f'store.resume = "never", but {config.train.output} holds an earlier run up to {latest.name}: '
            "choose another directory with --set train.output=DIR, or remove that one."
        )


def _finished(checkpoint: Path, config: Config) -> str:
    return (
        f"{checkpoint} already has all {config.train.steps} steps. To go on, raise them: --set train.steps={2 * config.train.steps}. "
        f"To start anew, choose another --set train.output=DIR and --set store.run=NAME."
    )


def _apply_learning_rate(scheduler: LambdaLR) -> None:
    """A scheduler's constructor sets the first learning rate, and its load_state_dict leaves the optimizer alone: set the one it stands at."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _loop(engine: Any, data: Iterable[Batch], scheduler: LambdaLR, train: Train, interrupt: Interrupt, console: Console) -> None:
    """Micro-steps, step, schedule, report, until train.steps are done or somebody pressed Ctrl-C."""
    batches = _endless(data)
    if not _keeps_its_place(data):
        _skip(batches, engine.global_step * train.accumulation, console)
    output = Path(train.output)
    meter = Meter(engine.timeline)
    last_steps = deque([time.monotonic_ns()], maxlen=TRACED_STEPS)
    with Reporter(console, output / "metrics.jsonl", steps=train.steps, start=engine.global_step, log_every=train.log_every) as reporter:
        while engine.global_step < train.steps and not interrupt.requested:
            lr = engine.optimizer.param_groups[0]["lr"]
            loss, tokens = _step(engine, batches, scheduler, train)
            reporter.step(meter.step(step=engine.global_step, loss=loss, lr=lr, tokens=tokens))
            if train.save_every and engine.global_step % train.save_every == 0 and engine.global_step < train.steps:
                _save(engine, output)
            last_steps.append(time.monotonic_ns())
    _print_lanes(engine.timeline, last_steps[0], output, console)


def _step(engine: Any, batches: Iterator[Batch], scheduler: LambdaLR, train: Train) -> tuple[float, int]:
    """One optimizer step; returns the mean loss of its micro-steps and the tokens they saw. A skipped fp16 step does not move the schedule."""
    before, total, tokens = engine.global_step, 0.0, 0
    for _ in range(train.accumulation):
        batch = next(batches)
        result = engine.model(**batch)
        loss = getattr(result, "loss", result) / train.accumulation
        engine.scale(loss).backward()
        total += loss.item()
        tokens += count_tokens(batch)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    if engine.global_step > before:
        scheduler.step()
    return total, tokens


def _save(engine: Any, output: Path) -> Path:
    """A checkpoint of this step, whole when this returns. One that is there already is of this step: later ones are refused at the start."""
    folder = output / f"step-{engine.global_step}"
    if not folder.exists():
        engine.save(folder).wait()
    return folder


def _print_lanes(timeline: Timeline, since_ns: int, output: Path, console: Console) -> None:
    """How the lanes lay over each other in the last steps: a table here, and a trace that Perfetto opens."""
    console.print(overlap_table(timeline.summary(since_ns), (time.monotonic_ns() - since_ns) / 1e9))
    timeline.save_chrome_trace(output / "trace.json", since_ns)
    _say(console, f"trace of these steps: {output / 'trace.json'} (open it at https://ui.perfetto.dev)")


def learning_rate_factor(train: Train, step: int) -> float:
    """What optimizer.lr is multiplied by in the step after `step` finished ones.

    Linear from 1/warmup_steps to 1, then 1, or half a cosine that reaches 0 after the last step
    (Loshchilov and Hutter, SGDR, arXiv:1608.03983, eq. 5, one period).
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def count_tokens(batch: Batch) -> int:
    """Elements of the first integer tensor, which is what language models call their tokens; rows where there is none."""
    whole = [tensor for tensor in batch.values() if not tensor.is_floating_point()]
    return whole[0].numel() if whole else len(next(iter(batch.values())))


def _endless(data: Iterable[Batch]) -> Iterator[Batch]:
    """Pass after pass. Data that gives nothing is refused: it would be waited for without end."""
    while True:
        batch = None
        for batch in data:
            yield batch
        if batch is None:
            raise ConfigError("train.data: the iterable gives no batch: return something that can be iterated anew, not an iterator that is used up.")


def _keeps_its_place(data: object) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _skip(batches: Iterator[Batch], count: int, console: Console) -> None:
    """Data without a state of its own is drawn and dropped up to where the run stopped."""
    if count:
        _say(console, f"skipping {count} batches that the run has seen; data with state_dict and load_state_dict goes on at once")
    for _ in range(count):
        next(batches)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
