"""When figures cannot be a disk's, or are not what was asked for: one sentence for each reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil

from infinity.sizes import format_bytes
from infinity.storage.probe import facts
from infinity.workload.clone import CloneResult
from infinity.workload.memory import HUGE_PAGE_BYTES

SHORT_S = 3.0
"""Drives and their caches take seconds to settle."""


def doubts(results: Sequence[CloneResult]) -> list[str]:
    """What a reader of the report must know, each said once."""
    said: dict[str, None] = {}
    for result in results:
        said.update(dict.fromkeys(_of_files(result)))
        said.update(dict.fromkeys(_of_run(result)))
    return list(said)


def _of_files(result: CloneResult) -> Iterator[str]:
    job, cache_bytes = result.job, psutil.virtual_memory().total
    for place in result.places:
        target = place.target
        if not target.is_device and (found := facts(target.path.parent)).warning:
            yield found.warning
        if not job.direct and place.nbytes < cache_bytes:
            size, memory = format_bytes(place.nbytes), format_bytes(cache_bytes)
            yield f"{target.path} has {size}, the page cache may take {memory}: without direct=1 this measures memory, not a disk"
        if target.is_fresh and job.writes:
            yield f"{target.path} was new or too small: these writes extend it, which costs the file system extra. Run again to overwrite it"


def _of_run(result: CloneResult) -> Iterator[str]:
    job, seconds = result.job, result.elapsed_ns / 1e9
    if seconds < SHORT_S:
        yield f"job {job.name} ran for {seconds:.2f} s: too short for a drive to settle. Give --time_based --runtime=30, or a larger size"
    if job.iodepth > job.depth:
        yield f"job {job.name}: iodepth={job.iodepth} has no effect on ioengine=psync, which moves one block at a time: give --ioengine=libaio"
    if job.iomem == "mmaphuge" and result.page_bytes < HUGE_PAGE_BYTES:
        yield f"job {job.name}: the kernel gave pages of {result.page_bytes} bytes for iomem=mmaphuge: are transparent huge pages switched off?"
