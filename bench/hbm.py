"""`infinity io --target=cuda` beside its two stages: the same job with blocks that stay in CPU memory, and a plain pinned copy.

    python bench/hbm.py --dir /mnt/nvme0         2 GiB, blocks of 1 MiB, depth 32, 7 rounds, on one GPU
    python bench/hbm.py --toy                    seconds, on whatever device there is: the figures mean nothing

Rounds run each contender once, in an order drawn anew, on one file that was overwritten once. A ratio is the median over rounds of the
whole way's rate over that of the slower stage in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from common import interleave, ratio  # noqa: E402

from infinity.native import READ, WRITE  # noqa: E402
from infinity.sizes import MiB  # noqa: E402
from infinity.storage.slabs import SlabPool  # noqa: E402
from infinity.workload import clone, run  # noqa: E402
from infinity.workload.jobfile import read_words  # noqa: E402
from infinity.workload.pump import LARGE_BYTES  # noqa: E402

WHOLE, FILE, COPY = "file and HBM", "file and CPU", "pinned copy"


def io_rate(folder: str, args: argparse.Namespace, rw: str, target: str) -> float:
    """Bytes per second of one pass over the file."""
    words = [f"--directory={folder}", "--name=hbm", f"--rw={rw}", f"--size={args.mib}m", f"--bs={args.bs}", f"--iodepth={args.iodepth}"]
    (result,) = run.run_jobs(read_words([*words, "--ioengine=libaio", f"--target={target}"]))
    return result.stats.directions[WRITE if rw == "write" else READ].bandwidth


def copy_rate(device: torch.device, pool: SlabPool, nbytes: int, *, up: bool) -> float:
    """Bytes per second of plain copies, in the pieces of a hop, between memory that the engine pinned and HBM."""
    here = [pool.take(LARGE_BYTES) for _ in range(2)]
    there = [torch.empty(LARGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    synchronize(device)
    start = time.perf_counter()
    for index in range(max(1, nbytes // LARGE_BYTES)):
        target, source = (there, here) if up else (here, there)
        target[index % 2].copy_(source[index % 2], non_blocking=True)
    synchronize(device)
    return max(1, nbytes // LARGE_BYTES) * LARGE_BYTES / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="directory on the drive; a temporary one if left out")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file")
    parser.add_argument("--bs", default="1m")
    parser.add_argument("--iodepth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="tiny and meaningless, to see that it runs")
    args = parser.parse_args()
    if args.toy:
        args.mib, args.bs, args.iodepth, args.rounds = 16, "64k", 4, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        if not args.toy:
            raise SystemExit("no CUDA device: there is no HBM to measure")
        for module in (clone, run):
            module.device_of = lambda job: None if job.target == "cpu" else device  # type: ignore[attr-defined]
    results: dict[str, object] = {"bench": "hbm", "device": str(device), "bytes": args.mib * MiB, "bs": args.bs, "iodepth": args.iodepth}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, closing(SlabPool(pin=device.type == "cuda", threads=4)) as pool:
        for _ in range(2):  # laid out, and overwritten
            io_rate(folder, args, "write", "cpu")
        for rw in ("read", "write"):
            contenders = {
                WHOLE: lambda rw=rw: io_rate(folder, args, rw, "cuda"),
                FILE: lambda rw=rw: io_rate(folder, args, rw, "cpu"),
                COPY: lambda rw=rw: copy_rate(device, pool, args.mib * MiB, up=rw == "read"),
            }
            rates = interleave(contenders, args.rounds)
            slower = [min(pair) for pair in zip(rates[FILE], rates[COPY], strict=True)]
            results[rw] = rates
            for name, values in rates.items():
                spread = f"{min(values) / 1e9:.2f} to {max(values) / 1e9:.2f}, n={args.rounds}"
                print(f"  {rw:5}  {name:13} {statistics.median(values) / 1e9:6.2f} GB/s ({spread})")
            print(f"  {rw:5}  whole way / slower stage {ratio(rates[WHOLE], slower):.3f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
