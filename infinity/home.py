"""The process that made something: a forked child has neither its threads nor its memory for direct I/O, and to touch those is to crash."""

from __future__ import annotations

import os

from infinity.errors import TraceError


class Home:
    """The process in which this was constructed."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process, and not a child that was forked from it."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise TraceError anywhere else."""
        if not self.is_here():
            raise TraceError(
                f"the engine was used in process {os.getpid()}, forked from {self._process}, where its values and threads have stayed. "
                "Use it in the process that called infinity.initialize; data loader workers may do anything else"
            )
