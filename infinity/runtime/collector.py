"""Python's cycle collector waits while compute is launched: it would stop the launching thread for milliseconds, several times per forward."""

from __future__ import annotations

import gc


class Collector:
    """Pauses the collector, and gives it back as it was."""

    def __init__(self) -> None:
        self._is_paused = self._was_enabled = False

    def pause(self) -> None:
        """From here on nothing is collected. When it is paused already (no backward came), what is young is collected first."""
        if self._is_paused:
            gc.collect(0)
            return
        self._is_paused, self._was_enabled = True, gc.isenabled()
        gc.disable()

    def resume(self) -> None:
        """Whoever had it disabled finds it disabled."""
        if self._is_paused:
            self._is_paused = False
            if self._was_enabled:
                gc.enable()
