"""Where benchmarks written for other engines plug this one in."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import infinity
from infinity import native
from infinity.kinds import Group, Lane, Tier
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part
from infinity.storage.shardfile import ShardFile, lay_out
from infinity.storage.slabs import SlabPool
from infinity.storage.work import AioWork
from infinity.timeline import Timeline


@functools.cache
def _pool(threads: int) -> native.ThreadPool:
    return native.ThreadPool(threads)


def cpu_adam(
    params: Tensor,  # [n] fp32, CPU, in place
    grads: Tensor,  # [n] fp32, bf16 or fp16, CPU
    exp_avg: Tensor,  # [n] fp32, CPU, in place
    exp_avg_sq: Tensor,  # [n] fp32, CPU, in place
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bf16_out: Tensor | None = None,  # [n] bf16, CPU: the new params, rounded
) -> Callable[[], None]:
    """step(): one AdamW step in place, with as many threads as torch has."""
    pool = _pool(torch.get_num_threads())
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        segment = native.AdamSegment(0, params.numel(), lr, *betas, eps, weight_decay, count)
        native.adamw(pool, params, exp_avg, exp_avg_sq, grads, bf16_out, [segment])

    return step


def io(
    path: str, nbytes: int, block: int, depth: int, threads: int
) -> tuple[Callable[[Tensor, int], None], Callable[[Tensor, int], None], Callable[[int], Tensor], Callable[[], None]]:
    """(read(buffer, offset), write(buffer, offset), alloc(nbytes), close()) on one shard file of `nbytes`, `threads` for each direction.

    A buffer is what alloc gave: uint8 on 2 MiB pages. Both calls return once all its bytes are moved, past the page cache.
    """
    spec = ChunkSpec(ChunkKey(0, 0, Group.PARAM, 0), nbytes, Tier.NVME, (Part("bytes", torch.uint8, nbytes),))
    layout = lay_out([spec], {})
    file = ShardFile.create(Path(path), layout)
    aio = native.Aio(block_bytes=block, queue_depth=depth, readers=threads, writers=threads)
    pool = SlabPool(pin=torch.cuda.is_available(), threads=torch.get_num_threads())
    timeline = Timeline()

    def move(lane: Lane, buffer: Tensor, offset: int) -> None:
        start = aio.read if lane is Lane.NVME_READ else aio.write
        at = layout.offsets[0] + offset
        AioWork(start(file.fd, at, buffer.data_ptr(), buffer.numel(), buffer), lane, "io", path, at, buffer.numel(), timeline).wait()

    def close() -> None:
        aio.close()
        file.close()
        pool.close()

    return functools.partial(move, Lane.NVME_READ), functools.partial(move, Lane.NVME_WRITE), pool.take, close


class Job(Protocol):
    """What a benchmark says of the run."""

    lr: float
    wd: float
    accum: int
    """Micro-steps in a step."""
    nvme: str
    """An empty directory on the drive."""
    options: dict[str, dict[str, Any]]
    """Sections of the configuration, laid over this one's."""


def trainer(model_fn: Callable[[], nn.Module], args: Job) -> Trainer:
    """bf16 with fp32 masters and moments, on the GPU where there is one; `model_fn` builds it there, so that it draws the same values."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config: dict[str, dict[str, Any]] = {
        "nvme": {"paths": [args.nvme]},
        "store": {"resume": "never"},
        "precision": {"dtype": "bf16"},
        "optimizer": {"lr": args.lr, "weight_decay": args.wd},
        "train": {"accumulation": args.accum},
    }
    for section, keys in args.options.items():
        config[section] = {**config.get(section, {}), **keys}
    with device:
        model = model_fn()
    return Trainer(infinity.initialize(model, {"device": str(device), **config}))


class Trainer:
    """One engine, stepped from outside. A model takes a batch of tokens and returns its loss."""

    def __init__(self, engine: infinity.Engine) -> None:
        self._engine = engine

    def step(self, batches: Sequence[Tensor]) -> dict[str, float]:
        """One optimizer step over its micro-batches: mean loss, and seconds of forward, backward and update, each waited for."""
        seconds = {"fwd_s": 0.0, "bwd_s": 0.0, "opt_s": 0.0}
        losses = []
        for batch in batches:
            loss = self._timed(seconds, "fwd_s", lambda batch=batch: self._engine.model(batch))
            self._timed(seconds, "bwd_s", (loss / len(batches)).backward)
            losses.append(loss.detach())
        self._timed(seconds, "opt_s", self._update)
        return {"loss": torch.stack(losses).mean().item(), **seconds}

    def _update(self) -> None:
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()

    def _timed(self, seconds: dict[str, float], name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        self.sync()
        seconds[name] += time.perf_counter() - start
        return result

    def sync(self) -> None:
        """Wait for the device."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)

    def close(self) -> None:
        self._engine.close()
