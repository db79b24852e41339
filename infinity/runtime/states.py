"""Parameters and optimizer states by name, one chunk in memory at a time: checkpoints, reading and changes go through here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.kinds import OPTIMIZER_STATES, Group, State
from infinity.runtime.units import Unit
from infinity.sharding.layout import FlatLayout, Interval, Slot
from infinity.sharding.share import ALONE, Share
from infinity.sizes import SECTOR_BYTES, align_up
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedState:
    """One state of one parameter: fp32 for masters and moments, the engine's dtype for PARAM; complex ones as real pairs."""

    name: str
    state: State
    dtype: torch.dtype
    shape: tuple[int, ...]


def named_states(units: Sequence[Unit]) -> list[NamedState]:
    """What a checkpoint holds: masters and moments of what is trained, the parameter itself where it is frozen."""
    found = []
    for flat in (flat for unit in units for flat in unit.layout.flats):
        for slot in flat.slots:
            shape = (*slot.shape, 2) if slot.is_complex else slot.shape
            if flat.trainable:
                found += [NamedState(name=slot.name, state=state, dtype=torch.float32, shape=shape) for state in OPTIMIZER_STATES]
            else:
                found.append(NamedState(name=slot.name, state=State.PARAM, dtype=flat.dtype, shape=shape))
    return found


def held_runs(units: Sequence[Unit], share: Share) -> dict[str, list[Interval]]:
    """Parameter -> the runs of its elements, counted from its first, of which a rank with this share keeps what a checkpoint holds."""
    found: dict[str, list[Interval]] = {}
    for flat in (flat for unit in units for flat in unit.layout.flats):
        run = share.run(flat, Group.OPTIMIZER if flat.trainable else Group.PARAM)
        found.update((slot.name, _inside(slot, run)) for slot in flat.slots)
    return found


