"""The report for people: fio's normal output, with the depth reached and the pages of the buffers beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from infinity.native import READ, WRITE
from infinity.workload.clone import CloneResult
from infinity.workload.doubts import doubts
from infinity.workload.hop import Copied
from infinity.workload.job import Job
from infinity.workload.latency import Latencies
from infinity.workload.notation import format_size
from infinity.workload.stats import DEPTH_BOUNDS, DirectionStats

NAMES = {READ: "read", WRITE: "write"}


def settings_line(jobs: Iterable[Job]) -> str:
    """Which of the settings were used whose defaults are not fio's, and how blocks were moved."""
    jobs = list(jobs)

    def used(key: str) -> str:
        return ",".join(dict.fromkeys(str(int(value) if isinstance(value := getattr(job, key), bool) else value) for job in jobs))

    keys = ["direct", "iomem", "ioengine", "iodepth", *(["target"] if any(job.target != "cpu" for job in jobs) else [])]
    values = " ".join(f"{key}={used(key)}" for key in keys)
    return f"infinity io: {values} (defaults are fio's, except direct=1 and iomem=mmaphuge)"


def totals(results: Sequence[CloneResult]) -> dict[int, DirectionStats]:
    """All clones together."""
    sums = {READ: DirectionStats(), WRITE: DirectionStats()}
    for result in results:
        for direction, stats in result.stats.directions.items():
            sums[direction].merge(stats)
    return sums


def render(results: Sequence[CloneResult]) -> str:
    """The whole report."""
    lines = [settings_line(result.job for result in results), *(f"warning: {doubt}" for doubt in doubts(results))]
    for result in results:
        lines += ["", *_clone(result)]
    for group in sorted({result.group for result in results}):
        lines += ["", *_group(group, [result for result in results if result.group == group])]
    return "\n".join(lines) + "\n"


def _clone(result: CloneResult) -> Iterator[str]:
    job, stats = result.job, result.stats
    sizes = ", ".join(f"({NAMES[direction][0].upper()}) {_sizes(job, direction)}" for direction in NAMES)
    engine = f"ioengine={job.ioengine} ({result.backend})" if job.ioengine != result.backend else f"ioengine={job.ioengine}"
    yield f"{job.name}: (g={result.group}, clone {result.clone} of {job.numjobs}): rw={job.rw}, bs={sizes}, {engine}, iodepth={job.iodepth}"
    for direction, moved in stats.directions.items():
        if moved.ios:
            yield from _direction(NAMES[direction], moved)
        if direction in result.hops:
            yield _hop(result.hops[direction], moved)
    if stats.syncs.count:
        yield "  fsync:"
        yield _summary("lat", stats.syncs)
        yield from _percentiles("lat", stats.syncs)
    usage, seconds = result.usage, max(result.elapsed_ns / 1e9, 1e-9)
    yield (
        f"  cpu          : usr={usage.user_s / seconds:.2%}, sys={usage.system_s / seconds:.2%}, ctx={usage.switches}, "
        f"majf={usage.major_faults}, minf={usage.minor_faults}"
    )
    yield f"  IO depths    : {_depths(result)}, mean={stats.mean_depth:.1f}, max={stats.deepest}"
    yield f"  buffers      : iomem={job.iomem}, pages of {format_size(result.page_bytes)}"


def _sizes(job: Job, direction: int) -> str:
    blocks = job.blocks[direction]
    return f"{format_size(blocks.smallest)}-{format_size(blocks.largest)}"


def _direction(name: str, stats: DirectionStats) -> Iterator[str]:
    yield (
        f"  {name}: IOPS={_short(stats.iops)}, BW={binary(stats.bandwidth)}/s ({decimal(stats.bandwidth)}/s)"
        f"({binary(stats.nbytes)}/{stats.elapsed_ns / 1e6:.0f}msec)"
    )
    if stats.submission.count:
        yield _summary("slat", stats.submission)
    yield _summary("clat", stats.completion)
    yield _summary("lat", stats.total)
    yield from _percentiles("clat", stats.completion)


def _hop(copied: Copied, moved: DirectionStats) -> str:
    share = copied.busy_ns / max(moved.elapsed_ns, 1)
    return f"     hbm: {copied.lane} at {binary(copied.rate)}/s ({decimal(copied.rate)}/s), which took {share:.1%} of the time"


def _unit(times: Latencies) -> tuple[str, float]:
    if times.mean_ns < 10_000:
        return "nsec", 1.0
    return ("usec", 1e3) if times.mean_ns < 10_000_000 else ("msec", 1e6)


def _summary(name: str, times: Latencies) -> str:
    unit, factor = _unit(times)
    low, high = times.min_ns / factor, times.max_ns / factor
    return f"    {name:>4} ({unit}): min={low:.0f}, max={high:.0f}, avg={times.mean_ns / factor:.2f}, stdev={times.stdev_ns / factor:.2f}"


def _percentiles(name: str, times: Latencies) -> Iterator[str]:
    unit, factor = _unit(times)
    yield f"    {name} percentiles ({unit}):"
    cells = [f"{percent:5.2f}th=[{value / factor:5.0f}]" for percent, value in times.percentiles().items()]
    for start in range(0, len(cells), 4):
        row = ", ".join(cells[start : start + 4])
        yield f"     | {row}{',' if start + 4 < len(cells) else ''}"


def depth_shares(result: CloneResult) -> dict[str, float]:
    """Percent of the blocks that were begun at each group of depths, under fio's names."""
    count = max(int(result.stats.depths.sum()), 1)
    names = [f">={bound}" if bound == DEPTH_BOUNDS[-1] else str(bound) for bound in DEPTH_BOUNDS]
    return {name: 100 * int(number) / count for name, number in zip(names, result.stats.depths, strict=True)}


def _depths(result: CloneResult) -> str:
    return ", ".join(f"{name}={share:.1f}%" for name, share in depth_shares(result).items())


def _group(group: int, results: Sequence[CloneResult]) -> Iterator[str]:
    yield f"Run status group {group} (all jobs):"
    for direction, total in totals(results).items():
        parts = [stats for result in results if (stats := result.stats.directions[direction]).ios]
        if not parts:
            continue
        rates, times = [stats.bandwidth for stats in parts], [stats.elapsed_ns / 1e6 for stats in parts]
        yield (
            f"{NAMES[direction].upper():>8}: bw={binary(total.bandwidth)}/s ({decimal(total.bandwidth)}/s), "
            f"{binary(min(rates))}/s-{binary(max(rates))}/s ({decimal(min(rates))}/s-{decimal(max(rates))}/s), "
            f"iops={_short(total.iops)}, io={binary(total.nbytes)} ({decimal(total.nbytes)}), run={min(times):.0f}-{max(times):.0f}msec"
        )


def binary(nbytes: float) -> str:
    """62804459 -> `"59.9MiB"`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal(nbytes: float) -> str:
    """62804459 -> `"62.8MB"`."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def _short(number: float) -> str:
    return _scaled(number, 1000, ("", "k", "M", "G"))


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= (base if power else 10 * base) and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 else max(0, 3 - len(str(int(number))))
    return f"{number:.{digits}f}{units[power]}"
