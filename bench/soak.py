"""Does a long run stay as it began? Steps with evaluation, generation, saving and loading in between; memory, descriptors and threads are watched.

    python bench/soak.py                    1,000 steps of a small GPT, everything on NVMe, two DataLoader workers
    python bench/soak.py --toy              seconds

Prints, from the end of the warm-up on, the slope of each by least squares, and its range; HBM too on a GPU. Resident memory is that without a
file behind it, less what the timeline has recorded so far, which grows to a bound of its own (14 MB).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "examples")]
import gpt  # noqa: E402

import infinity  # noqa: E402

LENGTH = 64


class Counting(Dataset[Tensor]):
    """Endless enough: windows of a sequence that can be learned."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(LENGTH + 1) * (1 + index % 3) + index) % 256


def forever(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


class Samples:
    """What the process has, now and then."""

    def __init__(self, engine: infinity.Engine) -> None:
        self._engine = engine
        self.steps: list[int] = []
        self.values: dict[str, list[int]] = {}

    def take(self, step: int) -> None:
        status = Path("/proc/self/status").read_text()
        now = {
            "resident bytes": int(status.partition("RssAnon:")[2].split()[0]) * 1024 - self._engine.timeline.nbytes,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "python threads": threading.active_count(),
            "slab bytes": self._engine.statistics()["cpu_bytes"],
        }
        if self._engine.device.type == "cuda":
            now["hbm bytes"] = torch.cuda.memory_reserved(self._engine.device)
        self.steps.append(step)
        for name, value in now.items():
            self.values.setdefault(name, []).append(value)

    def after(self, warm_up: int) -> dict[str, dict[str, float]]:
        """Per sampled value: its slope per step and its range."""
        first = next(place for place, step in enumerate(self.steps) if step >= warm_up)
        found = {}
        for name, values in self.values.items():
            slope = statistics.linear_regression(self.steps[first:], values[first:]).slope
            found[name] = {"slope": slope, "first": values[first], "least": min(values[first:]), "most": max(values[first:]), "last": values[-1]}
        return found


@torch.no_grad()
def generate(model: torch.nn.Module, prompt: Tensor, count: int) -> Tensor:
    """The likeliest next bytes, one after the other, each from a forward over all before it."""
    for _ in range(count):
        prompt = torch.cat([prompt, model(prompt[:, -LENGTH:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return prompt


def soak(folder: str, steps: int, every: int) -> tuple[Samples, list[float]]:
    """`every`: steps between evaluations; a save at every fifth of them, a load in the middle of the run."""
    torch.manual_seed(0)
    config = {
        "budgets": {"cpu": "48MiB"},
        "nvme": {"paths": [folder]},
        "optimizer": {"lr": 1e-3, "chunk_size": "64KiB", "max_grad_norm": 1.0},
        "placement": {"param": "nvme", "grad": "nvme", "optimizer": "nvme"},
        "store": {"resume": "never"},
    }
    loader = DataLoader(Counting(), batch_size=4, num_workers=2, persistent_workers=True)
    losses = []
    with infinity.initialize(lambda: gpt.GPT(gpt.Shape(layers=3, heads=2, width=64, context=LENGTH)), config) as engine:
        samples, saved = Samples(engine), None
        for step, batch in zip(range(1, steps + 1), forever(loader), strict=False):
            batch = batch.to(engine.device)
            loss = engine.model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
            if step % every == 0:
                engine.model.eval()
                with torch.no_grad():
                    engine.model(batch[:, :-1], batch[:, 1:])
                generate(engine.model, batch[:1, :8], 8)
                engine.model.train()
            if step % (5 * every) == 0:
                saved = Path(folder) / f"checkpoint-{step}"
                engine.save(saved).wait()
            if saved is not None and step == steps // 2 + 1:
                engine.load(saved)
            if step % max(1, every // 4) == 0:
                samples.take(step)
    return samples, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=40, help="steps between evaluations")
    parser.add_argument("--warm-up", type=int, default=300, help="steps that are not looked at")
    parser.add_argument("--dir", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--toy", action="store_true", help="a run of seconds")
    args = parser.parse_args()
    if args.toy:
        args.steps, args.every, args.warm_up = 12, 2, 4
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        samples, losses = soak(folder, args.steps, args.every)
    found = samples.after(args.warm_up)
    print(f"{args.steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; after step {args.warm_up}:")
    for name, value in found.items():
        print(f"  {name:15s} slope {value['slope']:10.2f} a step, between {value['least']} and {value['most']}")
    print(json.dumps({"steps": args.steps, "warm_up": args.warm_up, "losses": [losses[0], losses[-1]], "samples": found}))


if __name__ == "__main__":
    main()
