"""The HBM budget over everything that torch allocates: what the engine holds, and the activations beside it."""

from __future__ import annotations

import functools
import logging
import weakref

import torch

from infinity.sizes import MiB, format_bytes

logger = logging.getLogger("infinity")

SLACK_BYTES = 64 * MiB
"""Beside the budget: workspaces of cuBLAS, and what torch's allocator rounds up to."""

_limits: weakref.WeakSet[DeviceLimit] = weakref.WeakSet()
"""Those in force. torch keeps an observer for as long as the process lives, so one serves them all."""


class DeviceLimit:
    """From construction to `close()`, torch takes no more than the budget on a CUDA device, beside what the process had there before.

    torch gives cached memory back before it fails, and fails with torch.OutOfMemoryError, in the middle of the user's forward or backward,
    where nobody else can raise; so what the budget is made of is logged just before. `engine_bytes` of it are planned for the engine.
    """

    def __init__(self, device: torch.device, budget_bytes: int, engine_bytes: int) -> None:
        self.device, self.budget_bytes, self.engine_bytes = device, budget_bytes, engine_bytes
        self._before_bytes = torch.cuda.memory_reserved(device)
        _observe()
        _limits.add(self)
        _apply(device)

    @property
    def most_bytes(self) -> int:
        """What torch may take on the device in all."""
        return self._before_bytes + self.budget_bytes + SLACK_BYTES

    def describe(self, nbytes: int, reserved_bytes: int) -> str:
        """Why `nbytes` more do not fit into `reserved_bytes` that are taken already, and the ways out."""
        taken = reserved_bytes - self._before_bytes
        return (
            f"budgets.hbm = {format_bytes(self.budget_bytes)} is used up: {format_bytes(nbytes)} more were asked for, {format_bytes(taken)} are "
            f"taken. The engine holds up to {format_bytes(self.engine_bytes)}, the rest are activations and what torch keeps between "
            "allocations. Raise budgets.hbm; or raise budgets.activations, so that less rests there; or take smaller batches, or recompute "
            "activations (torch.utils.checkpoint)"
        )

    def close(self) -> None:
        """The whole device is the process's again, or what the limits of other engines leave of it."""
        _limits.discard(self)
        _apply(self.device)


def _apply(device: torch.device) -> None:
    """Several engines share a device: torch knows one limit, so it is the largest of theirs."""
    total = torch.cuda.get_device_properties(device).total_memory
    most = max((limit.most_bytes for limit in _limits if limit.device == device), default=total)
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)


@functools.cache
def _observe() -> None:
    """Have torch tell, once in the life of the process, when an allocation fails for good. Where it cannot, the limit holds all the same."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_tell)


def _tell(device: int, nbytes: int, allowed_bytes: int, free_bytes: int) -> None:
    for limit in list(_limits):
        if limit.device.index == device:
            logger.error("%s", limit.describe(nbytes, torch.cuda.memory_reserved(device)))
