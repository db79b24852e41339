"""The first values of a run: chunk after chunk is filled from the model's parameters, a few on their way to the disk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from infinity import native
from infinity.kinds import Group
from infinity.optim.ring import Ring
from infinity.runtime.units import Unit
from infinity.sharding.layout import FlatLayout, Interval
from infinity.sharding.share import ALONE, Share
from infinity.sizes import MiB
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool, slab_bytes
from infinity.storage.store import Store

_PIECE_BYTES = 8 * MiB
"""Values are read in pieces of this many bytes."""

OnRead = Callable[[Tensor], None]
"""Told of each piece of a parameter that was read: what lies in a file may leave memory again."""

_MOST_BUFFERS = 3
"""One that is filled, two being written."""


class Adoption:
    """Fills the chunks of a new store: parameters in the engine's dtypes, masters from the same values, moments zero. Use under `with`.

    Borrows what training will work with later, `room_bytes` of CPU memory, so a run begins inside its budget; with room for fewer buffers there
    are fewer, but always one for a chunk.
    """

    def __init__(
        self, units: Sequence[Unit], store: Store, slabs: SlabPool, *, chunk_numel: int, room_bytes: int, on_read: OnRead, share: Share = ALONE
    ) -> None:
        self._store = store
        self._share = share
        self._slabs = slabs
        self._chunk_numel = chunk_numel
        self._on_read = on_read
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

    def take(self, unit: Unit, values: Sequence[Tensor]) -> None:
        """Fill a unit's chunks from full parameter values, one per parameter, in the unit's order. Raises StorageError."""
        by_name = {name: _flattened(value) for name, value in zip(unit.names, values, strict=True)}
        for f, flat in enumerate(unit.layout.flats):
            sources = [by_name[slot.name] for slot in flat.slots]
            for keys, interval in self._chunks(unit, f, flat):
                self._fill(keys, flat, interval, sources)

    def _fill(self, keys: Sequence[ChunkKey], flat: FlatLayout, interval: Interval, sources: Sequence[Tensor]) -> None:
        loans = [self._rings[key.group].take() if self._store.resident(key) is None else None for key in keys]
        targets = [self._target(key, loan) for key, loan in zip(keys, loans, strict=True)]
        values = [target[: len(interval) * dtype.itemsize].view(dtype) for target, dtype in zip(targets, (flat.dtype, torch.float32), strict=False)]
        for target in targets:
            target.zero_()  # padding, and the moments
        for index, run in flat.pieces(interval):
            start = interval.start + run.start - flat.slots[index].start
            self._copy(sources[index][start : start + len(run)], [value[run.start : run.stop] for value in values])
        for key, loan, target in zip(keys, loans, targets, strict=True):
            if loan is not None:
                self._rings[key.group].give_back(loan, self._store.write_back(key, target))

    def _target(self, key: ChunkKey, loan: Tensor | None) -> Tensor:
        """uint8: the chunk's bytes, at rest or in a buffer on their way there."""
        if loan is not None:
            return loan[: self._store.spec(key).padded_nbytes]
        resident = self._store.resident(key)
        assert resident is not None
        return resident

    def _copy(self, source: Tensor, places: Sequence[Tensor]) -> None:
        """Read once, cast to each place."""
        for start, piece in _pieces(source):
            for place in places:
                place[start : start + piece.numel()].copy_(piece)
            self._on_read(piece)

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


def checksum(units: Sequence[Unit], on_read: OnRead) -> str:
    """CRC-32C of all parameters as they are, in hexadecimal."""
    crc = 0
    for unit in units:
        for param in unit.params:
            for _, piece in _pieces(_flattened(param)):
                crc = native.crc32c(piece.cpu().view(torch.uint8), crc)
                on_read(piece)
    return f"{crc:08x}"


def _pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first element, some elements) of a flat tensor, in order."""
    step = max(1, _PIECE_BYTES // values.element_size())
    for start in range(0, values.numel(), step):
        yield start, values[start : start + step]


def _flattened(values: Tensor) -> Tensor:
    """[numel], a view where that is possible; a complex tensor as its real pairs."""
    values = values.detach()
    return (torch.view_as_real(values.resolve_conj().resolve_neg()) if values.is_complex() else values).reshape(-1)
