"""Copies between CPU memory and one compute device, each direction on its own CUDA stream. On a CPU device they are plain copies."""

from __future__ import annotations

import torch

from infinity.kinds import Lane
from infinity.storage.motions import Motions
from infinity.storage.stream_work import StreamWork
from infinity.storage.work import COMPLETED, StreamedWork, Work
from infinity.timeline import Timeline


class Copies:
    """Moves tensors of equal numel between CPU memory and one compute device.

    Casts happen on the device, so the wire carries the dtype of the CPU side. `upload` starts once `after` has happened, but does not wait
    for the current stream: allocate its target on `upload_stream`, or hand in memory that nothing queued still uses.
    `download` starts once `after` has happened, or after the work that the caller's current stream has queued.
    """

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device = device
        self._timeline = timeline
        self._motions = Motions(device, timeline, (Lane.UPLOAD, Lane.DOWNLOAD)) if device.type == "cuda" else None

    @property
    def upload_stream(self) -> torch.cuda.Stream | None:
        """The stream that uploads run on; None on a CPU device."""
        return self._motions.stream(Lane.UPLOAD) if self._motions is not None else None

    def upload(
        self,
        source: torch.Tensor,  # [n] CPU, pinned for speed, or on the device; unchanged until the work is over
        target: torch.Tensor,  # [n] on the device
        name: str = "upload",
        after: torch.cuda.Event | None = None,
    ) -> StreamedWork:
        assert source.numel() == target.numel(), f"{name}: {source.numel()} elements into {target.numel()}"
        if self._motions is None:
            return self._copy(Lane.UPLOAD, source, target, name)
        if after is not None:
            self._motions.stream(Lane.UPLOAD).wait_event(after)
        return self._motions.run(Lane.UPLOAD, name, source.nbytes, lambda: self._to_device(source, target), (source, target))

    def download(
        self,
        source: torch.Tensor,  # [n] on the device; kept alive until the work is over
        target: torch.Tensor,  # [n] CPU, pinned for speed; undefined until the work is over
        name: str = "download",
        after: torch.cuda.Event | None = None,
    ) -> StreamedWork:
        assert source.numel() == target.numel(), f"{name}: {source.numel()} elements into {target.numel()}"
        if self._motions is None:
            return self._copy(Lane.DOWNLOAD, source, target, name)
        self._motions.stream(Lane.DOWNLOAD).wait_event(after or torch.cuda.current_stream(self.device).record_event())
        return self._motions.run(Lane.DOWNLOAD, name, target.nbytes, lambda: _to_host(source, target), (source, target))

    def turn(self, after: torch.cuda.Event | None = None) -> Work:
        """Over when an upload asked for now could begin: what is queued behind it may write a target of uploads as they do."""
        stream = self.upload_stream
        if stream is None:
            return COMPLETED
        if after is not None:
            stream.wait_event(after)
        return StreamWork(self.device, stream)

    def wait_for_uploads(self, timeout_s: float) -> None:
        """Every upload started so far is over: their sources may be written. Raises MoverError at the deadline."""
        if self._motions is not None:
            self._motions.wait_for(Lane.UPLOAD, timeout_s)
            self._motions.sweep()  # no compute is being launched now, which this would hold up

    def drain_spans(self) -> None:
        """Hand the spans of finished copies to the timeline. Never waits for the device."""
        if self._motions is not None:
            self._motions.sweep()

    def close(self) -> None:
        """Wait for the copies under way."""
        if self._motions is not None:
            self._motions.close()

    def _to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype == target.dtype:
            target.copy_(_shaped(source, target), non_blocking=True)
        else:
            target.copy_(_shaped(source.to(self.device, non_blocking=True), target))

    def _copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor, name: str) -> StreamedWork:
        with self._timeline.span(lane, name, target.nbytes):
            target.copy_(source.view(target.shape))
        return COMPLETED


def _to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(_shaped(source.to(target.dtype), target), non_blocking=True)


def _shaped(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return source if source.shape == target.shape else source.view(target.shape)
