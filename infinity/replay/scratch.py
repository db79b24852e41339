"""The run whose files a replay reads and writes: a name that no training run has, removed at the end, found again where that never came."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.errors import LockError
from infinity.sizes import format_bytes
from infinity.storage.manifest import manifest_name
from infinity.storage.probe import HOME
from infinity.storage.rundir import discard, run_directory

_SCRATCH = re.compile(r"replay-[0-9a-f]{32}")


def new_run(paths: Sequence[Path]) -> str:
    """The name of a run that is on none of `paths`."""
    while True:
        run = f"replay-{uuid.uuid4().hex}"
        if not any(run_directory(path, run).exists() for path in paths):
            return run


def remove_run(paths: Sequence[Path], run: str) -> None:
    """Its files, its directories, and PATH/infinity where nothing else is in it."""
    discard(paths, run)
    for path in paths:
        with contextlib.suppress(OSError):  # somebody's run, or measured rates, are there
            (path / HOME).rmdir()


def remove_leftovers(paths: Sequence[Path]) -> list[str]:
    """Remove what replays that were killed have left; one sentence for each. Those that live hold their lock and are left alone.

    A run with a manifest is a training run, whatever its name: a replay publishes nothing.
    """
    said = []
    for path in paths:
        for directory in _scratch_directories(path):
            try:
                removed = discard([path], directory.name)
            except LockError:
                continue
            except OSError as error:
                said.append(f"{directory} is what a killed replay left, and cannot be removed: {error.strerror}")
                continue
            said.append(f"removed {directory} ({format_bytes(removed.nbytes)}), which a killed replay had left")
    return said


def _scratch_directories(path: Path) -> Iterator[Path]:
    for directory in sorted((path / HOME).glob("replay-*")):
        if _SCRATCH.fullmatch(directory.name) and directory.is_dir() and not (directory / manifest_name(0)).exists():
            yield directory
