"""Do the budgets hold? A model far larger than them trains with everything on NVMe, while memory is watched from the first moment.

    python bench/budget.py --dir /mnt/nvme0          1.3 B parameters, bf16, sequence 1024, micro-batch 4, recompute, hbm 6 GiB, cpu 8 GiB
    python bench/budget.py --toy                     seconds on a CPU

Prints, per phase, the largest fall of MemAvailable and the largest use of GPU memory, each less the baseline that the
plan prints, against the budgets; then the overlap table of the steps after the first. --trace keeps the timeline.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

AVAILABLE_AT_START = psutil.virtual_memory().available

import torch  # noqa: E402

import infinity  # noqa: E402
from infinity.kinds import Lane, Tier  # noqa: E402
from infinity.sizes import GiB, format_bytes, parse_bytes  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import common  # noqa: E402
import gpt  # noqa: E402


class Watch:
    """The deepest fall of MemAvailable since the process began and the highest GPU use, per phase, every 20 ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = "start"
        self.peaks: dict[str, dict[Tier, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        self._phase = phase

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            used = {Tier.CPU: AVAILABLE_AT_START - psutil.virtual_memory().available}
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                used[Tier.HBM] = total - free
            peaks = self.peaks.setdefault(self._phase, {})
            for tier, nbytes in used.items():
                peaks[tier] = max(peaks.get(tier, 0), nbytes)


def train(args: argparse.Namespace, device: torch.device, folder: str, watch: Watch) -> dict[str, Any]:
    shape = common.shape_of(args)
    config: dict[str, Any] = {
        "device": str(device),
        "budgets": {"cpu": args.cpu, **({"hbm": args.hbm} if device.type == "cuda" else {})},
        "nvme": {"paths": [str(Path(folder) / str(drive)) for drive in range(args.drives)], "readers": args.io_threads, "writers": args.io_threads},
        "store": {"resume": "never"},
        "precision": {"dtype": args.dtype},
        "placement": {"param": "nvme", "grad": args.grad, "optimizer": "nvme"},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0 if args.clip else None, "threads": args.adam_threads or "auto"},
    }
    for path in config["nvme"]["paths"]:
        Path(path).mkdir()
    tokens = torch.randint(0, min(512, args.vocabulary), (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(7)).to(device)
    torch.manual_seed(0)
    watch.enter("initialize")
    start = time.perf_counter()
    with infinity.initialize(lambda: gpt.GPT(shape), config) as engine:
        print(f"initialized in {time.perf_counter() - start:.1f} s\n{engine.plan.render()}", flush=True)
        losses, seconds, marks = [], [], []
        for step in range(args.steps):
            watch.enter("step 1" if step == 0 else "later steps")
            marks.append(time.monotonic_ns())
            start = time.perf_counter()
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            backward_done = time.perf_counter()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            print(f"step {step + 1}: {seconds[-1]:.2f} s (update {time.perf_counter() - backward_done:.2f} s), loss {losses[-1]:.4f}", flush=True)
        watch.enter("close")
        lanes = engine.timeline.summary(since_ns=marks[min(1, len(marks) - 1)])
        if args.trace:
            engine.timeline.save_chrome_trace(args.trace, since_ns=marks[-1])
        result = {"baseline": {str(t): n for t, n in engine.plan.baseline.items()}, "losses": losses, "seconds": seconds, "lanes": lanes}
        result["peak_live_units"] = engine.statistics()["peak_live_units"]
        result["params"] = engine.plan.num_params
    return result


def report(result: dict[str, Any], watch: Watch, limits: dict[Tier, int]) -> bool:
    """Print every phase against the budgets; True when all stay within 5 % over."""
    holds = True
    for phase, peaks in watch.peaks.items():
        for tier, limit in limits.items():
            if phase == "start" or tier not in peaks:
                continue
            ours = peaks[tier] - result["baseline"][str(tier)]
            holds &= ours <= 1.05 * limit
            print(f"{phase:12s} {tier:5s} {format_bytes(ours):>12s} of {format_bytes(limit)} ({ours / limit:.2f})", flush=True)
    for lane in result["lanes"]:
        share = lane.hidden_s / lane.busy_s if lane.busy_s and lane.lane not in (Lane.GPU, Lane.ADAM) else 0.0
        print(
            f"{lane.lane:11s} busy {lane.busy_s:8.3f} s  hidden {lane.hidden_s:8.3f} s ({share:4.0%})  exposed {lane.exposed_s:7.3f} s  "
            f"{format_bytes(lane.nbytes):>11s}  {lane.rate / 1e9:6.2f} GB/s  {lane.count} spans",
            flush=True,
        )
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_shape(parser)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--grad", default="nvme")
    parser.add_argument("--clip", action="store_true", help="clip the global norm at 1.0")
    parser.add_argument("--hbm", default="6GiB")
    parser.add_argument("--cpu", default="8GiB")
    parser.add_argument("--io-threads", type=int, default=1, help="for each direction; several for tmpfs, where each copies by itself")
    parser.add_argument("--adam-threads", type=int, default=0, help="0: as many as the engine takes by itself")
    parser.add_argument("--drives", type=int, default=1, help="folders in --dir, a drive each: tmpfs takes one writer per file")
    parser.add_argument("--dir", default="/var/tmp", help="directory on the drive under test")
    parser.add_argument("--trace", help="file for a Chrome trace of the last step")
    parser.add_argument("--json", help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="a model of seconds, on whatever device there is")
    args = parser.parse_args()
    if args.toy:
        args.layers, args.width, args.heads, args.vocabulary, args.sequence, args.batch, args.cpu = 4, 128, 2, 256, 32, 2, "64MiB"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.zeros(1, device=device)
    watch = Watch(device)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        result = train(args, device, folder, watch)
    watch.close()
    limits = {Tier.CPU: parse_bytes(args.cpu), **({Tier.HBM: parse_bytes(args.hbm)} if device.type == "cuda" else {})}
    holds = report(result, watch, limits)
    verdict = "hold" if holds else "DO NOT HOLD"
    print(f"{result['params'] / 1e9:.2f} B parameters, {16 * result['params'] / GiB:.1f} GiB of state: budgets {verdict}", flush=True)
    if args.json:
        result["lanes"] = [str(lane) for lane in result["lanes"]]
        result["peaks"] = {phase: {str(tier): n for tier, n in peaks.items()} for phase, peaks in watch.peaks.items()}
        Path(args.json).write_text(json.dumps({"args": vars(args), **result}, indent=1))


if __name__ == "__main__":
    main()
