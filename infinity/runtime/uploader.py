"""Turns NVMe reads that have arrived into uploads, on a thread of its own, so that whoever starts the reads never waits for a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.runtime.fetches import Parts
from infinity.storage.chunks import ChunkKey
from infinity.storage.copies import Copies
from infinity.storage.reserve import Reserve
from infinity.storage.store import Store
from infinity.storage.work import Work


@dataclass(frozen=True, slots=True)
class _Upload:
    """A chunk that is being read into a staging buffer and goes on to `target`."""

    parts: Parts
    read: Work
    staged: Tensor
    target: Tensor


class Uploader:
    """From files through staging to the compute device. A staging buffer is the read's, then the upload's, then the next read's."""

    def __init__(self, store: Store, copies: Copies, staging: Reserve, *, deadline_s: float, on_death: Callable[[BaseException], None]) -> None:
        """`staging`: pinned buffers of one chunk each, the uploader's from now on. `on_death` is called from the thread with what it died of.

        Whoever makes it starts `thread`, once `on_death` can be called.
        """
        self._store, self._copies, self._staging, self._deadline_s, self._on_death = store, copies, staging, deadline_s, on_death
        self._uploads: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="infinity-uploader", daemon=True)

    def bring(self, parts: Parts, key: ChunkKey, target: Tensor) -> None:
        """Start reading a chunk that will go on to `target`, uint8 on the device, as one of `parts`. Waits for a staging buffer."""
        buffer = self._staging.borrow(self._deadline_s)
        self._uploads.put(_Upload(parts, self._store.fetch(key, buffer), buffer, target))

    def fail(self, error: BaseException) -> None:
        """Nobody waits for staging any more: whoever does raises a MoverError because of `error`."""
        self._staging.fail(error)

    def stop(self) -> None:
        """The thread ends once it has come to the end of its queue."""
        self._uploads.put(None)

    def close(self) -> None:
        """After the thread has ended: let go of the staging buffers."""
        self._staging.close()

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._copies.device)
            self._forward()
        except BaseException as error:
            self.fail(error)  # first: who waits for staging may hold what the next line needs
            self._on_death(error)

    def _forward(self) -> None:
        """Reads arrive in the order in which they were started; each is sent on at once."""
        before: tuple[Work, Tensor] | None = None
        while True:
            try:
                item = self._uploads.get_nowait()
            except queue.Empty:
                if before is not None:
                    self._hand_back(*before)
                    before = None
                item = self._uploads.get()
            if item is None:
                return
            try:
                item.read.wait(self._deadline_s)
                upload = self._copies.upload(item.staged[: item.target.numel()], item.target)
            except BaseException as error:
                item.parts.fail(error)
                raise
            item.parts.started(upload)
            if before is not None:
                self._hand_back(*before)
            before = (upload, item.staged)

    def _hand_back(self, upload: Work, staged: Tensor) -> None:
        """The next read may land in it once the upload has read it."""
        upload.wait(self._deadline_s)
        self._staging.give(staged)
