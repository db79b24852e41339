"""A few tiny units of arrays over a store, with everything the optimizer needs around them. No nn.Module anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optim.fakes import MemoryStore

from infinity import native
from infinity.kinds import OPTIMIZER_STATES, Group, State, Tier
from infinity.optim.adamw import CpuKernel
from infinity.optim.chunks import Address, Chunk, trainable_chunks
from infinity.optim.exchange import Exchange
from infinity.optim.gpu_adamw import GpuKernel
from infinity.optim.grads import Grads
from infinity.optim.optimizer import TieredAdamW
from infinity.optim.pipeline import Pipeline
from infinity.sharding.layout import ParamSpec, Slot, UnitLayout, layout_unit
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import ALONE
from infinity.storage.chunks import ChunkSpec, Part
from infinity.storage.copies import Copies
from infinity.storage.slabs import SlabPool
from infinity.storage.store import NvmePath, Store
from infinity.storage.tiers import Pools
from infinity.timeline import Timeline

CPU = torch.device("cpu")
Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""Per unit, its parameters by name."""

SHAPES: Shapes = (
    {"embed": (97, 40)},
    {"0.norm": (40,), "0.up": (40, 120), "0.bias": (120,), "0.scalar": ()},
    {"1.norm": (40,), "1.up": (40, 120), "1.bias": (120,), "1.empty": (0,)},
    {"head": (3,)},
)
Place = Callable[[Chunk, Group], Tier]


def everywhere(tier: Tier) -> Place:
    return lambda chunk, group: tier


