"""The first values of a run: chunk after chunk is filled from parameters, a few on their way to the disk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinity.kinds import Group
from infinity.optim.ring import Ring
from infinity.runtime.units import Unit
from infinity.sharding.layout import FlatLayout, Interval
from infinity.sharding.share import ALONE, Share
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool, slab_bytes
from infinity.storage.store import Store

Read = Callable[[str, Tensor], Iterator[tuple[int, Tensor]]]
"""(name, parameter) -> (first element, some elements) of its values, flat and in order, complex ones as real pairs."""

_MOST_BUFFERS = 3
"""One that is filled, two being written."""


@dataclass(slots=True)
class _Chunk:
    """What is filled together: the parts of the states that cover one interval of the full flat buffer."""

    keys: Sequence[ChunkKey]
    interval: Interval
    loans: list[Tensor | None] = field(default_factory=list)
    """Buffers on their way to NVMe, while it is being filled."""
    values: list[Tensor] = field(default_factory=list)
    """Where values go meanwhile: [len(interval)] each."""


class Adoption:
    """Fills the chunks of a new store: parameters in the engine's dtypes, masters from the same values, moments zero. Use under `with`.

    Borrows what training will work with later, `room_bytes` of CPU memory, so a run begins inside its budget; with room for fewer buffers there
    are fewer, but always one for a chunk.
    """

    def __init__(
        self, units: Sequence[Unit], store: Store, slabs: SlabPool, *, chunk_numel: int, room_bytes: int, read: Read, share: Share = ALONE
    ) -> None:
        self._store = store
        self._share = share
        self._slabs = slabs
        self._chunk_numel = chunk_numel
        self._read = read
        keys = [key for unit in units for f, flat in enumerate(unit.layout.flats) for keys, _ in self._chunks(unit, f, flat) for key in keys]
        sizes = {group: self._largest([key for key in keys if key.group is group]) for group in (Group.PARAM, Group.OPTIMIZER)}
        count = max(1, min(_MOST_BUFFERS, room_bytes // max(1, sum(map(slab_bytes, sizes.values())))))
        self._rings = {group: Ring(slabs.take, count=count, nbytes=nbytes) for group, nbytes in sizes.items()}

    def _chunks(self, unit: Unit, f: int, flat: FlatLayout) -> Iterator[tuple[list[ChunkKey], Interval]]:
        """Every chunk of the share: its keys, of the states too where they are kept, and where it lies in the full flat buffer."""
        updated = dict(self._share.chunks(flat, Group.OPTIMIZER, self._chunk_numel)) if flat.trainable else {}
        for c, interval in self._share.chunks(flat, Group.PARAM, self._chunk_numel):
            groups = (Group.PARAM, Group.OPTIMIZER) if c in updated else (Group.PARAM,)
            yield [ChunkKey(unit=unit.layout.index, flat=f, group=group, chunk=c) for group in groups], interval

    def _largest(self, keys: Sequence[ChunkKey]) -> int:
        """Bytes of the largest chunk on NVMe: it is filled in a buffer."""
        return max((self._store.spec(key).padded_nbytes for key in keys if self._store.resident(key) is None), default=0)

    def take(self, unit: Unit, params: Sequence[Tensor]) -> None:
        """Fill a unit's chunks from full parameters, in the unit's order: each is read once, whole, on every rank. Raises StorageError."""
        by_name = dict(zip(unit.names, params, strict=True))
        for f, flat in enumerate(unit.layout.flats):
            chunks = [_Chunk(keys, interval) for keys, interval in self._chunks(unit, f, flat)]
            for slot in flat.slots:
                for start, piece in self._read(slot.name, by_name[slot.name]):
                    first = slot.start + start
                    chunks = self._fill(chunks, flat, Interval(first, first + piece.numel()), piece)
            self._fill(chunks, flat, Interval(flat.numel, flat.numel), torch.empty(0))

    def _fill(self, chunks: Sequence[_Chunk], flat: FlatLayout, run: Interval, piece: Tensor) -> list[_Chunk]:
        """`piece` covers `run` of the full flat buffer, nothing else that is before its end is still to come. Returns the chunks not full yet."""
        rest = []
        for chunk in chunks:
            if chunk.interval.start >= run.stop:
                rest.append(chunk)
                continue
            if not chunk.values:
                self._begin(chunk, flat)
            common = chunk.interval.overlap(run)
            if len(common):
                inside, source = common.shifted(-chunk.interval.start), common.shifted(-run.start)
                for value in chunk.values:
                    value[inside.start : inside.stop].copy_(piece[source.start : source.stop])
            if chunk.interval.stop <= run.stop:
                self._finish(chunk)
            else:
                rest.append(chunk)
        return rest

    def _begin(self, chunk: _Chunk, flat: FlatLayout) -> None:
        chunk.loans = [self._rings[key.group].take() if self._store.resident(key) is None else None for key in chunk.keys]
        for key, loan in zip(chunk.keys, chunk.loans, strict=True):
            target = self._target(key, loan).zero_()  # padding, and the moments
            dtype = torch.float32 if key.group is Group.OPTIMIZER else flat.dtype
            chunk.values.append(target[: len(chunk.interval) * dtype.itemsize].view(dtype))

    def _finish(self, chunk: _Chunk) -> None:
        for key, loan in zip(chunk.keys, chunk.loans, strict=True):
            if loan is not None:
                self._rings[key.group].give_back(loan, self._store.write_back(key, self._target(key, loan)))

    def _target(self, key: ChunkKey, loan: Tensor | None) -> Tensor:
        """uint8: the chunk's bytes, at rest or in a buffer on their way there."""
        if loan is not None:
            return loan[: self._store.spec(key).padded_nbytes]
        resident = self._store.resident(key)
        assert resident is not None
        return resident

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last writes, and give the buffers back."""
        try:
            for ring in self._rings.values():
                ring.drain()
        except Exception:
            if kind is None:
                raise  # else the first error is the one to tell
        finally:
            for ring in self._rings.values():
                ring.close()
            self._slabs.trim()
