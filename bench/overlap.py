"""What the tiers cost: training steps through the engine over the same steps in plain torch, interleaved in one process.

    python bench/overlap.py                         1.3 B parameters, sequence 1024, micro-batch 8, recompute, bf16 (one GPU)
    python bench/overlap.py --toy                   seconds on a CPU

Plain torch holds bf16 weights, fp32 masters and moments on the device and updates them with fused AdamW. The engine
rests everything in one tier at a time. Prints medians with their spread, and ratios of medians; --json keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import common  # noqa: E402
import gpt  # noqa: E402

PLACEMENTS = {
    "hbm": {"param": "hbm", "grad": "hbm", "optimizer": "hbm"},
    "cpu": {"param": "cpu", "grad": "cpu", "optimizer": "cpu"},
    "nvme": {"param": "nvme", "grad": "nvme", "optimizer": "nvme"},
}


PAUSE_S = 0.5
"""Before each measurement on a GPU, so that all find it equally cool: after a busy second its clock is some percent lower."""


class Plain:
    """The step as anyone would write it with everything on the device."""

    def __init__(self, shape: gpt.Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = gpt.GPT(shape)
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.params = list(self.model.to(torch.bfloat16).parameters())
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, weight_decay=0.01, fused=True)

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch)
        loss.backward()
        return loss

    @torch.no_grad()
    def step(self) -> None:
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        torch._foreach_copy_(self.params, [master.detach() for master in self.masters])
        self.drop()

    def drop(self) -> None:
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = param.grad = None


class Ours:
    """The same step through the engine."""

    def __init__(self, shape: gpt.Shape, device: torch.device, placement: str, args: argparse.Namespace, folder: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model = gpt.GPT(shape)
        config: dict[str, Any] = {
            "device": str(device),
            "budgets": {"cpu": args.cpu, **({"hbm": args.hbm} if device.type == "cuda" else {})},
            "nvme": {"paths": [folder]},
            "store": {"run": placement, "resume": "never"},
            "precision": {"dtype": "bf16"},
            "prefetch": {"units": args.prefetch if args.prefetch == "auto" else int(args.prefetch)},
            "placement": PLACEMENTS[placement],
            "optimizer": {"lr": 1e-4, "weight_decay": 0.01},
        }
        self.engine = infinity.initialize(model, config)
        self.optimizer = self.engine.optimizer

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.engine.model(**batch)
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop(self) -> None:
        self.optimizer.zero_grad()


def timed(device: torch.device, run: Callable[[], torch.Tensor], pause_s: float = 0.0) -> tuple[float, float]:
    """(seconds, loss) with the device idle at both ends, and for `pause_s` before."""
    synchronize(device)
    time.sleep(pause_s)
    start = time.perf_counter()
    loss = run()
    synchronize(device)
    return time.perf_counter() - start, loss.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    contenders: dict[str, Any], batch: dict[str, torch.Tensor], device: torch.device, rounds: int, warmup: int
) -> dict[str, dict[str, list[float]]]:
    """Per contender: seconds of forward + backward alone, of whole steps, and the losses of the whole steps. Each round in another order."""
    found: dict[str, dict[str, list[float]]] = {name: {"forward_backward": [], "step": [], "loss": []} for name in contenders}
    pause_s = 0.0 if device.type == "cpu" else PAUSE_S
    for round_ in range(rounds + warmup):
        names = list(contenders)
        for name in names if round_ % 2 else reversed(names):
            contender = contenders[name]
            alone, _ = timed(device, lambda contender=contender: contender.forward_backward(batch), pause_s)
            contender.drop()

            def whole(contender: Any = contender) -> torch.Tensor:
                loss = contender.forward_backward(batch)
                contender.step()
                return loss

            seconds, loss = timed(device, whole, pause_s)
            found[name]["loss"].append(loss)
            if round_ >= warmup:
                found[name]["forward_backward"].append(alone)
                found[name]["step"].append(seconds)
    return found


def report(found: dict[str, dict[str, list[float]]]) -> None:
    for what in ("forward_backward", "step"):
        base = statistics.median(found["torch"][what])
        for name, times in found.items():
            middle = statistics.median(times[what])
            print(
                f"{what:17s} {name:5s} {middle:8.4f} s [{min(times[what]):.4f}..{max(times[what]):.4f}] n={len(times[what])}  "
                f"{middle / base:.3f} of torch",
                flush=True,
            )
    for name, times in found.items():
        print(f"losses {name:6s} " + " ".join(f"{loss:.4f}" for loss in times["loss"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_shape(parser)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--placements", default="hbm,cpu", help="comma separated, of hbm, cpu, nvme")
    parser.add_argument("--prefetch", default="auto", help="units fetched ahead")
    parser.add_argument("--hbm", default="auto")
    parser.add_argument("--cpu", default="40GiB")
    parser.add_argument("--dir", help="directory for state files; a temporary one if left out")
    parser.add_argument("--trace", help="beginning of the names of files for a Chrome trace of one step each")
    parser.add_argument("--json", help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="a model of seconds, on whatever device there is")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.toy:
        args.layers, args.width, args.heads, args.vocabulary, args.sequence, args.batch, args.rounds, args.warmup = 2, 64, 2, 256, 32, 2, 2, 1
        args.cpu, args.placements = "256MiB", "cpu,nvme"
    shape = common.shape_of(args)
    tokens = torch.randint(0, min(512, args.vocabulary), (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(7)).to(device)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {vars(args)}", flush=True)
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "args": vars(args)}
    plain = Plain(shape, device)
    for placement in args.placements.split(","):
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            ours = Ours(shape, device, placement, args, folder)
            try:
                print(ours.engine.plan.render(), flush=True)
                found = measure({"torch": plain, placement: ours}, batch, device, args.rounds, args.warmup)
                mark = time.monotonic_ns()
                timed(device, lambda ours=ours: ours.forward_backward(batch))
                ours.step()
                for lane in ours.engine.timeline.summary(since_ns=mark):
                    print(f"one step: {lane.lane:11s} busy {lane.busy_s:.4f} s  exposed {lane.exposed_s:.4f} s  {lane.nbytes} bytes in {lane.count}")
                if args.trace:
                    ours.engine.timeline.save_chrome_trace(f"{args.trace}_{placement}.json", since_ns=mark)
            finally:
                ours.engine.close()
        report(found)
        results[placement] = found
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
