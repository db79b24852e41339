"""One line on a terminal for work that takes a while; elsewhere only what is said."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


class ProgressLine:
    """What runs, how far it is and its rate. Use it under `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
        # Refreshed by `show`: a thread of rich's own would be counted as an I/O thread.
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=1.0, rate="")

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False)

    def show(self, what: str, done: float, total: float, rate: str) -> None:
        """Where it is now: `done` of `total`."""
        self._bar.update(self._task, completed=done, total=total, description=what, rate=rate)
        self._bar.refresh()
