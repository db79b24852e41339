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
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.checkpoint import Manifest
from infinity.cli.interrupt import INTERRUPTED, Interrupt
from infinity.cli.job import Job
from infinity.cli.report import Meter, Reporter, overlap_table, together
from infinity.config import Config, Train
from infinity.errors import ConfigError
from infinity.functions import load_function
from infinity.planner.plan import Plan
from infinity.timeline import Timeline, save_chrome_trace

TRACED_STEPS = 20
"""Steps that trace.json covers, the last ones."""

Batch = dict[str, Tensor]


def print_plan(job: Job, folders: Sequence[Path]) -> int:
    """`--plan`: what fits where. Builds and writes nothing. Over ranks rank 0 plans for one of them."""

    def plan() -> Plan:
        return infinity.plan(load_function("train.model", job.config.train.model, folders), job.config)

    _say_plan(job, job.ask_first("the plan", plan))
    return 0


def _say_plan(job: Job, plan: Plan) -> None:
    if job.ranks.world_size > 1:
        job.say(f"each of {job.ranks.world_size} ranks has, in memory and files of its own:")
    job.say(plan.render())


def run_training(job: Job, folders: Sequence[Path], resume: Path | None) -> int:
    """Train to `train.steps` and save; returns the exit code.

    A run goes on from the checkpoint that `resume` names, else from its store or the latest checkpoint in
    `train.output`, whichever has more steps. Ranks agree on where they begin, and on the step after which they stop.
    """
    config, ranks = job.config, job.ranks
    with ranks.all_or_none("finding the model and its data"):
        build = load_function("train.model", config.train.model, folders)
        draw = load_function("train.data", config.train.data, folders)
    latest = job.ask_first("the latest checkpoint", lambda: _find_latest(config, resume))
    if resume is None and latest is not None and _step_of(latest) >= config.train.steps:
        job.say(_finished(latest, config))
        return 0
    _seed(config.train.seed + ranks.rank)  # rank 0 makes the weights; what is drawn after them, such as dropout, is each rank's own
    with Interrupt(is_silent=not job.is_first) as interrupt, infinity.initialize(build, config, checkpoint=resume) as engine:
        with ranks.all_or_none("making the data"):
            data = draw(config, ranks.rank, ranks.world_size)
        scheduler = LambdaLR(engine.optimizer, lambda step: learning_rate_factor(config.train, step))
        engine.register(scheduler=scheduler, **({"data": data} if _keeps_its_place(data) else {}))
        if resume is None and latest is not None and _step_of(latest) > engine.global_step:
            engine.load(latest)  # the run's own store is behind: on another disk, or removed
        _apply_learning_rate(scheduler)
        if engine.global_step:
            job.say(f"going on from step {engine.global_step} of {config.train.steps}")
        _say_plan(job, engine.plan)
        if job.is_any(interrupt.requested, "a stop before the first step"):
            job.say("stopped before the first step.")
            return INTERRUPTED
        Path(config.train.output).mkdir(parents=True, exist_ok=True)
        _loop(job, engine, data, scheduler, interrupt)
        saved = _save(job, engine)
        done = f"step {engine.global_step} of {config.train.steps}, saved in {saved}"
        is_stopped = job.is_any(interrupt.requested, "a stop before the end")
    if is_stopped:
        job.say(f"stopped at {done}. The same command goes on from there.")
        return INTERRUPTED
    job.say(f"finished {done}. `infinity export {saved} OUT` writes the weights alone.")
    return 0


def _find_latest(config: Config, resume: Path | None) -> Path | None:
    """The latest checkpoint in `train.output`. Raises ConfigError where it, or the lack of `resume`, does not let the run begin."""
    latest = _latest(Path(config.train.output))
    if resume is not None and not resume.is_dir():
        raise ConfigError(f"--resume {resume}: no such checkpoint.")
    if resume is not None and latest is not None and _step_of(latest) > Manifest.read(resume).step:
        raise ConfigError(f"--resume {resume}: {latest} is further and would stay in the way. Choose another directory: --set train.output=DIR.")
    if resume is None and latest is not None:
        _refuse_if_never(config, latest)
    return latest


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


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


def _loop(job: Job, engine: Any, data: Iterable[Batch], scheduler: LambdaLR, interrupt: Interrupt) -> None:
    """Micro-steps, step, schedule, report, until train.steps are done or somebody pressed Ctrl-C: every rank stops after the same step."""
    train = job.config.train
    batches = _endless(data)
    if not _keeps_its_place(data):
        _skip(job, batches, engine.global_step * train.accumulation)
    metrics = Path(train.output) / "metrics.jsonl" if job.is_first else Path(os.devnull)
    meter = Meter(engine.timeline)
    last_steps = deque([time.monotonic_ns()], maxlen=TRACED_STEPS)
    is_stopping = False
    with Reporter(job.console, metrics, steps=train.steps, start=engine.global_step, log_every=train.log_every) as reporter:
        while engine.global_step < train.steps and not is_stopping:
            lr = engine.optimizer.param_groups[0]["lr"]
            loss, tokens = _step(engine, batches, scheduler, train)
            mine = meter.step(step=engine.global_step, loss=loss, lr=lr, tokens=tokens)
            everybodys = job.ranks.everybodys((mine, interrupt.requested), "how the step went")
            reporter.step(together([report for report, _ in everybodys]))
            is_stopping = any(is_requested for _, is_requested in everybodys)
            if train.save_every and engine.global_step % train.save_every == 0 and engine.global_step < train.steps:
                _save(job, engine)
            last_steps.append(time.monotonic_ns())
    _print_lanes(job, engine.timeline, last_steps[0])


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


def _save(job: Job, engine: Any) -> Path:
    """A checkpoint of this step, whole when this returns. One that is there already is of this step: later ones are refused at the start."""
    folder = Path(job.config.train.output) / f"step-{engine.global_step}"
    if not job.ask_first("a checkpoint of this step", folder.exists):
        engine.save(folder).wait()
    return folder


def _print_lanes(job: Job, timeline: Timeline, since_ns: int) -> None:
    """How the lanes lay over each other in the last steps: a table of this process's, and a trace of all that Perfetto opens."""
    whose = f"lanes of rank {job.ranks.rank}" if job.ranks.world_size > 1 else "lanes"
    job.console.print(overlap_table(timeline.summary(since_ns), (time.monotonic_ns() - since_ns) / 1e9, whose))
    recordings = job.ranks.everybodys(timeline.recording(since_ns), "the trace")
    trace = Path(job.config.train.output) / "trace.json"
    if job.is_first:
        save_chrome_trace(trace, recordings)
    job.say(f"trace of these steps: {trace} (open it at https://ui.perfetto.dev)")


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


def _skip(job: Job, batches: Iterator[Batch], count: int) -> None:
    """Data without a state of its own is drawn and dropped up to where the run stopped."""
    if count:
        job.say(f"skipping {count} batches that the run has seen; data with state_dict and load_state_dict goes on at once")
    for _ in range(count):
        next(batches)
