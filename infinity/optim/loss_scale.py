"""Dynamic loss scaling for fp16, by the rule of torch.amp.GradScaler."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from infinity.errors import TraceError


class LossScaleState(TypedDict):
    """What a run resumes with."""

    scale: float
    good_steps: int


class LossScale:
    """Multiplies the loss, so that small fp16 gradients do not vanish; the optimizer divides it out again.

    The rule (Micikevicius et al. 2018, section 3.2; torch.amp.GradScaler): after `growth_interval` steps in a row with finite
    gradients the scale grows by `growth`; a step with a non-finite gradient is skipped and the scale shrinks by `backoff`.
    """

    def __init__(self, *, initial: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, growth_interval: int = 2000) -> None:
        self._scale = initial
        self._growth = growth
        self._backoff = backoff
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._is_scaled = False

    @property
    def value(self) -> float:
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward()` on, in fp32: a scale of 65536 does not fit into fp16."""
        self._is_scaled = True
        return loss.float() * self._scale

    def grad_scale(self) -> float:
        """What turns the gradients at hand into the true ones. Raises TraceError if their backward was not scaled."""
        if not self._is_scaled:
            raise TraceError(
                "optimizer.step() after a backward whose loss was not scaled: fp16 gradients below 6e-8 vanish. "
                "Call engine.scale(loss).backward(), or train in bf16 (precision.dtype), which needs no scaling."
            )
        return 1.0 / self._scale

    def update(self, norm: float) -> None:
        """A step was taken (finite `norm`) or skipped: the next backward has to be scaled anew."""
        self._is_scaled = False
        if not math.isfinite(norm):
            self._scale *= self._backoff
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._grow()

    def state_dict(self) -> LossScaleState:
        return LossScaleState(scale=self._scale, good_steps=self._good_steps)

    def load_state_dict(self, state: LossScaleState) -> None:
        self._scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])

    def _grow(self) -> None:
        grown = self._scale * self._growth
        self._good_steps = 0
        if grown <= torch.finfo(torch.float32).max:
            self._scale = grown
