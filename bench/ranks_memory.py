"""How the host memory of all ranks together grows with their number, for one model that a builder makes.

    python bench/ranks_memory.py --dir /mnt/nvme0     202 M parameters in 768 layers, fp32: 4.1 GB of states in CPU memory, on 1, 2 and 4 ranks
    python bench/ranks_memory.py --toy                seconds

Each rank is a process of its own, over gloo on this machine. After imports, the process group and three steps of a small model its resident memory
is its baseline, and the kernel's high-water mark starts anew: once for initialize, once for three steps. Prints per rank the baseline and
the most above it. The builder's files on --dir count where they are resident, on rank 0. Two units are gathered ahead: left to itself a rank
goes up to 32 ahead, where its budget has room.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import common  # noqa: E402

PHASES = ("initialize", "train")
STEPS, BATCH = 3, 2


def child(args: argparse.Namespace) -> None:
    """One rank. The last line is JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo")
    run(2, args.width, args.dir)
    before = status("VmRSS")
    peaks, plan = run(args.layers, args.width, args.dir)
    print(json.dumps({"baseline": before, **{phase: peak - before for phase, peak in peaks.items()}, **plan}), flush=True)
    if args.ranks > 1:
        dist.destroy_process_group()


def run(layers: int, width: int, folder: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Initialize and train: (the most that was resident in each phase, what the plan says)."""
    import torch

    import infinity
    from infinity.kinds import Tier

    config = {
        "device": "cpu",
        "placement": {"param": "cpu", "grad": "cpu", "optimizer": "cpu"},
        "prefetch": {"units": 2},
        "nvme": {"paths": [folder]},
        "store": {"resume": "never"},
    }
    torch.manual_seed(0)
    x, peaks = torch.randn(BATCH, width), {}
    _start_anew()
    with infinity.initialize(lambda: _stack(layers, width), config) as engine:
        peaks["initialize"] = status("VmHWM")
        _start_anew()
        for _ in range(STEPS):
            engine.model(x).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        peaks["train"] = status("VmHWM")
        plan = engine.plan
        return peaks, {"params": plan.num_params, "resting": plan.resting(Tier.CPU), "planned": plan.held_bytes(Tier.CPU)}


def _stack(layers: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def _start_anew() -> None:
    """The high-water mark of this process is what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each of so many ranks found."""
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        command = [sys.executable, __file__, "--child", "--ranks", str(ranks), "--dir", folder]
        return common.run_ranks(ranks, [*command, "--layers", str(args.layers), "--width", str(args.width)])


def report(results: dict[int, list[dict[str, Any]]]) -> None:
    first = results[1][0]
    print(f"\n{first['params'] / 1e6:.1f} M parameters, {first['resting'] / 1e6:.0f} MB of states. MB, of each rank and of all together")
    for ranks, found in results.items():
        print(f"  {ranks} rank{'s' if ranks > 1 else ''}")
        for name in ("baseline", *PHASES, "resting", "planned"):
            figures = [rank[name] for rank in found]
            growth = f"  {sum(figures) / first[name]:.3f} of one rank's" if name in PHASES else ""
            print(f"    {name:10s} {' + '.join(f'{figure / 1e6:.1f}' for figure in figures)} = {sum(figures) / 1e6:.1f}{growth}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=768)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, the first is 1")
    parser.add_argument("--dir", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--json", help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="a model of seconds, on 1 and 2 ranks")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.toy:
        args.layers, args.width, args.counts = 8, 256, [1, 2]
    if args.child:
        child(args)
        return
    print(f"{platform.platform()}, Python {platform.python_version()}", flush=True)
    results = {ranks: measure(ranks, args) for ranks in args.counts}
    report(results)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