def mixed(chunk: Chunk, group: Group) -> Tier:
    """Every group meets CPU and NVMe, in all combinations."""
    which = chunk.unit + 2 * chunk.index + {Group.PARAM: 0, Group.GRAD: 1, Group.OPTIMIZER: 3}[group] * (1 + chunk.index)
    return (Tier.NVME, Tier.CPU)[which // 2 % 2]


def units_of(shapes: Shapes, dtype: torch.dtype) -> tuple[UnitLayout, ...]:
    return tuple(
        layout_unit(i, f"unit.{i}", [ParamSpec(name=name, shape=shape, dtype=dtype, trainable=True) for name, shape in unit.items()])
        for i, unit in enumerate(shapes)
    )


def sizes_of(chunks: Sequence[Chunk]) -> dict[Any, int]:
    """Bytes of every chunk of every group."""
    sizes = {}
    for chunk in chunks:
        sizes[chunk.key(Group.PARAM)] = chunk.numel * chunk.dtype.itemsize
        sizes[chunk.key(Group.GRAD)] = chunk.numel * chunk.grad_dtype.itemsize
        sizes[chunk.key(Group.OPTIMIZER)] = chunk.numel * 4 * len(OPTIMIZER_STATES)
    return sizes


def memory_store(chunks: Sequence[Chunk], place: Place) -> MemoryStore:
    return MemoryStore({chunk.key(group): place(chunk, group) for chunk in chunks for group in Group}, sizes_of(chunks))


def initial_values(shapes: Shapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for unit in shapes for name, shape in unit.items()}


def random_grads(shapes: Shapes, dtype: torch.dtype, seed: int, missing: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    names = [(name, shape) for unit in shapes for name, shape in unit.items()]
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names if name not in missing}


@dataclass
class Rig:
    """The optimizer under test and what is below it."""

    units: tuple[UnitLayout, ...]
    chunks: tuple[Chunk, ...]
    store: Any
    grads: Grads
    pipeline: Pipeline
    exchange: Exchange
    timeline: Timeline
    device: torch.device
    params: dict[str, torch.nn.Parameter]
    addresses: dict[torch.Tensor, Address]

    def optimizer(self, groups: Any = None, **options: Any) -> TieredAdamW:
        parts = {"addresses": self.addresses, "grads": self.grads, "pipeline": self.pipeline, "exchange": self.exchange}
        return TieredAdamW(groups or list(self.params.values()), **parts, **options)

    def backward(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Hand in the gradients unit by unit, last unit first, as a backward would. Units without any stay silent."""
        for unit in reversed(self.units):
            for f, flat in enumerate(unit.flats):
                present = frozenset(i for i, slot in enumerate(flat.slots) if slot.name in grads)
                if present:
                    buffer = torch.zeros(flat.numel, dtype=flat.dtype, device=self.device)
                    for i in present:
                        flat.slots[i].view(buffer).copy_(grads[flat.slots[i].name])
                    self.grads.arrive(unit.index, f, buffer, present)

    def values(self, state: State = State.PARAM) -> dict[str, torch.Tensor]:
        """Every parameter's value of a state, read from where it rests."""
        return {slot.name: self._read(unit, f, slot, state) for unit in self.units for f, flat in enumerate(unit.flats) for slot in flat.slots}

    def _read(self, unit: UnitLayout, f: int, slot: Slot, state: State) -> torch.Tensor:
        flat = unit.flats[f]
        runs = [self.state_of(chunk, state) for chunk in self.chunks if chunk.flat_key == (unit.index, f)]
        return slot.view(torch.cat(runs) if runs else torch.empty(flat.numel))

    def state_of(self, chunk: Chunk, state: State) -> torch.Tensor:
        """A copy of a chunk's elements of one state."""
        if state in (State.PARAM, State.GRAD):
            dtype = chunk.dtype if state is State.PARAM else chunk.grad_dtype
            return read_chunk(self.store, chunk, Group(state)).view(dtype)
        states = read_chunk(self.store, chunk, Group.OPTIMIZER).view(torch.float32)
        return states.view(len(OPTIMIZER_STATES), chunk.numel)[OPTIMIZER_STATES.index(state)].clone()


def read_chunk(store: Any, chunk: Chunk, group: Group) -> torch.Tensor:
    key = chunk.key(group)
    resident = store.resident(key)
    if resident is not None:
        return resident.to("cpu", copy=True)
    buffer = slabs.take(sizes_of([chunk])[key])
    store.fetch(key, buffer).wait(30)
    return buffer


def write_chunk(store: Any, chunk: Chunk, group: Group, source: torch.Tensor) -> None:
    key, resident = chunk.key(group), store.resident(chunk.key(group))
    if resident is not None:
        resident.copy_(source.view(torch.uint8))
    else:
        buffer = slabs.take(source.nbytes)
        buffer.copy_(source.view(torch.uint8))
        store.write_back(key, buffer).wait(30)


def adopt(store: Any, units: Sequence[UnitLayout], chunks: Sequence[Chunk], values: Mapping[str, torch.Tensor]) -> None:
    """Parameters and masters from `values`, moments zero."""
    for chunk in chunks:
        flat = units[chunk.unit].flats[chunk.flat]
        whole = torch.zeros(flat.numel)
        for slot in flat.slots:
            slot.view(whole).copy_(values[slot.name])
        master = whole[chunk.interval.start : chunk.interval.stop]
        write_chunk(store, chunk, Group.PARAM, master.to(chunk.dtype))
        write_chunk(store, chunk, Group.OPTIMIZER, torch.cat((master, torch.zeros(2 * chunk.numel))))


slabs = SlabPool(pin=False, threads=1)
pool = native.ThreadPool(2)


@contextmanager
def rig(
    place: Place,
    *,
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    open_store: Callable[[Sequence[Chunk], Place], Any] = memory_store,
    buffers: int = 3,
    deadline_s: float = 20.0,
    device: torch.device = CPU,
) -> Iterator[Rig]:
    units = units_of(shapes, dtype)
    chunks = trainable_chunks(units, 2048, grad_dtype=grad_dtype)
    store = open_store(chunks, place)
    timeline = Timeline()
    copies = Copies(device, timeline)
    pinned = SlabPool(pin=device.type == "cuda", threads=1)
    grads = Grads(chunks, store=store, copies=copies, pool=pool, slabs=pinned, timeline=timeline, device=device, deadline_s=deadline_s)
    pipeline = Pipeline(
        chunks,
        store=store,
        copies=copies,
        cpu_kernel=CpuKernel(pool),
        gpu_kernel=GpuKernel(),
        pools=Pools(pinned=pinned, plain=slabs),
        timeline=timeline,
        device=device,
        deadline_s=deadline_s,
        buffers=buffers,
    )
    ranks = Ranks(timeout_s=deadline_s, timeline=timeline)
    beside = {"store": store, "copies": copies, "ranks": ranks, "slabs": slabs, "timeline": timeline, "deadline_s": deadline_s}
    exchange = Exchange(units, chunks, share=ALONE, chunk_numel=2048, **beside)
    values = initial_values(shapes, dtype)
    adopt(store, units, chunks, values)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    addresses = {
        params[slot.name]: Address(slot.name, unit.index, f, s)
        for unit in units
        for f, flat in enumerate(unit.flats)
        for s, slot in enumerate(flat.slots)
    }
    try:
        yield Rig(units, chunks, store, grads, pipeline, exchange, timeline, device, params, addresses)
    finally:
        pipeline.close()
        grads.close()
        copies.close()


@contextmanager
def file_store(directory: Path, device: torch.device = CPU) -> Iterator[Callable[[Sequence[Chunk], Place], Store]]:
    """Makes the real thing: chunks on NVMe are dealt to shard files under two directories."""
    opened: list[Store] = []

    def open_store(chunks: Sequence[Chunk], place: Place) -> Store:
        timeline = Timeline()
        copies, pinned = Copies(device, timeline), SlabPool(pin=device.type == "cuda", threads=1)
        paths = [NvmePath(path=directory / name, weight=1.0) for name in ("first", "second")]
        for path in paths:
            path.path.mkdir(exist_ok=True)
        store = Store(paths=paths, run="test", pools=Pools(pinned=pinned, plain=slabs), copies=copies, timeline=timeline)
        opened.append(store)
        store.build([spec_of(chunk, group, place(chunk, group)) for chunk in chunks for group in Group], [f"unit.{i}" for i in range(len(SHAPES))])
        return store

    try:
        yield open_store
    finally:
        for store in opened:
            store.close()


def spec_of(chunk: Chunk, group: Group, tier: Tier) -> ChunkSpec:
    name = f"u{chunk.unit}|f{chunk.flat}|c{chunk.index}"
    if group is Group.OPTIMIZER:
        parts = tuple(Part(f"{name}|{state}", torch.float32, chunk.numel) for state in OPTIMIZER_STATES)
    else:
        parts = (Part(f"{name}|{group}", chunk.dtype if group is Group.PARAM else chunk.grad_dtype, chunk.numel),)
    return ChunkSpec(chunk.key(group), sum(part.nbytes for part in parts), tier, parts)
