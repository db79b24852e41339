"""The report for programs: fio's JSON, under fio's names. What fio has no name for stands under "infinity"."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity.native import READ, WRITE
from infinity.workload.clone import CloneResult
from infinity.workload.doubts import doubts
from infinity.workload.hop import Copied
from infinity.workload.latency import MIDDLES, Latencies
from infinity.workload.report import NAMES, depth_shares, settings_line, totals
from infinity.workload.stats import DirectionStats

_BOUNDS = (2, 4, 10, 20, 50, 100, 250, 500, 750, 1000)
"""fio's groups of latencies, in ns, us and ms."""

Table = dict[str, Any]


def render_json(results: Sequence[CloneResult]) -> str:
    """The whole report."""
    now = time.time()
    sums = totals(results)
    table = {
        "fio version": f"infinity-{_version()}",
        "timestamp": int(now),
        "timestamp_ms": int(now * 1000),
        "time": time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(now)),
        "global options": {setting.key: setting.value or "1" for result in results for setting in result.text.shared},
        "jobs": [_clone(result) for result in results],
        "infinity": {
            "settings": settings_line(result.job for result in results),
            "warnings": doubts(results),
            "total": {name: _direction(sums[direction]) for direction, name in NAMES.items()},
        },
    }
    return json.dumps(table, indent=2) + "\n"


def _version() -> str:
    try:
        return version("infinity-offload")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _clone(result: CloneResult) -> Table:
    seconds = max(result.elapsed_ns / 1e9, 1e-9)
    stats, usage = result.stats, result.usage
    lat = Latencies()
    for moved in stats.directions.values():
        lat.merge(moved.total)
    return {
        "jobname": result.job.name,
        "groupid": result.group,
        "error": 0,
        "eta": 0,
        "elapsed": int(np.ceil(seconds)),
        "job options": result.text.options(),
        "read": _direction(stats.directions[READ]),
        "write": _direction(stats.directions[WRITE]),
        "trim": _direction(DirectionStats()),
        "sync": {"total_ios": stats.syncs.count, "lat_ns": _times(stats.syncs, has_percentiles=True)},
        "job_runtime": round(seconds * 1000),
        "usr_cpu": 100 * usage.user_s / seconds,
        "sys_cpu": 100 * usage.system_s / seconds,
        "ctx": usage.switches,
        "majf": usage.major_faults,
        "minf": usage.minor_faults,
        "iodepth_level": depth_shares(result),
        "latency_ns": _shares(lat, 1, 0),
        "latency_us": _shares(lat, 1_000, 1_000),
        "latency_ms": _shares(lat, 1_000_000, 1_000_000, 2_000_000_000),
        "infinity": {
            "clone": result.clone,
            "backend": result.backend,
            "iomem_page_bytes": result.page_bytes,
            "iodepth_mean": stats.mean_depth,
            "iodepth_max": stats.deepest,
            "target": result.job.target,
            "hbm": {NAMES[direction]: _hop(copied) for direction, copied in result.hops.items()},
        },
    }


def _hop(copied: Copied) -> Table:
    return {"copied_bytes": copied.nbytes, "bw_bytes": int(copied.rate), "busy": round(copied.busy_ns / 1e6)}


def _direction(stats: DirectionStats) -> Table:
    rates, iops = stats.rates.bandwidth() / 1024, stats.rates.iops()
    return {
        "io_bytes": stats.nbytes,
        "io_kbytes": stats.nbytes >> 10,
        "bw_bytes": int(stats.bandwidth),
        "bw": int(stats.bandwidth) >> 10,
        "iops": stats.iops,
        "runtime": round(stats.elapsed_ns / 1e6),
        "total_ios": stats.ios,
        "slat_ns": _times(stats.submission),
        "clat_ns": _times(stats.completion, has_percentiles=True),
        "lat_ns": _times(stats.total),
        "bw_min": int(rates.min() if len(rates) else 0),
        "bw_max": int(rates.max(initial=0)),
        "bw_agg": 100.0 if len(rates) else 0.0,
        "bw_mean": _mean(rates),
        "bw_dev": _stdev(rates),
        "bw_samples": len(rates),
        "iops_min": int(iops.min() if len(iops) else 0),
        "iops_max": int(iops.max(initial=0)),
        "iops_mean": _mean(iops),
        "iops_stddev": _stdev(iops),
        "iops_samples": len(iops),
    }


def _mean(samples: NDArray[np.float64]) -> float:
    return float(samples.mean()) if len(samples) else 0.0


def _stdev(samples: NDArray[np.float64]) -> float:
    return float(samples.std(ddof=1)) if len(samples) > 1 else 0.0


def _times(times: Latencies, *, has_percentiles: bool = False) -> Table:
    table: Table = {"min": times.min_ns, "max": times.max_ns, "mean": times.mean_ns, "stddev": times.stdev_ns, "N": times.count}
    if has_percentiles and times.count:
        table["percentile"] = {f"{percent:.6f}": value for percent, value in times.percentiles().items()}
    return table


def _shares(times: Latencies, unit_ns: int, from_ns: int, *more_ns: int) -> dict[str, float]:
    """Percent of the blocks up to each bound and above the one before it."""
    bounds = [bound * unit_ns for bound in _BOUNDS if bound * unit_ns > from_ns] + list(more_ns)
    shares, low = {}, from_ns
    for bound in bounds:
        within = (MIDDLES > low) & (MIDDLES <= bound) if low else MIDDLES <= bound
        shares[str(bound // unit_ns)] = 100 * int(times.histogram[within].sum()) / max(times.count, 1)
        low = bound
    if more_ns:
        shares[f">={low // unit_ns}"] = 100 * int(times.histogram[low < MIDDLES].sum()) / max(times.count, 1)
    return shares
