"""Working on a CUDA stream that is not the thread's current one, and waiting for one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEADLINE_S = 120.0
"""How long a device may take for what is queued there, where nobody says."""

_LONGEST_NAP_S = 5e-4


def nap_until(is_over: Callable[[], bool], limit_s: float) -> bool:
    """Sleep in short naps: synchronizing an event would burn a core and could not time out. False at the limit."""
    deadline = time.monotonic() + limit_s
    nap_s = 1e-5
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True


class OnStream:
    """`with OnStream(stream):` makes it current, and then the one before. What torch.cuda.stream does, at a third of its cost in the thread
    that launches compute, which does this for every copy."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)  # on its own device, which becomes current too

    def __exit__(self, *raised: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._before.device_index:
            torch.cuda.set_device(self._device)
