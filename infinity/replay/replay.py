"""A planned run's files on its drives, and steps that read and write them as training would."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from infinity.kinds import Tier
from infinity.optim.pipeline import buffer_count
from infinity.preparation import Preview
from infinity.replay.fetches import Fetches
from infinity.replay.gradients import Gradients
from infinity.replay.measured import Phase, PhaseMoved, StepMoved, by_path
from infinity.replay.noise import noisy
from infinity.replay.order import backward_turns, forward_order
from infinity.replay.scratch import new_run, remove_run
from infinity.replay.update import Update
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.store import AioOptions, Pools, Store
from infinity.storage.work import Window
from infinity.timeline import Timeline

_WATCH_EVERY_S = 0.1
_TOUCHING_THREADS = 8
"""As many as an engine's pools have at most, where there are cores for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a part of the replay is."""

    what: str
    done_bytes: int
    total_bytes: int
    seconds: float
    """Since the part began."""


Watch = Callable[[Progress], None]


class Replay:
    """A store of a run of its own, with the plan's files. A life under `with`: `lay_out`, then `step` as often as one likes.

    What rests in memory moves over no drive and is not there at all; parameters for a GPU end in memory that is not pinned. Space is checked
    before any file is made, and the files are gone at the end, however that comes.
    Raises ConfigError for paths that cannot work, StorageError for I/O that fails and disks that are full.
    """

    def __init__(self, preview: Preview, aio: AioOptions, *, watch: Watch = lambda progress: None) -> None:
        """`watch` is told a few times a second how far the running part is."""
        self._units, self._plan, self._watch = preview.units, preview.plan, watch
        self._specs = [spec for spec in self._plan.specs if spec.tier is Tier.NVME]
        self._forward, self._backward = forward_order(self._units), backward_turns(self._units)
        paths = [path.path for path in preview.paths]
        requests = 2 * len(self._specs) + len(self._plan.specs)  # a parameter is read twice and written, states are read and written
        self._timeline = Timeline(max_spans=2 * requests)
        with ExitStack() as closers:
            run, threads = new_run(paths), min(_TOUCHING_THREADS, len(os.sched_getaffinity(0)))
            closers.callback(remove_run, paths, run)
            slabs = SlabPool(pin=False, threads=threads, limit_bytes=self._plan.working_bytes(Tier.CPU))
            closers.callback(slabs.close)
            copies = Copies(torch.device("cpu"), self._timeline)
            pools = Pools(pinned=slabs, plain=slabs)
            self._store = Store(paths=preview.paths, run=run, pools=pools, copies=copies, timeline=self._timeline, aio=aio)
            closers.callback(self._store.close)
            self._store.build(self._specs, [unit.name for unit in self._units])
            self._path_of = {str(spec.key): self._store.path(spec.key) for spec in self._specs}
            self._slabs = slabs
            self._fetches = Fetches(self._units, self._plan, self._store, slabs)
            closers.callback(self._fetches.close)
            self._gradients = Gradients(self._units, self._plan, self._store, slabs)
            closers.callback(self._gradients.close)
            self._update = Update(self._plan, self._store, slabs)
            closers.callback(self._update.close)
            self._closers = closers.pop_all()

    def lay_out(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Write every byte once, so that reads find what was written and writes overwrite. KeyboardInterrupt once it is not wanted any more."""
        beat = _Beat("laying out", sum(spec.nbytes for spec in self._specs), self._watch)
        noise = noisy(self._slabs)(max(spec.padded_nbytes for spec in self._specs))
        window = Window(buffer_count(len({*self._path_of.values()})))
        try:
            for spec in self._specs:
                if not is_wanted():
                    raise KeyboardInterrupt
                window.add(self._store.write_back(spec.key, noise))
                beat.moved(spec.nbytes)
        finally:
            window.drain()
        self._store.wait_for_writes()

    def step(self, name: str, is_wanted: Callable[[], bool] = lambda: True) -> StepMoved:
        """Forward, backward and update, each until its last request is over. Ends between them once it is not wanted any more."""
        phases: dict[Phase, PhaseMoved] = {}
        for phase, run in ((Phase.FORWARD, self._run_forward), (Phase.BACKWARD, self._run_backward), (Phase.UPDATE, self._run_update)):
            if is_wanted():
                phases[phase] = self._timed(run, _Beat(f"{name}, {phase}", self._phase_bytes(phase), self._watch))
        return StepMoved(phases)

    def close(self) -> None:
        """Wait for what is under way, remove the files."""
        self._closers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _timed(self, run: Callable[[_Beat], None], beat: _Beat) -> PhaseMoved:
        """A phase ends with its last write, so that each has figures of its own. Training begins the next one's reads beside those."""
        began_ns = time.monotonic_ns()
        run(beat)
        self._store.wait_for_writes()
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        return PhaseMoved(seconds=seconds, paths=by_path(self._timeline.spans(began_ns), self._path_of.__getitem__))

    def _run_forward(self, beat: _Beat) -> None:
        for unit in self._fetches.visit(self._forward):
            beat.moved(self._fetches.nbytes(unit))

    def _run_backward(self, beat: _Beat) -> None:
        turns = {turn.unit: turn for turn in self._backward}
        for unit in self._fetches.visit(list(turns)):
            beat.moved(self._fetches.nbytes(unit))
            for finished in turns[unit].finished:
                self._gradients.hand_down(finished)
                beat.moved(self._gradients.nbytes(finished))
        self._gradients.drain()

    def _run_update(self, beat: _Beat) -> None:
        self._update.run(beat.moved)

    def _phase_bytes(self, phase: Phase) -> int:
        """What a phase reads and writes."""
        fetched = sum(self._fetches.nbytes(unit) for unit in self._units)
        if phase is Phase.UPDATE:
            return self._update.nbytes
        return fetched + (sum(self._gradients.nbytes(unit) for unit in self._units) if phase is Phase.BACKWARD else 0)


class _Beat:
    """Counts what a part has moved, and says so now and then."""

    def __init__(self, what: str, total_bytes: int, watch: Watch) -> None:
        self._what, self._total_bytes, self._watch = what, total_bytes, watch
        self._done_bytes = 0
        self._began_s = self._said_s = time.monotonic()

    def moved(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        now_s = time.monotonic()
        if now_s - self._said_s >= _WATCH_EVERY_S:
            self._said_s = now_s
            self._watch(Progress(what=self._what, done_bytes=self._done_bytes, total_bytes=self._total_bytes, seconds=now_s - self._began_s))
