"""One AdamW step on the CPU: ours, torch's, and the memory ceiling, interleaved in one process.

    python bench/adam.py --params 64 --threads 2
    python bench/adam.py --toy                      # seconds, for the test run: the figures mean nothing

Every contender has its own state on 2 MiB pages. Rounds run each contender once, in an order drawn anew; a ratio is the median over
rounds of the two times of one round. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import adapter  # noqa: E402
from common import interleave, ratio, timed  # noqa: E402

from infinity import native  # noqa: E402

HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BYTES_PER_PARAM = 128
"""Of all contenders together, with what torch's foreach takes for a while."""

Step = Callable[[], object]


COMPARED = {
    "fp32 against the ceiling": ("infinity fp32", "ceiling: 28 bytes, no Adam"),
    "bf16 in and out against the ceiling": ("infinity bf16 grad + bf16 out", "ceiling: 28 bytes, no Adam"),
    "fp32 against torch fused": ("infinity fp32", "torch fused fp32"),
    "bf16 in and out against torch cast, fused, cast": ("infinity bf16 grad + bf16 out", "torch cast, fused, cast"),
    "fp32 against torch foreach": ("infinity fp32", "torch foreach fp32"),
}
"""How many times as fast the first is as the second."""


def on_large_pages(numel: int, dtype: torch.dtype, source: Tensor | None = None) -> Tensor:
    mapping = native.Mapping(numel * dtype.itemsize, threads=torch.get_num_threads())
    tensor = torch.frombuffer(mapping.buffer, dtype=dtype, count=numel)
    if source is not None:
        tensor.copy_(source)
    return tensor


class Bench:
    """The contenders over `numel` parameters; `steps` maps a name to (bytes per parameter, one step)."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.values = torch.randn(numel)
        self.grad = on_large_pages(numel, torch.float32, torch.randn(numel))
        self.grad_bf16 = on_large_pages(numel, torch.bfloat16, self.grad)
        self.steps: dict[str, tuple[int, Step]] = {
            "infinity fp32": (28, self.ours(self.grad, None)),
            "infinity fp32 + bf16 out": (30, self.ours(self.grad, torch.bfloat16)),
            "infinity bf16 grad + bf16 out": (28, self.ours(self.grad_bf16, torch.bfloat16)),
            "torch fused fp32": (28, self.torch_step(fused=True)),
            "torch cast, fused, cast": (40, self.torch_with_casts()),
            "torch foreach fp32": (28, self.torch_step(foreach=True)),
        }
        ceiling = self.ceiling()
        if ceiling:
            self.steps["ceiling: 28 bytes, no Adam"] = (28, ceiling)

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            on_large_pages(self.numel, torch.float32, self.values),
            on_large_pages(self.numel, torch.float32),
            on_large_pages(self.numel, torch.float32),
        )

    def ours(self, grad: Tensor, out: torch.dtype | None) -> Step:
        params, exp_avg, exp_avg_sq = self.state()
        target = None if out is None else on_large_pages(self.numel, out)
        return adapter.cpu_adam(params, grad, exp_avg, exp_avg_sq, bf16_out=target, **HYPER)

    def torch_optimizer(self, grad: Tensor, **kind: bool) -> tuple[Tensor, torch.optim.AdamW]:
        params, exp_avg, exp_avg_sq = self.state()
        leaf = torch.nn.Parameter(params)
        leaf.grad = grad
        optimizer = torch.optim.AdamW([leaf], **HYPER, **kind)
        optimizer.state[leaf].update(step=torch.tensor(0.0), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        return params, optimizer

    def torch_step(self, **kind: bool) -> Step:
        return self.torch_optimizer(self.grad, **kind)[1].step

    def torch_with_casts(self) -> Step:
        full = on_large_pages(self.numel, torch.float32)
        target = on_large_pages(self.numel, torch.bfloat16)
        params, optimizer = self.torch_optimizer(full, fused=True)

        def step() -> None:
            full.copy_(self.grad_bf16)
            optimizer.step()
            target.copy_(params)

        return step

    def ceiling(self) -> Step | None:
        """None where the loop cannot be compiled."""
        source = Path(__file__).with_name("traffic.c")
        with tempfile.TemporaryDirectory() as directory:
            library = f"{directory}/traffic.so"
            try:
                subprocess.run(["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", library], check=True)
            except (OSError, subprocess.CalledProcessError):
                return None
            traffic = ctypes.CDLL(library).traffic
        p, m, v = self.state()
        arguments = [ctypes.c_void_p(x.data_ptr()) for x in (p, self.grad, m, v)] + [ctypes.c_size_t(self.numel)]

        def step() -> None:
            traffic(*arguments)
            _ = (p, m, v)  # theirs is the memory the loop runs over

        return step


def measure(params_m: float, rounds: int, warmup: int) -> dict[str, Any]:
    numel = int(params_m * (1 << 20))
    available = psutil.virtual_memory().available
    if numel * BYTES_PER_PARAM > available:
        most = available // BYTES_PER_PARAM >> 20
        raise SystemExit(f"--params {params_m:g}: all contenders together need {BYTES_PER_PARAM} bytes a parameter; memory has room for {most}")
    bench = Bench(numel)
    times = interleave({name: timed(step) for name, (_, step) in bench.steps.items()}, rounds, warmup)
    rows = {
        name: {
            "gparam_s": bench.numel / statistics.median(seconds) / 1e9,
            "gbyte_s": bench.numel * bench.steps[name][0] / statistics.median(seconds) / 1e9,
            "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        }
        for name, seconds in times.items()
    }
    ratios = {what: ratio(times[slow], times[fast]) for what, (fast, slow) in COMPARED.items() if slow in times}
    return {"params_m": params_m, "rounds": rounds, "contenders": rows, "ratios": ratios}


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['params_m']} Mi parameters, {result['rounds']} rounds, {torch.get_num_threads()} threads")
    for name, row in result["contenders"].items():
        seconds = row["seconds"]
        spread = f"{seconds['median']:.4f} s ({seconds['min']:.4f} to {seconds['max']:.4f})"
        print(f"  {name:32} {row['gparam_s']:7.3f} Gparam/s {row['gbyte_s']:7.1f} GB/s   {spread}")
    for name, value in result["ratios"].items():
        print(f"  {name:50} {value:.3f}x")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="64", help="Mi parameters, several with commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--toy", action="store_true", help="tiny and meaningless, to see that it runs")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes, rounds, warmup = ([0.1], 2, 1) if args.toy else ([float(x) for x in args.params.split(",")], args.rounds, 2)
    results = [measure(size, rounds, warmup) for size in sizes]
    for result in results:
        print_table(result)
    machine = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__, "isas": native.available_isas()}
    print(json.dumps({"bench": "adam", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
