"""The update's traffic: read the next chunk, write the last. What `optim/pipeline.py` asks of the drives, without the arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from infinity.kinds import Group, Tier
from infinity.optim.pipeline import buffer_count
from infinity.optim.ring import Ring
from infinity.planner.plan import Plan
from infinity.replay.noise import noisy
from infinity.storage.chunks import ChunkKey, ChunkSpec
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.work import COMPLETED, Work, join


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What of a chunk rests on NVMe, which is all that moves here; None for a group that rests in memory."""

    states: ChunkSpec | None
    grad: ChunkSpec | None
    param: ChunkSpec | None

    @property
    def nbytes(self) -> int:
        """Read and written: states go both ways, the gradient comes, the parameter goes."""
        sizes = [spec.nbytes if spec is not None else 0 for spec in (self.states, self.grad, self.param)]
        return 2 * sizes[0] + sizes[1] + sizes[2]


@dataclass(slots=True, eq=False)
class _Hand:
    """A chunk between its reads and its writes."""

    chunk: _Chunk
    states: Tensor | None
    grad: Tensor | None
    arrived: Work


class Update:
    """Chunks in forward order through rings as large as training's: reads run ahead and writes drain behind as far as those allow."""

    def __init__(self, plan: Plan, store: Store, slabs: SlabPool) -> None:
        self._store = store
        self._chunks = tuple(_chunks_on_nvme(plan))
        count = buffer_count(plan.busy_paths)
        self._states = Ring(slabs.take, count=count, nbytes=_largest(chunk.states for chunk in self._chunks))
        self._grads = Ring(slabs.take, count=count, nbytes=_largest(chunk.grad for chunk in self._chunks))
        self._params = Ring(noisy(slabs), count=count, nbytes=_largest(chunk.param for chunk in self._chunks))

    @property
    def nbytes(self) -> int:
        """Of one update, read and written."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Once through all chunks, until the last write is over. `on_progress` gets the bytes of each. Raises StorageError."""
        unread, hands = deque(self._chunks), deque[_Hand]()
        while unread or hands:
            self._read_ahead(unread, hands)
            if not hands:
                hands.append(self._read(unread.popleft()))
            hand = hands.popleft()
            hand.arrived.wait()
            self._read_ahead(unread, hands)
            self._write(hand)
            on_progress(hand.chunk.nbytes)
        for ring in (self._states, self._grads, self._params):
            ring.drain()

    def close(self) -> None:
        """Let go of the buffers; those that a drive still uses follow when it is done."""
        for ring in (self._states, self._grads, self._params):
            ring.close()

    def _read_ahead(self, unread: deque[_Chunk], hands: deque[_Hand]) -> None:
        """As many as get a buffer without waiting."""
        while unread and self._can_read(unread[0]):
            hands.append(self._read(unread.popleft()))

    def _can_read(self, chunk: _Chunk) -> bool:
        return (chunk.states is None or self._states.has_free()) and (chunk.grad is None or self._grads.has_free())

    def _read(self, chunk: _Chunk) -> _Hand:
        states, states_arrived = self._fetch(chunk.states, self._states)
        grad, grad_arrived = self._fetch(chunk.grad, self._grads)
        return _Hand(chunk, states, grad, join((states_arrived, grad_arrived)))

    def _fetch(self, spec: ChunkSpec | None, ring: Ring) -> tuple[Tensor | None, Work]:
        if spec is None:
            return None, COMPLETED
        buffer = ring.take()
        return buffer, self._store.fetch(spec.key, buffer)

    def _write(self, hand: _Hand) -> None:
        """The new parameter gets a buffer only now: in training it is made between the reads and the writes."""
        param = self._params.take() if hand.chunk.param is not None else None
        if hand.grad is not None:
            self._grads.give_back(hand.grad, COMPLETED)
        self._write_back(hand.chunk.states, hand.states, self._states)
        self._write_back(hand.chunk.param, param, self._params)

    def _write_back(self, spec: ChunkSpec | None, buffer: Tensor | None, ring: Ring) -> None:
        if spec is not None and buffer is not None:
            ring.give_back(buffer, self._store.write_back(spec.key, buffer))


def _chunks_on_nvme(plan: Plan) -> Iterator[_Chunk]:
    """Every trained chunk of which anything rests on NVMe, in forward order: unit by unit, flat by flat."""
    specs = {spec.key: spec for spec in plan.specs}
    for key in sorted(key for key in specs if key.group is Group.OPTIMIZER):
        states, grad, param = (specs[ChunkKey(key.unit, key.flat, group, key.chunk)] for group in (Group.OPTIMIZER, Group.GRAD, Group.PARAM))
        homes = [spec if spec.tier is Tier.NVME else None for spec in (states, grad, param)]
        if any(homes):
            yield _Chunk(*homes)


def _largest(specs: Iterator[ChunkSpec | None]) -> int:
    return max((spec.padded_nbytes for spec in specs if spec is not None), default=0)
