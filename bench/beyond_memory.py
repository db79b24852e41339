"""A model whose state is several times the memory it may use: three steps inside a memory cgroup, with and without clipping.

    python bench/beyond_memory.py --dir /mnt/nvme0     1.53 B parameters, fp32: 24 GB of parameters, gradients and Adam states in 4 GiB
    python bench/beyond_memory.py --toy                seconds

Each run is a process of its own in a fresh cgroup that counts page cache and swap too. Prints seconds and bytes per step, the largest
resident memory of the process, and the most that the cgroup charged, from the start and from the first step on. Where no cgroup
can be made, says so and runs without one. The disk takes 24 bytes for each parameter while the model is built, 20 afterwards.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tools")]
import cgroup  # noqa: E402

GIB = 1 << 30


class Watch:
    """The most that this process had resident, in phases: all of it, and of that what no file backs. Looks every 20 ms."""

    def __init__(self) -> None:
        self.phase = "initialize"
        self.peaks: dict[str, list[int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            now = [_status("VmRSS"), _status("RssAnon")]
            self.peaks[self.phase] = list(map(max, now, self.peaks.get(self.phase, now)))


def _status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def child(args: argparse.Namespace) -> None:
    """One run, inside the cgroup. The last line is JSON."""
    import gpt
    import torch

    import infinity
    from infinity.kinds import Lane, Tier

    shape = gpt.Shape(layers=args.layers, heads=args.heads, width=args.width, context=args.sequence)
    config = {
        "device": "cpu",
        "budgets": {"cpu": args.cpu},
        "nvme": {"paths": [args.dir]},
        "store": {"resume": "never"},
        "precision": {"dtype": args.dtype},
        "optimizer": {"lr": 1e-4, "max_grad_norm": 1.0 if args.clip else None},
    }
    before, watch = _status("VmRSS"), Watch()
    torch.manual_seed(0)
    batches = [torch.randint(0, 256, (1, args.sequence + 1)) for _ in range(args.steps)]
    start = time.perf_counter()
    with infinity.initialize(lambda: gpt.GPT(shape), config) as engine:
        result: dict[str, Any] = {"initialize_s": time.perf_counter() - start, "seconds": [], "losses": [], "update_s": []}
        print(f"initialized in {result['initialize_s']:.1f} s\n{engine.plan.render()}", flush=True)
        if args.peak_file:
            Path(args.peak_file).write_text("0")  # the cgroup's high-water mark starts anew
        moved = dict(engine.statistics()["bytes"])
        watch.phase = "train"
        for step, batch in enumerate(batches):
            start = time.perf_counter()
            loss = engine.model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            backward_s = time.perf_counter() - start
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            result["seconds"].append(time.perf_counter() - start)
            result["update_s"].append(result["seconds"][-1] - backward_s)
            result["losses"].append(loss.item())
            print(f"step {step + 1}: {result['seconds'][-1]:.1f} s, of it {result['update_s'][-1]:.1f} s update; loss {loss.item():.4f}", flush=True)
        watch.phase = "close"
        stats = engine.statistics()
        for lane in (Lane.NVME_READ, Lane.NVME_WRITE):
            result[f"{lane} bytes a step"] = (stats["bytes"].get(lane, 0) - moved.get(lane, 0)) / args.steps
        result |= {"params": engine.plan.num_params, "planned": engine.plan.held_bytes(Tier.CPU), "held": stats["peak_cpu_bytes"]}
    watch.close()
    print(json.dumps({**result, "before": before, "resident": watch.peaks}), flush=True)


def run(args: argparse.Namespace, clip: bool, limit_bytes: int) -> dict[str, Any]:
    """One run in a process and a cgroup of its own."""
    try:
        group: cgroup.MemoryCgroup | None = cgroup.MemoryCgroup(limit_bytes)
    except cgroup.NotPermittedError as reason:
        print(f"no memory cgroup can be made here: {reason}. Running without the limit", flush=True)
        group = None
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        command = [sys.executable, __file__, "--child", "--dir", folder, "--layers", str(args.layers), "--width", str(args.width)]
        command += [
            "--heads",
            str(args.heads),
            "--sequence",
            str(args.sequence),
            "--steps",
            str(args.steps),
            "--dtype",
            args.dtype,
            "--cpu",
            args.cpu,
        ]
        command += ["--clip"] if clip else []
        if group is not None and group.names is cgroup.V1:
            command += ["--peak-file", str(group.folder / group.names.peak)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter if group else None)
        assert process.stdout is not None
        lines, at_start = [], None
        for line in process.stdout:
            lines.append(line)
            if group is not None and line.startswith("initialized"):
                at_start = group.peak_bytes()
            print(line if line.startswith("{") is False else "", end="", flush=True)
        code = process.wait()
    charged = {"initialize": at_start, "train": group.peak_bytes() if group else None}
    kills = group.kills() if group else 0
    if group is not None:
        group.close()
    if code:
        raise SystemExit(f"the run ended with {code}; the kernel killed {kills} processes for memory")
    return {**json.loads(lines[-1]), "clip": clip, "limit": limit_bytes if group else None, "charged": charged}


def report(result: dict[str, Any]) -> None:
    state = 16 * result["params"]
    limit = f"inside {result['limit'] / GIB:.2f} GiB ({state / result['limit']:.1f} times less)" if result["limit"] else "without a limit"
    print(f"\n{result['params'] / 1e9:.2f} B parameters, {state / 1e9:.1f} GB of state, {limit}, {'clipped' if result['clip'] else 'not clipped'}")
    print(f"  seconds a step {', '.join(f'{s:.1f}' for s in result['seconds'])} (update {', '.join(f'{s:.1f}' for s in result['update_s'])})")
    print(f"  read {result['nvme-read bytes a step'] / 1e9:.1f} GB and wrote {result['nvme-write bytes a step'] / 1e9:.1f} GB a step")
    print(f"  buffers and states held {result['held'] / GIB:.2f} GiB of {result['planned'] / GIB:.2f} GiB planned")
    for phase, (resident, anonymous) in result["resident"].items():
        charged = result["charged"].get(phase)
        told = f", charged at most {charged / GIB:.2f} GiB with page cache" if charged else ""
        print(f"  {phase:10s} resident at most {resident / GIB:.2f} GiB, {anonymous / GIB:.2f} GiB of it without a file behind{told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--heads", type=int, default=18)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--limit", type=float, default=4.0, help="of the cgroup, in GiB")
    parser.add_argument("--cpu", default="3GiB", help="budgets.cpu")
    parser.add_argument("--only", choices=["clipped", "plain"], help="one of the two runs")
    parser.add_argument("--dir", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--json", help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="a model of seconds")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clip", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peak-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.toy:
        args.layers, args.width, args.heads, args.limit, args.cpu = 8, 256, 2, 1.0, "32MiB"
    if args.child:
        child(args)
        return
    print(f"{platform.platform()}, Python {platform.python_version()}", flush=True)
    results = [run(args, clip, round(args.limit * GIB)) for clip in (False, True) if args.only != ("plain" if clip else "clipped")]
    for result in results:
        report(result)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
