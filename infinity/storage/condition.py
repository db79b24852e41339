"""A condition variable that Ctrl-C never leaves locked."""

from __future__ import annotations

import threading


class Condition(threading.Condition):
    """Take it as `with condition.lock`, which is one step in C: between the steps of `with condition` Python looks for signals, and then it
    would stay locked for good."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)
