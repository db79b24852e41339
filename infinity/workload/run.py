"""Runs jobs: one thread and one I/O engine for each clone, group after group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from infinity.native import READ, WRITE
from infinity.workload.clone import Clone, CloneResult
from infinity.workload.hop import device_of
from infinity.workload.job import Job
from infinity.workload.jobfile import JobText
from infinity.workload.layout import Layout, Place, Target

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """Where all clones of a group are, for a line on a terminal."""

    jobs: int
    elapsed_s: float
    total_s: float
    """0 where bytes decide."""
    read_bytes: int
    write_bytes: int
    ios: int
    share: float
    """0 to 1."""


def run_jobs(
    groups: Sequence[Sequence[JobText]],
    *,
    destroy_data: bool = False,
    say: Callable[[str], None] = lambda line: None,
    watch: Callable[[Progress], bool] = lambda progress: True,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[CloneResult]:
    """Run groups one after the other, the jobs of a group together, and settle the files. Results are in the order of the jobs.

    `say` gets lines for people; `watch` is called several times a second, and its False ends the run early, with results. When `is_wanted`
    turns False while files are laid out, KeyboardInterrupt is raised.
    Raises ConfigError before anything is touched, StorageError for I/O that fails; then the files that this run made are removed.
    """
    checked = [[(text, text.job()) for text in texts] for texts in groups]
    for _, job in chain.from_iterable(checked):
        device_of(job)
    with Layout(destroy_data=destroy_data, say=say, is_wanted=is_wanted) as layout:
        plan = [
            [(text, job, clone, group, layout.add(job, clone)) for text, job in jobs for clone in range(job.numjobs)]
            for group, jobs in enumerate(checked)
        ]
        layout.prepare()
        results: list[CloneResult] = []
        for members in plan:
            done, goes_on = _run_group(members, watch)
            results += done
            if not goes_on:
                break
        layout.finish(_covered(results))
    return results


_Member = tuple[JobText, Job, int, int, tuple[Place, ...]]


def _run_group(members: Sequence[_Member], watch: Callable[[Progress], bool]) -> tuple[list[CloneResult], bool]:
    stop = threading.Event()
    clones: list[Clone] = []
    try:
        for text, job, index, group, places in members:
            clones.append(Clone(text, job, index, group, places, stop))
        goes_on = _run_threads(clones, stop, watch)
        return [clone.result for clone in clones], goes_on
    finally:
        stop.set()
        for clone in clones:
            clone.close()


def _run_threads(clones: Sequence[Clone], stop: threading.Event, watch: Callable[[Progress], bool]) -> bool:
    """False when whoever watches ended it."""
    failures: list[BaseException] = []
    gate = threading.Event()

    def work(clone: Clone) -> None:
        gate.wait()
        try:
            clone.run()
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(clone,), name=f"io-{clone.job.name}") for clone in clones]
    goes_on = True
    begin_s = time.monotonic()
    try:
        for thread in threads:
            thread.start()
        gate.set()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                if thread.is_alive():
                    thread.join(_POLL_S)
                    break
            if goes_on and not watch(_progress(clones, time.monotonic() - begin_s)):
                goes_on = False
                stop.set()
    finally:
        stop.set()
        gate.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
    return goes_on


def _progress(clones: Sequence[Clone], elapsed_s: float) -> Progress:
    total_s = max(clone.job.ramp_time + clone.job.runtime for clone in clones)
    wanted = sum(place.nbytes for clone in clones for place in clone.result.places)
    sums = {direction: sum(clone.result.moved[direction] for clone in clones) for direction in (READ, WRITE)}
    share = elapsed_s / total_s if total_s and any(clone.job.time_based for clone in clones) else sum(sums.values()) / max(wanted, 1)
    return Progress(
        jobs=len(clones),
        elapsed_s=elapsed_s,
        total_s=total_s,
        read_bytes=sums[READ],
        write_bytes=sums[WRITE],
        ios=sum(clone.result.blocks for clone in clones),
        share=min(share, 1.0),
    )


def _covered(results: Sequence[CloneResult]) -> list[Target]:
    """Targets that some job wrote from end to end."""
    return [
        place.target
        for result in results
        if result.is_covered and result.job.writes and not result.job.reads
        for place in result.places
        if place.nbytes >= max(place.target.nbytes, place.target.has_bytes)
    ]
