"""What belongs to a run beside parameters and moments: groups, step counts, loss scale, random number generators, buffers, registered objects."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinity.checkpoint.values import encode
from infinity.errors import CheckpointError
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import TieredAdamW


class Stateful(Protocol):
    """A scheduler, a loader, anything that can be put back where it was."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class RunState:
    """Captures and restores it all, as plain values and tensors."""

    def __init__(self, model: nn.Module, optimizer: TieredAdamW, loss_scale: LossScale | None, device: torch.device, rank: int) -> None:
        self._model, self._optimizer, self._loss_scale, self._device, self._rank = model, optimizer, loss_scale, device, rank
        self._registered: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        """States of objects that a resumed run had registered and that this process has not registered yet."""
        self._resumed: tuple[int, list[dict[str, Any]]] = (-1, [])
        """The step that was restored, and its groups."""
        self.global_step = 0

    def register(self, objects: Mapping[str, Stateful]) -> None:
        """Objects saved and restored with the run. One that the resumed state knows is restored at once.

        Raises CheckpointError for one whose state could not be saved: at the end of the run it would be too late.
        """
        for name, entry in objects.items():
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                raise CheckpointError(f"engine.register({name}=...): a {type(entry).__name__} has no state_dict and load_state_dict")
            try:
                encode(entry.state_dict(), lambda tensor, path: None)
            except CheckpointError as error:
                raise CheckpointError(f"engine.register({name}=...): its state cannot be saved: {error}") from error
            if name in self._registered:
                raise CheckpointError(f"engine.register({name}=...): the name is taken; register each object once, under its own name")
            self._registered[name] = entry
            if name in self._unclaimed:
                entry.load_state_dict(self._unclaimed.pop(name))
                self._restore_groups_again()

    def capture(self) -> dict[str, object]:
        """Everything as it is between two steps. Tensors are copies on the CPU."""
        return {
            "rank": self._rank,
            "global_step": self.global_step,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups],
            "group_names": self._optimizer.group_names(),
            "step_counts": self._optimizer.step_counts(),
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale else None,
            "rng": self._capture_rng(),
            "buffers": {name: buffer.detach().to("cpu", copy=True) for name, buffer in self._model.named_buffers()},
            "registered": {name: entry.state_dict() for name, entry in self._registered.items()},
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError naming what of a captured state does not fit."""
        check_fits(state, self._optimizer.group_names(), dict(self._model.named_buffers()))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `capture` gave; generators only where they are this rank's: two ranks must not draw the same numbers.

        Raises CheckpointError, before anything is changed, naming what does not fit.
        """
        self.check(state)
        self._resumed = int(state["global_step"]), state["groups"]
        self._restore_groups(state["groups"])
        self._optimizer.load_step_counts(state["step_counts"])
        if self._loss_scale and state["loss_scale"]:
            self._loss_scale.load_state_dict(state["loss_scale"])
        self._restore_buffers(state["buffers"])
        for name, saved in state["registered"].items():
            if name in self._registered:
                self._registered[name].load_state_dict(saved)
            else:
                self._unclaimed[name] = saved
        self.global_step = int(state["global_step"])
        if state.get("rank", 0) == self._rank:
            self._restore_rng(state["rng"])

    def _capture_rng(self) -> dict[str, object]:
        rng: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            rng["numpy"] = sys.modules["numpy"].random.get_state()
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return rng

    def _restore_rng(self, rng: Mapping[str, Any]) -> None:
        version, internal, gauss = rng["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(rng["torch"])
        if "numpy" in rng and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(rng["numpy"])
        if "cuda" in rng and self._device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self._device)

    def _restore_groups(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(saved)

    def _restore_groups_again(self) -> None:
        """A scheduler that was made after the run was restored has written its own first learning rate into the groups."""
        step, groups = self._resumed
        if step == self.global_step:
            self._restore_groups(groups)

    def _restore_buffers(self, saved: Mapping[str, Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(saved[name])


def check_fits(state: Mapping[str, Any], group_names: list[list[str]], buffers: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when a captured state is of other parameter groups or of other buffers than these."""
    saved_names: list[list[str]] = state["group_names"]
    if len(saved_names) != len(group_names):
        raise CheckpointError(
            f"the saved run has {len(saved_names)} parameter groups, this one has {len(group_names)}: build param_groups the same way"
        )
    for index, (saved, mine) in enumerate(zip(saved_names, group_names, strict=True)):
        if set(saved) != set(mine):
            moved = sorted(set(saved) ^ set(mine))
            raise CheckpointError(f"param_groups[{index}] holds other parameters than in the saved run, first {moved[0]!r}: build it the same way")
    theirs: Mapping[str, Tensor] = state["buffers"]
    wrong = [name for name in {*buffers, *theirs} if name not in buffers or name not in theirs or buffers[name].shape != theirs[name].shape]
    if wrong:
        raise CheckpointError(f"buffers differ between the saved run and this model: {', '.join(sorted(wrong))}")
