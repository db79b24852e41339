"""Removing a run's files from its NVMe paths, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.sizes import format_bytes
from infinity.storage.probe import HOME
from infinity.storage.rundir import discard, run_files


def clean_run(target: Path, settings: Sequence[str], confirm: Callable[[str], bool]) -> str:
    """Remove a run from every path, once `confirm` says yes to the question; returns what was done.

    `target` is a configuration, or one run's directory PATH/infinity/RUN. Raises ConfigError where it is neither,
    LockError while a job uses the run.
    """
    paths, run = _run_directory(target) if target.is_dir() else _configured(target, settings)
    files = run_files(paths, run)
    where = ", ".join(map(str, paths))
    if not files.files:
        return f"run {run!r} has no files in {where}: nothing to remove."
    if not confirm(f"Remove {len(files.files)} files ({format_bytes(files.nbytes)}) of run {run!r} in {where}?"):
        return "nothing was removed."
    removed = discard(paths, run)
    return f"removed {len(removed.files)} files, {format_bytes(removed.nbytes)}."


def _configured(target: Path, settings: Sequence[str]) -> tuple[list[Path], str]:
    config = load_config(target, settings)
    if not config.nvme.paths:
        raise ConfigError(f"{target}: names no nvme.paths, so there is nothing to remove.")
    return [Path(entry.path) for entry in config.nvme.paths], config.store.run


def _run_directory(target: Path) -> tuple[list[Path], str]:
    folder = target.resolve()
    if folder.parent.name != HOME:
        raise ConfigError(f"{target} is not the directory of a run, PATH/{HOME}/RUN: nothing was removed.")
    return [folder.parent.parent], folder.name
