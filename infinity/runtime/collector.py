"""Python's cycle collector waits while a forward is launched: it would stop the launching thread for milliseconds, several times each."""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_pausing: set[int] = set()
"""The collector is the process's: who has it paused now, by the ids of their `Collector`."""
_was_enabled = False


class Collector:
    """One engine's pauses. The last of all engines to resume gives the collector back as the first one found it."""

    def pause(self) -> None:
        """From here on nothing is collected. Once is as good as twice."""
        global _was_enabled
        with _lock:
            if not _pausing:
                _was_enabled = gc.isenabled()
                gc.disable()
            _pausing.add(id(self))

    def resume(self) -> None:
        """The end of what `pause` began, if it did."""
        with _lock:
            if id(self) in _pausing:
                _pausing.discard(id(self))
                if not _pausing and _was_enabled:
                    gc.enable()

    def __del__(self) -> None:
        """An engine that is dropped in the middle of a forward keeps nothing back."""
        self.resume()
