"""How throughput grows with the number of ranks, each with a batch of its own: weak scaling, and what ran at once.

    python bench/ranks.py --dir /mnt/nvme0              1.3 B parameters, bf16, sequence 1024, 8 sequences a rank, on 1, 2 and 4 GPUs
    python bench/ranks.py --batches 8 12 16             the batch of a rank grows with the memory that sharding frees
    python bench/ranks.py --toy                         seconds, on whatever device there is

Contenders, at ZeRO stage 3: everything in HBM; states in CPU memory; everything on NVMe; and torch's FSDP2 with everything in HBM. Each number
of ranks is a job of its own: after two steps, `--rounds` steps are timed from one barrier to the next. Prints tokens per second, by how much each
number of ranks is short of that many times one rank, bytes read and written per rank, and what share of a step's time lanes were busy together.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "examples")]
import common  # noqa: E402

WARMUP = 2
PLACEMENTS = {
    "hbm": {"param": "hbm", "grad": "hbm", "optimizer": "hbm"},
    "states-on-cpu": {"param": "hbm", "grad": "cpu", "optimizer": "cpu"},
    "nvme": {"param": "nvme", "grad": "nvme", "optimizer": "nvme"},
}
TOGETHER = (("comm", "gpu"), ("comm", "gpu", "download"), ("upload", "comm", "gpu"), ("nvme-read", "comm", "gpu"))
"""Lanes whose common time is printed."""


def child(args: argparse.Namespace) -> None:
    """One rank. The last line is JSON."""
    import gpt
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    shape = common.shape_of(args)
    tokens = torch.randint(0, min(512, args.vocabulary), (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(rank)).to(device)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    barrier = dist.new_group(backend="gloo")

    def timed(step: Callable[[], None]) -> float:
        dist.barrier(group=barrier)
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        dist.barrier(group=barrier)
        return time.perf_counter() - start

    torch.manual_seed(0)
    run = fsdp2 if args.contender == "fsdp2" else ours
    print(json.dumps({"tokens": tokens[:, 1:].numel(), **run(args, lambda: gpt.GPT(shape), batch, device, timed)}), flush=True)
    dist.destroy_process_group()


def ours(args: argparse.Namespace, build: Callable[[], Any], batch: dict[str, Any], device: Any, timed: Callable[..., float]) -> dict[str, Any]:
    import infinity

    tier = {"hbm": device.type if device.type == "cpu" else "hbm"}
    config: dict[str, Any] = {
        "device": device.type,
        "budgets": {"cpu": args.cpu},
        "nvme": {"paths": [args.dir]},
        "store": {"run": args.contender, "resume": "never"},
        "precision": {"dtype": "bf16"},
        "placement": {group: tier.get(home, home) for group, home in PLACEMENTS[args.contender].items()},
    }
    with device:
        model = build()
    with infinity.initialize(model, config) as engine:

        def step() -> None:
            engine.model(**batch).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()

        for _ in range(WARMUP):
            timed(step)
        mark, before = time.monotonic_ns(), engine.timeline.moved_bytes()
        seconds = [timed(step) for _ in range(args.rounds)]
        spans = [(str(span.lane), span.start_ns, span.stop_ns) for span in engine.timeline.spans() if span.start_ns >= mark]
        moved = {str(lane): (nbytes - before.get(lane, 0)) / args.rounds for lane, nbytes in engine.timeline.moved_bytes().items()}
        if args.trace:
            engine.timeline.save_chrome_trace(f"{args.trace}_{engine.rank}.json", since_ns=mark)
    together = {" + ".join(lanes): busy_together(spans, lanes) / sum(seconds) for lanes in TOGETHER}
    return {"seconds": seconds, "moved": moved, "together": together}


def fsdp2(args: argparse.Namespace, build: Callable[[], Any], batch: dict[str, Any], device: Any, timed: Callable[..., float]) -> dict[str, Any]:
    """torch's own: every block a unit, bf16 parameters and reductions, fp32 shards under fused AdamW."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with device:
        model = build()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        timed(step)
    return {"seconds": [timed(step) for _ in range(args.rounds)], "moved": {}, "together": {}}


def busy_together(spans: list[tuple[str, int, int]], lanes: tuple[str, ...]) -> float:
    """Seconds in which each of the lanes had a span under way."""
    edges = sorted((at, step, lane) for lane, start, stop in spans if lane in lanes for at, step in ((start, 1), (stop, -1)))
    running, total, since = dict.fromkeys(lanes, 0), 0, 0
    for at, step, lane in edges:
        if all(running.values()):
            total += at - since
        running[lane] += step
        since = at
    return total / 1e9


def measure(contender: str, ranks: int, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        command = [sys.executable, __file__, "--child", "--contender", contender, "--batch", str(batch), "--dir", folder, "--cpu", args.cpu]
        for name in (*common.SHAPE, "rounds"):
            command += [f"--{name}", str(getattr(args, name))]
        if args.trace:
            command += ["--trace", f"{args.trace}_{contender}_{ranks}"]
        return common.run_ranks(ranks, command)


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def report(contender: str, results: dict[int, list[dict[str, Any]]]) -> None:
    first = min(results)
    rates = {ranks: sum(rank["tokens"] for rank in found) / statistics.median(found[0]["seconds"]) for ranks, found in results.items()}
    for ranks, found in results.items():
        seconds = found[0]["seconds"]
        print(
            f"{contender:14s} {ranks} ranks  step {statistics.median(seconds):.4f} s [{min(seconds):.4f}..{max(seconds):.4f}] n={len(seconds)}  "
            f"{rates[ranks]:,.0f} tokens/s, {rates[ranks] / rates[first] * first / ranks:.3f} of {ranks / first:g} times that of {first}"
        )
        for lane, nbytes in found[0]["moved"].items():
            print(f"    {lane:11s} {nbytes / 1e9:8.3f} GB a step on rank 0")
        for lanes, share in found[0]["together"].items():
            print(f"    {lanes:25s} busy together in {share:.3f} of the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--batches", type=int, nargs="+", default=[8], help="sequences of a rank, for each number of ranks or for all")
    parser.add_argument("--contenders", default="hbm,states-on-cpu,nvme,fsdp2")
    common.add_shape(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", default="40GiB", help="budgets.cpu of each rank")
    parser.add_argument("--dir", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--trace", help="beginning of the names of files for Chrome traces, one of each rank")
    parser.add_argument("--json", help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="a model of seconds, on 1 and 2 ranks")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    if args.toy:
        args.layers, args.width, args.heads, args.vocabulary, args.sequence, args.rounds = 2, 64, 2, 256, 32, 2
        args.counts, args.cpu = [1, 2], "256MiB"
    batches = args.batches if len(args.batches) == len(args.counts) else args.batches[:1] * len(args.counts)
    results: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for contender in args.contenders.split(","):
        if contender == "fsdp2" and 0 < gpus() < max(args.counts):
            print("fsdp2          left out: NCCL does not connect ranks that share a GPU")
            continue
        results[contender] = {ranks: measure(contender, ranks, batch, args) for ranks, batch in zip(args.counts, batches, strict=True)}
        report(contender, results[contender])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
