"""What a CUDA stream has queued so far, as a Work."""

from __future__ import annotations

import torch

from infinity.errors import MoverError
from infinity.storage.streams import DEADLINE_S, nap_until
from infinity.storage.work import COMPLETED, Work


class StreamWork:
    """Over when everything queued on a stream at construction has run."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: the current one if left out."""
        self._device = device
        self._event = (stream or torch.cuda.current_stream(device)).record_event()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises MoverError past the deadline."""
        limit_s = DEADLINE_S if timeout_s is None else timeout_s
        if not nap_until(self.is_completed, limit_s):
            raise MoverError(f"a stream of {self._device} was not done with what it had queued within {limit_s:g} s. Is the device hung?")

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def sync_current_stream(self) -> None:
        """Whatever stream is current now: it runs what is queued from now on after that."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


def stream_work(device: torch.device) -> Work:
    """A StreamWork on CUDA; on a CPU device whatever was called has run."""
    return StreamWork(device) if device.type == "cuda" else COMPLETED
