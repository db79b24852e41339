"""The trace: in which order a step asks for units. A hint for fetching ahead, never a promise."""

from __future__ import annotations

import logging
from bisect import bisect_left

logger = logging.getLogger("infinity")

LIMIT = 1 << 14
"""Visits remembered of one pass; a longer one is learned up to here."""

_FIRST_PASSES = 2
"""Passes that may differ from each other without a warning: the first, and the first after a change such as the end of an evaluation."""


class Trace:
    """Learns the order of unit visits from one pass and predicts the next ones, starting over where the order ends.

    A pass is what lies between two `restart()`s, a training step. Inside a pass that is not known yet, a sequence that comes twice in a
    row is taken for a loop (evaluation, generation) and gives the hints until the pass is over. A visit out of order is counted, and the
    position moves to that unit's next place in the order.
    """

    def __init__(self) -> None:
        self._learned: list[int] = []
        self._order: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._hints: dict[tuple[int, int, int | None], list[int]] = {}
        """Answers given for this order, by position, how many and which not: the same are asked for in every step."""
        self._position = 0
        self._pass: list[int] = []
        self._is_clean = True
        self._loop = _Loop()
        self._passes = 0
        self._has_warned = False
        self.mismatches = 0

    @property
    def order(self) -> tuple[int, ...]:
        """What the hints come from: the learned order, or a loop within a pass; empty before either is known."""
        return tuple(self._order)

    @property
    def position(self) -> int:
        """Index into `order` of the visit that is expected next."""
        return self._position

    def first(self, n: int) -> list[int]:
        """The first `n` distinct units of a pass."""
        return self.next_after(0, n)

    def visit(self, unit: int, n: int) -> list[int]:
        """`unit` is used now. Returns up to `n` distinct units that are expected next, `unit` itself left out."""
        self._pass.append(unit)
        if self._order:
            self._follow(unit)
        if not (self._learned and self._is_clean):
            loop = self._loop.period_after(unit)
            if loop and self._pass[-loop:] != self._order:
                self._hint_from(self._pass[-loop:])
        if len(self._pass) > LIMIT:
            self._forget()
        return self._distinct(self._position, n, skip=unit)

    def next_after(self, position: int, n: int) -> list[int]:
        """Up to `n` distinct units expected from `position` of the order on."""
        return self._distinct(position, n, skip=None)

    def restart(self) -> None:
        """A pass is over: the next visit is the first of a new one."""
        self._passes += 1
        if self._learned and self._is_clean and len(self._pass) <= len(self._learned):
            self._learn(self._learned)
            return
        if self._pass and self._passes > _FIRST_PASSES:
            self._warn()
        self._learn(self._pass or self._learned)

    def _follow(self, unit: int) -> None:
        if self._order[self._position] != unit:
            if self._order is self._learned:  # a loop was only a guess
                self.mismatches += 1
                self._is_clean = False
            ahead = self._find(unit)
            if ahead is None:
                return
            self._position = ahead
        self._position = (self._position + 1) % len(self._order)
        if self._position == 0:
            if self._is_clean and self._order is self._learned:  # the pass so far is the order, over and over
                self._pass.clear()

    def _find(self, unit: int) -> int | None:
        """Where `unit` comes next in the order, looking ahead first and from the start after that."""
        places = self._places.get(unit)
        if places is None:
            return None
        ahead = bisect_left(places, self._position)
        return places[ahead] if ahead < len(places) else places[0]

    def _learn(self, order: list[int]) -> None:
        self._learned = list(order)
        self._hint_from(self._learned)
        self._pass = []
        self._is_clean = True
        self._loop = _Loop()

    def _forget(self) -> None:
        """The pass has no end: what was seen of it is the order, unless a loop gives better hints."""
        if self._order:
            self._pass, self._loop, self._is_clean = [], _Loop(), False
        else:
            self._learn(self._pass)

    def _hint_from(self, order: list[int]) -> None:
        if order != self._order:
            places: dict[int, list[int]] = {}
            for place, unit in enumerate(order):
                places.setdefault(unit, []).append(place)
            self._places, self._hints = places, {}
        self._order, self._position = order, 0

    def _distinct(self, position: int, n: int, skip: int | None) -> list[int]:
        key = position, n, skip
        if key not in self._hints:
            self._hints[key] = self._search(position, n, skip)
        return self._hints[key]

    def _search(self, position: int, n: int, skip: int | None) -> list[int]:
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


class _Loop:
    """Watches for a sequence that comes twice in a row: how long the visits have repeated those of one distance before."""

    def __init__(self) -> None:
        self._visits: list[int] = []
        self._last: dict[int, int] = {}
        self._distance = 0
        self._repeated = 0

    def period_after(self, unit: int) -> int:
        """The length of the loop that is complete with this visit, 0 for none."""
        here = len(self._visits)
        self._visits.append(unit)
        if self._distance and self._visits[here - self._distance] == unit:
            self._repeated += 1
        else:
            self._distance = here - self._last.get(unit, here)
            self._repeated = int(self._distance > 0)
        self._last[unit] = here
        return self._distance if self._distance > 1 and self._repeated and self._repeated % self._distance == 0 else 0
