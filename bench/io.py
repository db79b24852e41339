"""Disk rates through the store, beside fio and a bare kernel-AIO loop: same bytes, O_DIRECT, interleaved.

    python bench/io.py --path /mnt/nvme0                      4 GiB, 7 rounds
    python bench/io.py --path /mnt/nvme0 --probe ./aioprobe   and a probe of yours (see --help)
    python bench/io.py --toy                                  seconds, for the test run: the figures mean nothing

All contenders move the bytes of one file, the store's, since a disk is not equally fast everywhere: two files of one size may differ
by a quarter. It is laid out and overwritten once before timing. Rounds run each contender once, in an order drawn anew; a ratio is
the median over rounds of the two rates of one round. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from common import fio_memory, interleave, ratio  # noqa: E402

from infinity.kinds import Group, Tier  # noqa: E402
from infinity.sizes import KiB, MiB  # noqa: E402
from infinity.storage.copies import Copies  # noqa: E402
from infinity.storage.probe import facts  # noqa: E402
from infinity.storage.slabs import SlabPool  # noqa: E402
from infinity.storage.store import AioOptions, ChunkKey, ChunkSpec, NvmePath, Part, Pools, Store  # noqa: E402
from infinity.storage.work import Window  # noqa: E402
from infinity.timeline import Timeline  # noqa: E402

UNDER_WAY = 4
"""Chunks the store has under way at one time, as the optimizer pipeline does."""

Pass = Callable[[], float]
"""Moves all bytes once; bytes per second."""


class Engine:
    """The store: chunks in a shard file, fetched and written back in order."""

    def __init__(self, directory: Path, nbytes: int, chunk_bytes: int, options: AioOptions) -> None:
        pool = SlabPool(pin=torch.cuda.is_available(), threads=torch.get_num_threads())
        timeline = Timeline()
        self.nbytes = nbytes
        self.specs = [
            ChunkSpec(ChunkKey(0, 0, Group.PARAM, index), chunk_bytes, Tier.NVME, (Part(f"c{index}", torch.uint8, chunk_bytes),))
            for index in range(nbytes // chunk_bytes)
        ]
        self.store = Store(
            paths=[NvmePath(path=directory)],
            run="bench-io",
            pools=Pools(pinned=pool, plain=pool),
            copies=Copies(torch.device("cpu"), timeline),
            timeline=timeline,
            aio=options,
        )
        self.store.build(self.specs, ["bench"])
        (self.file,) = directory.rglob("*.safetensors")
        self.buffers = [pool.take(chunk_bytes).random_(0, 256) for _ in range(UNDER_WAY + 1)]

    def read(self) -> float:
        return self._move(self.store.fetch)

    def write(self) -> float:
        return self._move(self.store.write_back)

    def _move(self, start: Callable[[ChunkKey, torch.Tensor], object]) -> float:
        window, begin = Window(UNDER_WAY), time.perf_counter()
        for index, spec in enumerate(self.specs):
            window.add(start(spec.key, self.buffers[index % len(self.buffers)]))  # type: ignore[arg-type]
        window.drain()
        return self.nbytes / (time.perf_counter() - begin)


def fio_pass(file: Path, nbytes: int, block_bytes: int, depth: int, memory: str, kind: str) -> float:
    """One fio job on the chunks of the file: what comes before them is its header."""
    command = ["fio", "--name=bench", f"--filename={file}", f"--rw={kind}", f"--bs={block_bytes}", f"--iodepth={depth}", "--ioengine=libaio"]
    command += ["--direct=1", f"--offset={file.stat().st_size - nbytes}", f"--size={nbytes}", f"--iomem={memory}", "--output-format=json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(out[out.index("{") :])["jobs"][0][kind]["bw_bytes"])


def probe_pass(executable: str, file: Path, nbytes: int, block_bytes: int, depth: int, kind: str) -> float:
    """A probe begins at the first byte: the header is lost, and nobody reads it any more."""
    command = [executable, str(file), str(nbytes // MiB), str(block_bytes // KiB), str(depth), "1", kind[0], "thp"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"([\d.]+) GB/s", out)
    if found is None:
        raise SystemExit(f"{executable} printed no rate in GB/s: {out!r}")
    return float(found[1]) * 1e9


def contenders(args: argparse.Namespace, engine: Engine) -> dict[str, dict[str, Pass]]:
    """kind -> name -> one pass."""
    found: dict[str, dict[str, Pass]] = {"write": {"infinity": engine.write}, "read": {"infinity": engine.read}}
    n, block, depth = engine.nbytes, args.block_kib * KiB, args.depth
    if shutil.which("fio"):
        memory = fio_memory(block, depth)
        name = "fio libaio, 2 MiB pages" if memory == "mmaphuge" else "fio libaio, 4 KiB pages"
        for kind in found:
            found[kind][name] = lambda kind=kind, memory=memory: fio_pass(engine.file, n, block, depth, memory, kind)  # type: ignore[misc]
        if memory == "malloc":
            print(f"fio runs on 4 KiB pages: vm.nr_hugepages is too small for 2 MiB ones ({block * depth // (2 * MiB) + 1} needed)")
    if args.probe:
        for kind in found:
            found[kind]["probe, 2 MiB pages"] = lambda kind=kind: probe_pass(args.probe, engine.file, n, block, depth, kind)  # type: ignore[misc]
    return found


def summarize(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    ours = rates["infinity"]
    return {
        name: {
            "gb_s": statistics.median(values) / 1e9,
            "min": min(values) / 1e9,
            "max": max(values) / 1e9,
            "infinity_over_it": ratio(ours, values),
        }
        for name, values in rates.items()
    }


def run(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    found = facts(directory)
    if found.warning:
        print(found.warning)
    options = AioOptions(block_bytes=args.block_kib * KiB, queue_depth=args.depth, readers=args.threads, writers=args.threads)
    chunk_bytes = min(args.chunk_mib, args.mib) * MiB
    engine = Engine(directory, args.mib // (chunk_bytes // MiB) * chunk_bytes, chunk_bytes, options)
    try:
        results = {kind: summarize(interleave(passes, args.rounds)) for kind, passes in contenders(args, engine).items()}
    finally:
        engine.store.close()
    for kind, rows in results.items():
        for name, row in rows.items():
            spread = f"{row['gb_s']:6.2f} GB/s ({row['min']:.2f} to {row['max']:.2f}, n={args.rounds})"
            print(f"  {kind:5}  {name:26} {spread}   infinity / it {row['infinity_over_it']:.3f}")
    machine = {"kernel": platform.release(), "file_system": found.file_system, "is_memory": found.is_memory}
    return {"bench": "io", "machine": machine, "bytes": engine.nbytes, "block": args.block_kib * KiB, "depth": args.depth, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a directory on the disk; default: a temporary one")
    parser.add_argument("--mib", type=int, default=4096, help="bytes of one pass")
    parser.add_argument("--chunk-mib", type=int, default=64, help="bytes of one chunk of the store")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="the store's I/O threads for each direction")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--probe", help="an executable called as EXE FILE MIB BLOCK_KIB DEPTH THREADS r|w thp that prints a rate in GB/s")
    parser.add_argument("--toy", action="store_true", help="tiny and meaningless, to see that it runs")
    args = parser.parse_args()
    if args.toy:
        args.mib, args.chunk_mib, args.rounds = 16, 4, 1
        logging.disable(logging.WARNING)
    directory = Path(tempfile.mkdtemp(prefix="infinity-bench-io-", dir=args.path))
    try:
        print(json.dumps(run(args, directory)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
