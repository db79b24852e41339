"""Trials of every setting on every path: in an order drawn anew for each round, so that a drive that changes its mood spoils none of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from infinity.kinds import Lane
from infinity.tune.ground import Ground
from infinity.tune.setting import Setting


class Mode(StrEnum):
    """What training does to a drive: forward and backward read, gradients are written, the update does both at once."""

    READ = "read"
    WRITE = "write"
    MIX = "mix"

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return {Mode.READ: (Lane.NVME_READ,), Mode.WRITE: (Lane.NVME_WRITE,), Mode.MIX: (Lane.NVME_READ, Lane.NVME_WRITE)}[self]


@dataclass(slots=True)
class Measured:
    """Rates of one path in bytes per second, by setting and mode, one for each round."""

    path: Path
    rates: dict[tuple[Setting, Mode], list[float]] = field(default_factory=dict)

    def rate(self, setting: Setting, mode: Mode) -> float:
        """The median over the rounds."""
        return statistics.median(self.rates[setting, mode])

    def score(self, setting: Setting) -> float:
        """One number for a setting: the geometric mean of its rates over the modes, bytes per second."""
        return statistics.geometric_mean(self.rate(setting, mode) for mode in Mode)

    def spread(self, setting: Setting) -> float:
        """How far the rounds lie apart: (largest - smallest) / median of the setting's score."""
        scores = [statistics.geometric_mean(round_) for round_ in zip(*(self.rates[setting, mode] for mode in Mode), strict=True)]
        return (max(scores) - min(scores)) / statistics.median(scores)

    def settings(self) -> Iterator[Setting]:
        """Each once, in the order of the grid."""
        return iter(sorted({setting for setting, _ in self.rates}))


def sweep(
    paths: Sequence[Path],
    settings: Sequence[Setting],
    *,
    nbytes: int,
    seconds: float,
    rounds: int,
    seed: int = 0,
    watch: Callable[[int, int, str], bool] = lambda done, total, what: True,
) -> list[Measured]:
    """Measure every setting in every mode on every path, `rounds` times for `seconds` each, path by path.

    `watch` gets (trials done, trials in all, what comes) before each trial; its False ends the sweep with KeyboardInterrupt.
    Raises ConfigError and StorageError; the files of the trials are gone either way.
    """
    order = random.Random(seed)
    total, done = len(paths) * rounds * len(settings) * len(Mode), 0
    found = []
    with ExitStack() as open_grounds:
        grounds = []
        for path in paths:
            if not watch(done, total, f"laying out {path}"):
                raise KeyboardInterrupt
            grounds.append(open_grounds.enter_context(Ground(path, nbytes)))
        for ground in grounds:
            found.append(measured := Measured(ground.path, {(setting, mode): [] for setting in settings for mode in Mode}))
            for _ in range(rounds):
                for setting, mode in _shuffled(measured.rates, order):
                    if not watch(done, total, f"{ground.path} {mode} {setting.block_bytes >> 10} KiB x {setting.depth} x {setting.workers}"):
                        raise KeyboardInterrupt
                    measured.rates[setting, mode].append(ground.rate(setting, mode.lanes, seconds))
                    done += 1
    return found


def _shuffled(trials: Mapping[tuple[Setting, Mode], object], order: random.Random) -> list[tuple[Setting, Mode]]:
    drawn = list(trials)
    order.shuffle(drawn)
    return drawn