class States:
    """Elements of a named state, read from and written to wherever their chunks rest. Not thread-safe; the step must be over."""

    def __init__(self, units: Sequence[Unit], store: Store, slabs: SlabPool, *, chunk_numel: int, deadline_s: float, share: Share = ALONE) -> None:
        """`share`: what the store holds; other elements cannot be read or written here."""
        self._units, self._store, self._deadline_s, self._share = units, store, deadline_s, share
        self._held = held_runs(units, share)
        self._chunks = {
            (unit.layout.index, f, group): dict(share.chunks(flat, group, chunk_numel))
            for unit in units
            for f, flat in enumerate(unit.layout.flats)
            for group in (Group.PARAM, Group.OPTIMIZER)
            if group is Group.PARAM or flat.trainable
        }
        """By index, where each chunk lies in its full flat buffer."""
        self._places = {
            slot.name: (unit.layout.index, f, flat, slot) for unit in units for f, flat in enumerate(unit.layout.flats) for slot in flat.slots
        }
        self._windows = {group: _Window(store, slabs, deadline_s) for group in (Group.PARAM, Group.OPTIMIZER)}

    def commit(self, unit: Unit, flats: Sequence[Tensor]) -> None:
        """Make full flat buffers the unit's values. A master follows where its parameter changed, and keeps its low bits elsewhere."""
        self.flush()  # a step may have changed what was read before
        for f, flat in enumerate(unit.layout.flats):
            for c, interval in self._chunks[unit.layout.index, f, Group.PARAM].items():
                piece = _Piece(unit.layout.index, f, c, interval, Interval(0, len(interval)))
                self._commit_chunk(piece, flat, flats[f][interval.start : interval.stop])
        self.flush()

    def _commit_chunk(self, piece: _Piece, flat: FlatLayout, values: Tensor) -> None:
        """`values`: on the compute device. They may be the resident bytes themselves, so only the master knows what has changed."""
        param = self._open(piece, flat, State.PARAM)
        if param.data_ptr() != values.data_ptr():
            if bool((param.cpu() == values.cpu()).all()):
                return
            param.copy_(values)
            self._windows[Group.PARAM].dirty = True
        if piece.index in self._chunks.get((piece.unit, piece.flat, Group.OPTIMIZER), ()):
            master, values = self._open(piece, flat, State.MASTER), values.cpu()
            kept = master.cpu()
            changed = kept.to(flat.dtype) != values
            master.copy_(torch.where(changed, values.float(), kept))
            self._windows[Group.OPTIMIZER].dirty |= bool(changed.any())

    def tensors(self) -> list[NamedState]:
        """What a checkpoint holds."""
        return named_states(self._units)

    def share(self, name: str) -> list[Interval]:
        """The runs of elements of a parameter's states that this rank writes to a checkpoint: every element is one rank's."""
        _, _, flat, slot = self._places[name]
        return _inside(slot, self._share.part(flat))

    def held(self, name: str) -> list[Interval]:
        """The runs of elements of a parameter's states that rest on this rank, counted from its first element."""
        return self._held[name]

    def read(self, name: str, state: State, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a named state, flat, on the CPU."""
        dtype = self._dtype(name, state)
        pieces = [self._view(name, state, piece).cpu().clone() for piece in self._cut(name, state, start, stop)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)

    def write(self, name: str, state: State, start: int, values: Tensor) -> None:
        """Put `values` (flat, CPU) at element `start` of a named state. A master brings its parameter along. `flush` ends it."""
        at = 0
        for piece in self._cut(name, state, start, start + values.numel()):
            run = values[at : at + len(piece.inside)]
            at += len(piece.inside)
            self._view(name, state, piece, dirty=True).copy_(run)
            if state is State.MASTER:
                self._view(name, State.PARAM, piece, dirty=True).copy_(run)

    def flush(self) -> None:
        """Changed chunks go home."""
        for window in self._windows.values():
            window.close()

    def close(self) -> None:
        """Let go of the memory; what was not flushed is lost."""
        for window in self._windows.values():
            window.drop()

    def _dtype(self, name: str, state: State) -> torch.dtype:
        return self._places[name][2].dtype if state is State.PARAM else torch.float32

    def _cut(self, name: str, state: State, start: int, stop: int) -> Iterator[_Piece]:
        unit, f, _, slot = self._places[name]
        wanted = Interval(slot.start + start, slot.start + stop)
        for c, interval in self._chunks[unit, f, _group_of(state)].items():
            inside = interval.overlap(wanted)
            if len(inside):
                yield _Piece(unit, f, c, interval, inside.shifted(-interval.start))

    def _view(self, name: str, state: State, piece: _Piece, *, dirty: bool = False) -> Tensor:
        view = self._open(piece, self._places[name][2], state)
        self._windows[_group_of(state)].dirty |= dirty
        return view

    def _open(self, piece: _Piece, flat: FlatLayout, state: State) -> Tensor:
        """The elements of `state` that the piece covers, in memory."""
        if state is State.PARAM:
            group, dtype, states_before, states = Group.PARAM, flat.dtype, 0, 1
        else:
            group, dtype, states_before, states = Group.OPTIMIZER, torch.float32, OPTIMIZER_STATES.index(state), len(OPTIMIZER_STATES)
        state_bytes = len(piece.chunk) * dtype.itemsize
        window = self._windows[group]
        window.open(ChunkKey(unit=piece.unit, flat=piece.flat, group=group, chunk=piece.index), state_bytes * states)
        return window.elements(dtype, state_bytes * states_before, piece.inside)


def _inside(slot: Slot, run: Interval) -> list[Interval]:
    """What a run of a flat buffer has of a parameter, in its elements."""
    common = slot.interval.overlap(run)
    return [common.shifted(-slot.start)] if len(common) else []


def _group_of(state: State) -> Group:
    return Group.PARAM if state is State.PARAM else Group.OPTIMIZER


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in one chunk."""

    unit: int
    flat: int
    index: int
    chunk: Interval
    inside: Interval


class _Window:
    """One chunk in reach: the resident bytes themselves, or a buffer read from NVMe that goes back when it was changed."""

    def __init__(self, store: Store, slabs: SlabPool, deadline_s: float) -> None:
        self._store, self._slabs, self._deadline_s = store, slabs, deadline_s
        self._key: ChunkKey | None = None
        self._bytes: Tensor | None = None
        self._buffer: Tensor | None = None
        self.dirty = False

    def open(self, key: ChunkKey, nbytes: int) -> None:
        """Make the chunk's bytes available."""
        if key != self._key:
            self.close()
            resident = self._store.resident(key)
            self._bytes = self._room(nbytes) if resident is None else resident
            if resident is None:
                self._await(self._store.fetch(key, self._bytes))
            self._key = key

    def elements(self, dtype: torch.dtype, part_bytes: int, run: Interval) -> Tensor:
        """A run of elements of the tensor that begins `part_bytes` into the chunk."""
        assert self._bytes is not None
        start = part_bytes + run.start * dtype.itemsize
        return self._bytes[start : start + len(run) * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Write a changed chunk back."""
        if self._key is not None and self.dirty and self._bytes is not None and self._store.resident(self._key) is None:
            self._await(self._store.write_back(self._key, self._bytes))
        self._key, self.dirty = None, False

    def _await(self, work: Work) -> None:
        """A buffer whose motion failed is not used again: the device may still be at it."""
        try:
            work.wait(self._deadline_s)
        except BaseException:
            self._buffer = self._bytes = self._key = None
            self.dirty = False
            raise

    def drop(self) -> None:
        """Forget the chunk, and let go of the buffer."""
        self._key = self._bytes = self._buffer = None

    def _room(self, nbytes: int) -> Tensor:
        padded = align_up(nbytes, SECTOR_BYTES)
        if self._buffer is None or self._buffer.numel() < padded:
            self._buffer = None
            self._buffer = self._slabs.take(padded)
        return self._buffer[:padded]
