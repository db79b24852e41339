"""PCIe copies through the engine beside a plain pinned copy of torch's, and what pinning costs.

    python bench/copies.py              4 GiB in pieces of 64 MiB, 7 rounds, on one GPU
    python bench/copies.py --toy        seconds, on whatever device there is: the figures mean nothing

Every contender moves the same bytes. Rounds run each once, in an order drawn anew; a ratio is the median over rounds of the two rates
of one round. Pinning is timed once each way: the engine's buffers on 2 MiB pages, and torch's own allocator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from common import interleave, ratio  # noqa: E402

from infinity.sizes import GiB, MiB  # noqa: E402
from infinity.storage.copies import Copies  # noqa: E402
from infinity.storage.slabs import SlabPool  # noqa: E402
from infinity.timeline import Timeline  # noqa: E402

UNDER_WAY = 4
"""Copies that the engine has under way at a time, about as many as units are fetched ahead."""


class Bench:
    """Buffers on both sides, and passes over them; each moves all bytes once and returns bytes per second."""

    def __init__(self, nbytes: int, piece_bytes: int, device: torch.device, pool: SlabPool) -> None:
        self.nbytes, self.device = nbytes, device
        self.count = nbytes // piece_bytes
        self.copies = Copies(device, Timeline())
        self.ours = [pool.take(piece_bytes).random_(0, 256) for _ in range(UNDER_WAY)]
        self.plain = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda").random_(0, 256) for _ in range(UNDER_WAY)]
        self.there = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(UNDER_WAY)]

    def passes(self) -> dict[str, dict[str, Callable[[], float]]]:
        return {
            "upload": {"infinity": lambda: self.through_engine(up=True), "plain pinned copy": lambda: self.by_torch(up=True)},
            "download": {"infinity": lambda: self.through_engine(up=False), "plain pinned copy": lambda: self.by_torch(up=False)},
        }

    def through_engine(self, up: bool) -> float:
        start = self.begin()
        works = []
        for index in range(self.count):
            here, there = self.ours[index % UNDER_WAY], self.there[index % UNDER_WAY]
            if len(works) == UNDER_WAY:
                works.pop(0).wait()
            works.append(self.copies.upload(here, there) if up else self.copies.download(there, here))
        for work in works:
            work.wait()
        return self.nbytes / (time.perf_counter() - start)

    def by_torch(self, up: bool) -> float:
        start = self.begin()
        for index in range(self.count):
            here, there = self.plain[index % UNDER_WAY], self.there[index % UNDER_WAY]
            target, source = (there, here) if up else (here, there)
            target.copy_(source, non_blocking=True)
        self.synchronize()
        return self.nbytes / (time.perf_counter() - start)

    def begin(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def pinning(nbytes: int, threads: int) -> dict[str, float]:
    """Seconds per GiB from asking for pinned memory until it is there and touched."""
    start = time.perf_counter()
    with closing(SlabPool(pin=True, threads=threads)) as pool:
        pool.take(nbytes)
        ours = time.perf_counter() - start
    start = time.perf_counter()
    torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    theirs = time.perf_counter() - start
    return {"infinity": ours * GiB / nbytes, "torch": theirs * GiB / nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="bytes of one pass, and of the memory that is pinned")
    parser.add_argument("--piece-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=8, help="that touch fresh memory")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="tiny and meaningless, to see that it runs")
    args = parser.parse_args()
    if args.toy:
        args.mib, args.piece_mib, args.rounds = 16, 2, 1
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.toy:
        raise SystemExit("no CUDA device: there is no PCIe to measure")
    results: dict[str, object] = {"bench": "copies", "device": str(device), "bytes": args.mib * MiB}
    with closing(SlabPool(pin=device.type == "cuda", threads=args.threads)) as pool:
        bench = Bench(args.mib * MiB, args.piece_mib * MiB, device, pool)
        for direction, passes in bench.passes().items():
            rates = interleave(passes, args.rounds)
            results[direction] = rates
            for name, values in rates.items():
                spread = f"{statistics.median(values) / 1e9:6.2f} GB/s ({min(values) / 1e9:.2f} to {max(values) / 1e9:.2f}, n={args.rounds})"
                print(f"  {direction:8}  {name:18} {spread}   infinity / it {ratio(rates['infinity'], values):.3f}")
        bench.copies.close()
    if device.type == "cuda":
        results["pinning_s_per_gib"] = costs = pinning(args.mib * MiB, args.threads)
        print("  pinning   " + ", ".join(f"{name} {seconds:.3f} s per GiB" for name, seconds in costs.items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
