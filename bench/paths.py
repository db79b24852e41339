"""Do several paths add up? 1 to 16 disks that the kernel throttles to one rate, read and written through the store at once.

    python bench/paths.py --dir /var/tmp          needs root: loop devices and a blkio cgroup; some minutes
    python bench/paths.py --dir /var/tmp --toy    seconds

Prints, per number of paths, the median rate of a pass over all of them against as many times the rate of one, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from throttle import NotPermittedError, throttled_disks  # noqa: E402

from infinity.kinds import Group, Tier  # noqa: E402
from infinity.sizes import MiB  # noqa: E402
from infinity.storage.copies import Copies  # noqa: E402
from infinity.storage.slabs import SlabPool  # noqa: E402
from infinity.storage.store import ChunkKey, ChunkSpec, NvmePath, Part, Pools, Store  # noqa: E402
from infinity.storage.work import join  # noqa: E402
from infinity.timeline import Timeline  # noqa: E402

CHUNK_BYTES = 4 * MiB


def measure(points: Sequence[Path], chunks: int, passes: int) -> tuple[float, float]:
    """(read, write) in bytes per second: medians of passes over `chunks` chunks for each path, all under way at once."""
    pool, timeline = SlabPool(pin=False, threads=1), Timeline()
    specs = [
        ChunkSpec(ChunkKey(0, 0, Group.PARAM, index), CHUNK_BYTES, Tier.NVME, (Part(f"c{index}", torch.uint8, CHUNK_BYTES),))
        for index in range(chunks * len(points))
    ]
    store = Store(
        paths=[NvmePath(path=point, weight=1.0) for point in points],
        run="bench-paths",
        pools=Pools(pinned=pool, plain=pool),
        copies=Copies(torch.device("cpu"), timeline),
        timeline=timeline,
    )
    buffer = pool.take(CHUNK_BYTES).random_(0, 256)
    try:
        store.build(specs, ["bench"])
        rates: dict[str, list[float]] = {"read": [], "write": []}
        for index in range(passes + 1):
            for name, move in (("write", store.write_back), ("read", store.fetch)):
                start = time.perf_counter()
                join(move(spec.key, buffer) for spec in specs).wait()
                if index:  # the first pass lays the file out
                    rates[name].append(len(specs) * CHUNK_BYTES / (time.perf_counter() - start))
    finally:
        store.close()
        pool.close()
    return statistics.median(rates["read"]), statistics.median(rates["write"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp", help="directory for the images of the disks")
    parser.add_argument("--rate", type=int, default=30_000_000, help="bytes per second of each, each way")
    parser.add_argument("--chunks", type=int, default=15, help="of 4 MiB, for each path")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--most", type=int, default=16, help="paths")
    parser.add_argument("--toy", action="store_true", help="two paths, for seconds")
    args = parser.parse_args()
    if args.toy:
        args.chunks, args.passes, args.most = 4, 1, 2
    logging.disable()
    found = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        rates = {f"d{index}": args.rate for index in range(args.most)}
        with throttled_disks(Path(folder), rates, (args.chunks * CHUNK_BYTES + 32 * MiB) // MiB * MiB) as (points, processes):
            processes.write_text(str(os.getpid()))
            for count in (count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= args.most):
                read, write = measure(points[:count], args.chunks, args.passes)
                found[count] = {"read": read, "write": write}
                shares = [found[count][name] / (count * found[1][name]) for name in ("read", "write")]
                print(f"{count:3d} paths: read {read / 1e6:7.1f} MB/s ({shares[0]:.3f} of {count} times one)  ", end="")
                print(f"write {write / 1e6:7.1f} MB/s ({shares[1]:.3f})", flush=True)
    print(json.dumps({"bench": "paths", "args": vars(args), "rates": found}))


if __name__ == "__main__":
    try:
        main()
    except NotPermittedError as error:
        sys.exit(f"not permitted: {error}")
