"""Which setting the measurements support."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.tune.setting import DEFAULT, Setting
from infinity.tune.sweep import Measured

TOLERANCE = 0.02
"""A cheaper setting may be slower than the best by this share."""

MOST_SPREAD = 0.25
"""Rounds that lie further apart than this support nothing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is recommended and why; `setting` is None where the measurements support nothing."""

    setting: Setting | None
    best: Setting
    spread: float
    """Of the settings within TOLERANCE of the best: the median of how far their rounds lie apart, as a share."""
    reason: str
    """A sentence for people."""


def choose(measured: Sequence[Measured], default: Setting = DEFAULT) -> Choice:
    """The cheapest setting within TOLERANCE of the best over all paths, which share one setting.

    Where the rounds spread wider than TOLERANCE, a difference counts only beyond the spread: the default stays unless the best beats it by
    more. Where they spread wider than MOST_SPREAD there is no recommendation.
    """
    scores = {setting: statistics.geometric_mean(path.score(setting) for path in measured) for setting in measured[0].settings()}
    best = max(scores, key=lambda setting: scores[setting])
    near = [setting for setting, score in scores.items() if score >= (1 - TOLERANCE) * scores[best]]
    spread = statistics.median(max(path.spread(setting) for path in measured) for setting in near)
    cheapest = min(near, key=lambda setting: setting.cost)
    if spread > MOST_SPREAD:
        found = f"rounds of one setting lie {spread:.0%} apart, more than {MOST_SPREAD:.0%}: nothing is recommended"
        return Choice(None, best, spread, f"{found}. Let nothing else use the drives, or raise --rounds and --runtime")
    if spread > TOLERANCE and scores.get(default, 0.0) >= (1 - spread) * scores[best]:
        return Choice(default, best, spread, f"rounds of one setting lie {spread:.1%} apart, and the best is no further from the default: it stays")
    return Choice(cheapest, best, spread, f"the cheapest within {TOLERANCE:.0%} of the best; rounds of one setting lie {spread:.1%} apart")
