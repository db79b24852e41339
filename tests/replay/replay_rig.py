"""Configurations of tiny models whose paths' rates are known, and a log of what a store is asked for."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import engines
import pytest
from models import tiny_gpt

from infinity.config import load_config
from infinity.preparation import aio_options, preview
from infinity.replay import Replay
from infinity.storage.store import Store


def with_rates(*paths, **keys):
    """nvme.paths that nobody measures, so that nothing is kept below them."""
    return {"paths": [{"path": str(path), "read_rate": 2e9, "write_rate": 1e9, "weight": at + 1.0, **keys} for at, path in enumerate(paths)]}


def configured(*paths, placement=engines.NVME, **sections):
    """The checked configuration of small chunks on these paths."""
    sections = {"nvme": with_rates(*paths), "prefetch": {"units": 1}, **sections}
    return load_config(engines.settings(paths[0], placement, **sections))


def opened(config, build=tiny_gpt, **keys):
    """(what the run would be, its replay)."""
    found = preview(build, config)
    return found, Replay(found, aio_options(config), **keys)


def tree(path):
    """Everything below a path: names with bytes and times of files."""
    entries = sorted(Path(path).rglob("*"))
    return {str(entry): (entry.read_bytes(), entry.stat().st_mtime_ns) if entry.is_file() else None for entry in entries}


@contextmanager
def logged():
    """(operation, chunk) for each request that a store gets meanwhile."""
    log, patch = [], pytest.MonkeyPatch()
    for name in ("fetch", "write_back"):
        patch.setattr(Store, name, _logging(getattr(Store, name), name, log))
    try:
        yield log
    finally:
        patch.undo()


def _logging(real, name, log):
    def call(self, key, buffer):
        log.append((name, key))
        return real(self, key, buffer)

    return call


def replay_and_die(path, phase):
    """The life of a replay that is killed in the middle of a phase."""
    _, replay = opened(configured(path))
    replay.lay_out()
    setattr(replay, f"_run_{phase}", lambda beat: os.kill(os.getpid(), signal.SIGKILL))
    replay.step("step 1")
