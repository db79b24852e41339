"""The drives' part of training, without the rest: the files, requests and order of a run that is planned, and nothing computed."""

from infinity.replay.measured import PathMoved, Phase, PhaseMoved, StepMoved
from infinity.replay.replay import Progress, Replay
from infinity.replay.scratch import remove_leftovers

__all__ = ["PathMoved", "Phase", "PhaseMoved", "Progress", "Replay", "StepMoved", "remove_leftovers"]
