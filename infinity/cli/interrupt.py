"""Ctrl-C: the first asks the loop to stop after its step, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
"""Exit code of a run that was stopped: 128 + SIGINT, as shells have it."""

STDERR = 2

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested` and say what happens now; a second one exits without waiting for anything.

    `is_silent`: another process of the job says it.

    That leaves no damage: checkpoints get their name only when they are whole, and a store that was being written is
    not resumed.
    """

    def __init__(self, then: str = "stopping after this step", *, is_silent: bool = False) -> None:
        self._then, self._is_silent = then, is_silent
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._say("aborted.")
            os._exit(INTERRUPTED)
        self.requested = True
        self._say(f"{self._then}; once more aborts at once.")

    def _say(self, text: str) -> None:
        if not self._is_silent:
            os.write(STDERR, f"\n{text}\n".encode())  # a handler may interrupt a print: no buffers, no locks
