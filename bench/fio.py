"""`infinity io` beside fio: the same jobs on the same file with the same buffer memory, bandwidth and completion latency.

    python bench/fio.py --dir /mnt/nvme0                   45 kinds of job, 7 rounds: half an hour
    python bench/fio.py --dir /mnt/nvme0 --rw read,write --bs 1m --iodepth 32
    python bench/fio.py --toy                              seconds: the figures mean nothing

The file is overwritten once first. A round runs fio, infinity and fio again, in an order drawn anew; the two runs of fio show how far the
machine alone moves a figure. A ratio is the median over rounds of the ratio of one round, infinity / fio; beside it stand the extremes of
fio / fio. A bandwidth is met at 0.95 (0.85 at blocks of 4 KiB) or at the least of fio's own ratios, a latency at 1.15 or at their most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from common import fio_memory, interleave, ratio  # noqa: E402

from infinity.workload.fio_json import render_json  # noqa: E402
from infinity.workload.jobfile import read_words  # noqa: E402
from infinity.workload.notation import parse_size  # noqa: E402
from infinity.workload.run import run_jobs  # noqa: E402

OURS, FIO, AGAIN = "infinity", "fio", "fio again"
FIGURES = ("bandwidth", "p50", "p99")
LEAST_BANDWIDTH, LEAST_BANDWIDTH_4K, MOST_LATENCY = 0.95, 0.85, 1.15

Report = Mapping[str, float]


def words_of(file: Path, args: argparse.Namespace, rw: str, bs: str, depth: int) -> list[str]:
    memory = fio_memory(parse_size(bs), depth)
    words = ["--name=cell", f"--filename={file}", f"--size={args.size}", f"--rw={rw}", f"--bs={bs}", f"--iodepth={depth}", "--ioengine=libaio"]
    return [*words, "--direct=1", f"--iomem={memory}", "--time_based", f"--runtime={args.runtime}", f"--ramp_time={args.ramp}"]


def figures_of(table: Mapping[str, object]) -> Report:
    """Bytes per second and microseconds of a report in fio's JSON, both directions of a mix together."""
    (job,) = table["jobs"]  # type: ignore[misc]
    moved = [job[kind] for kind in ("read", "write") if job[kind]["total_ios"]]
    count = sum(part["total_ios"] for part in moved)

    def percentile(name: str) -> float:
        return sum(part["clat_ns"]["percentile"][name] * part["total_ios"] for part in moved) / count / 1e3

    return {"bandwidth": sum(part["bw_bytes"] for part in moved), "p50": percentile("50.000000"), "p99": percentile("99.000000")}


def run_fio(words: list[str]) -> Report:
    out = subprocess.run(["fio", *words, "--output-format=json"], capture_output=True, text=True, check=True).stdout
    return figures_of(json.loads(out[out.index("{") :]))


def run_ours(words: list[str]) -> Report:
    return figures_of(json.loads(render_json(run_jobs(read_words(words), destroy_data=True))))


def cell(words: list[str], rounds: int) -> dict[str, list[Report]]:
    contenders: dict[str, Callable[[], Report]] = {OURS: lambda: run_ours(words), FIO: lambda: run_fio(words), AGAIN: lambda: run_fio(words)}
    return interleave(contenders, rounds, warmup=0)  # type: ignore[arg-type, return-value]


def verdicts(found: dict[str, list[Report]], bs: str) -> dict[str, tuple[float, float, float, bool]]:
    """figure -> (infinity / fio, least and most of fio / fio, whether it is met)."""
    judged = {}
    for figure in FIGURES:
        ours, fio, again = ([report[figure] for report in found[name]] for name in (OURS, FIO, AGAIN))
        noise = [b / a for a, b in zip(fio, again, strict=True)]
        low, high = min(*noise, *(1 / each for each in noise)), max(*noise, *(1 / each for each in noise))
        middle = ratio(ours, fio)
        if figure == "bandwidth":
            is_met = middle >= min(LEAST_BANDWIDTH_4K if parse_size(bs) <= 4096 else LEAST_BANDWIDTH, low)
        else:
            is_met = middle <= max(MOST_LATENCY, high)
        judged[figure] = middle, low, high, is_met
    return judged


def row(name: str, found: dict[str, list[Report]], judged: dict[str, tuple[float, float, float, bool]]) -> str:
    cells = [name]
    for figure in FIGURES:
        middle, low, high, is_met = judged[figure]
        values = [statistics.median(report[figure] for report in found[side]) for side in (OURS, FIO)]
        shown = [f"{value / 1e6:,.0f}" if figure == "bandwidth" else f"{value:,.0f}" for value in values]
        cells += [*shown, f"{'' if is_met else '**'}{middle:.2f}{'' if is_met else '**'} ({low:.2f} to {high:.2f})"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="directory on the drive; a temporary one if left out")
    parser.add_argument("--size", default="1g", help="of the file")
    parser.add_argument("--rw", default="read,write,rw,randread,randwrite")
    parser.add_argument("--bs", default="4k,128k,1m")
    parser.add_argument("--iodepth", default="1,8,32")
    parser.add_argument("--runtime", default="1s", help="of one run")
    parser.add_argument("--ramp", default="200ms", help="before it is counted")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--toy", action="store_true", help="tiny and meaningless, to see that it runs")
    args = parser.parse_args()
    if args.toy:
        args.size, args.rw, args.bs, args.iodepth, args.runtime, args.ramp, args.rounds = "8m", "read,rw", "64k", "4", "100ms", "0", 1
    results: dict[str, object] = {}
    missed = 0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        file = Path(folder) / "file"
        for _ in range(2):
            run_jobs(read_words(["--name=fill", f"--filename={file}", "--rw=write", "--bs=1m", f"--size={args.size}"]))
        print("| job | MB/s | fio | ratio (fio / fio) | p50 µs | fio | ratio (fio / fio) | p99 µs | fio | ratio (fio / fio) |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for rw, bs, depth in ((rw, bs, int(depth)) for rw in args.rw.split(",") for bs in args.bs.split(",") for depth in args.iodepth.split(",")):
            name = f"{rw} {bs} depth {depth}"
            found = cell(words_of(file, args, rw, bs, depth), args.rounds)
            judged = verdicts(found, bs)
            missed += sum(not is_met for *_, is_met in judged.values())
            results[name] = found
            print(row(name, found, judged), flush=True)
    print(f"{missed} of {len(results) * len(FIGURES)} figures missed")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
