"""The trace: in which order a step asks for units. A hint for fetching ahead, never a promise."""

from __future__ import annotations

import logging

logger = logging.getLogger("infinity")

LIMIT = 1 << 16
"""Visits remembered of one pass; a longer one is learned up to here."""


class Trace:
    """Learns the order of unit visits from one pass and predicts the next ones, starting over where the order ends.

    A pass is what lies between two `restart()`s (a training step); loops without restarts (evaluation, generation) are learned when
    they have run twice. A visit out of order is counted, and the position moves to that unit's next place in the order.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._position = 0
        self._pass: list[int] = []
        self._is_clean = True
        self._period, self._repeats = 0, 0
        self._last_seen: dict[int, int] = {}
        self._passes = 0
        self._has_warned = False
        self.mismatches = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The learned order; empty before the first pass is over."""
        return tuple(self._order)

    @property
    def position(self) -> int:
        """Index into `order` of the visit that is expected next."""
        return self._position

    def first(self, n: int) -> list[int]:
        """The first `n` distinct units of a pass."""
        return self._distinct(0, n, skip=None)

    def visit(self, unit: int, n: int) -> list[int]:
        """`unit` is used now. Returns up to `n` distinct units that are expected next, `unit` itself left out."""
        self._pass.append(unit)
        if self._order:
            self._follow(unit)
        self._watch_for_loop(unit)
        if len(self._pass) > LIMIT:
            self._learn(self._pass[:LIMIT], 0)
        return self._distinct(self._position, n, skip=unit)

    def next_after(self, position: int, n: int) -> list[int]:
        """Up to `n` distinct units expected from `position` of the order on."""
        return self._distinct(position, n, skip=None)

    def restart(self) -> None:
        """A pass is over: the next visit is the first of a new one."""
        self._passes += 1
        if self._pass and not self._is_clean and self._passes > 2:
            self._warn()
        is_part = self._is_clean and len(self._pass) <= len(self._order)
        self._learn(self._order if is_part else self._pass, 0)

    def _follow(self, unit: int) -> None:
        if self._order[self._position] != unit:
            self.mismatches += 1
            self._is_clean = False
            ahead = self._find(unit)
            if ahead is None:
                return
            self._position = ahead
        self._position += 1
        if self._position == len(self._order):
            self._position = 0
            if self._is_clean:
                self._pass.clear()
                self._forget_loop()

    def _find(self, unit: int) -> int | None:
        """Where `unit` comes next in the order, looking ahead first and from the start after that."""
        for run in (range(self._position, len(self._order)), range(self._position)):
            for index in run:
                if self._order[index] == unit:
                    return index
        return None

    def _watch_for_loop(self, unit: int) -> None:
        """Count how long the pass has repeated itself at the distance `_period`; a whole period repeated is an order."""
        here = len(self._pass) - 1
        if here < 0:
            return
        if self._period and here >= self._period and self._pass[here - self._period] == unit:
            self._repeats += 1
        else:
            self._period = here - self._last_seen.get(unit, here)
            self._repeats = 1 if self._period else 0
        self._last_seen[unit] = here
        if self._period > 1 and self._repeats == self._period and not (self._order and self._is_clean):
            self._learn(self._pass[-self._period :], 0)

    def _learn(self, order: list[int], position: int) -> None:
        self._order = list(order)
        self._position = position
        self._pass = []
        self._is_clean = True
        self._forget_loop()

    def _forget_loop(self) -> None:
        self._period, self._repeats = 0, 0
        self._last_seen.clear()

    def _distinct(self, position: int, n: int, skip: int | None) -> list[int]:
        found: list[int] = []
        for step in range(len(self._order)):
            if len(found) >= n:
                break
            unit = self._order[(position + step) % len(self._order)]
            if unit != skip and unit not in found:
                found.append(unit)
        return found

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the order in which the model uses its units changes from step to step: %d visits so far were out of order and fetched on demand",
                self.mismatches,
            )
