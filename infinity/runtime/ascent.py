"""Starts what brings a unit to the compute device: copies from memory, NVMe reads with their uploads, gathers between ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from infinity.runtime.fetches import Fetch, Parts
from infinity.runtime.movers import Movers
from infinity.runtime.resting import RestingUnit
from infinity.runtime.room import Room
from infinity.runtime.uploader import Uploader
from infinity.sharding.ranks import Gather
from infinity.storage.chunks import ChunkKey, as_bytes
from infinity.storage.condition import Condition
from infinity.storage.work import Work


class Ascent:
    """Waits only where something rests on NVMe: for a staging buffer, and for a write of the same chunk that is still under way."""

    def __init__(
        self,
        movers: Movers,
        room: Room,
        changed: Condition,
        *,
        deadline_s: float,
        on_death: Callable[[BaseException], None],
    ) -> None:
        """The lock of `changed` guards `room`, which counts a fetch before it is begun. `on_death` is called from the thread of the ascent with
        what it died of.
        """
        self._movers, self._room, self._changed = movers, room, changed
        self._uploader: Uploader | None = None
        if movers.staging is not None:
            self._uploader = Uploader(movers.store, movers.copies, movers.staging, deadline_s=deadline_s, on_death=on_death)

    @property
    def threads(self) -> list[threading.Thread]:
        """Its own, to be started before anything is begun."""
        return [self._uploader.thread] if self._uploader is not None else []

    def begin(self, fetch: Fetch, resting: RestingUnit) -> None:
        """Take the unit's buffers and start everything towards them, but for what ranks `gather`. What rests where it is used is used in place."""
        parts = fetch.shards or fetch
        for flat in resting.flats:
            if flat.is_in_place:
                assert flat.whole is not None
                fetch.flats.append(flat.whole)
                continue
            target = self._take(flat.layout.numel, flat.layout.dtype)
            fetch.borrowed.append(target)
            fetch.flats.append(target)
            if flat.is_in_reach:
                parts.expect(1)
                parts.started(self._movers.copies.turn(fetch.asked_at))
            elif flat.whole is not None:
                parts.expect(1)
                parts.started(self._copy(fetch, flat.whole, target[flat.kept.start : flat.kept.stop]))
            else:
                for key, interval in flat.chunks:
                    self._start(fetch, parts, key, as_bytes(target[interval.start : interval.stop]))
        if fetch.shards is not None:
            fetch.expect(len(fetch.borrowed))
            fetch.shards.started()
            fetch.is_to_gather = True
        fetch.started()

    def gather(self, begun: Sequence[tuple[Fetch, RestingUnit]]) -> None:
        """Everybody's shards, once this rank's have come: some of them are started later, by the uploader. The ranks' hosts meet once for all."""
        asked: list[Gather] = []
        for fetch, resting in begun:
            assert fetch.shards is not None
            for f, (target, flat) in enumerate(zip(fetch.borrowed, resting.flats, strict=True)):
                own = flat.whole if flat.is_in_reach else None
                asked.append(Gather(target, resting.layout.flat_name(f), after=[fetch.shards], own=own))
        works = iter(self._movers.ranks.gather_each(asked))
        for fetch, _ in begun:
            for work in islice(works, len(fetch.borrowed)):
                fetch.started(work)
            fetch.is_to_gather = False

    def wait_for_reads(self, deadline_s: float) -> None:
        """Nothing reads any more what rests in memory, unless a rank is lost: then nothing writes it. Raises MoverError at the deadline."""
        self._movers.copies.wait_for_uploads(deadline_s)
        self._movers.ranks.settle(deadline_s)

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._changed.lock:
            return self._room.take(numel, dtype)

    def _start(self, fetch: Fetch, parts: Parts, key: ChunkKey, target: Tensor) -> None:
        store = self._movers.store
        resident = store.resident(key)
        parts.expect(1)
        if resident is not None:
            parts.started(self._copy(fetch, resident[: target.numel()], target))
        elif self._uploader is None:
            parts.started(store.fetch(key, target))
        else:
            self._uploader.bring(parts, key, target)

    def _copy(self, fetch: Fetch, resident: Tensor, target: Tensor) -> Work:
        """From where it rests in memory. What rests in HBM is copied after the update that may be queued, or it would overtake that."""
        copies = self._movers.copies
        return copies.upload(resident, target, fetch.name, after=fetch.asked_at if resident.device == target.device else None)

    def fail(self, error: BaseException) -> None:
        """Whoever waits for staging, now or later, raises a MoverError because of `error`."""
        if self._uploader is not None:
            self._uploader.fail(error)

    def stop(self, error: BaseException) -> None:
        """Its thread comes to an end; whoever waits for staging raises a MoverError because of `error`."""
        if self._uploader is not None:
            self._uploader.stop()
            self._uploader.fail(error)

    def close(self) -> None:
        """After the thread has ended: let go of the staging buffers."""
        if self._uploader is not None:
            self._uploader.close()
