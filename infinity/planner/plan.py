"""What fits where, how many bytes a step moves, and how long that takes: computed before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from infinity.errors import CapacityError
from infinity.kinds import OPTIMIZER_STATES, Group, Lane, Tier
from infinity.sharding.layout import CHUNK_GRANULE, FlatLayout, Interval, UnitLayout
from infinity.sizes import align_up, format_bytes, format_rate
from infinity.storage.chunks import ChunkKey, ChunkSpec, Part

RING = 3
"""Buffers of each kind in the update: one being read, one being updated, one being written."""

STATE_BYTES = 4
"""Masters and moments are fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the configuration says about memory. A limit of None is "auto"; a tier of None is "auto"."""

    hbm_limit: int | None
    cpu_limit: int | None
    param: Tier | None = None
    grad: Tier | None = None
    optimizer: Tier | None = None
    chunk_numel: int
    """Elements of a chunk at most; fewer are taken where the cpu budget is small."""
    prefetch_units: int
    accumulates: bool
    """Gradients rest in fp32 and are added up over micro-steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of the lanes, elements per second of Adam; 0 means unknown."""

    nvme_read: float = 0.0
    nvme_write: float = 0.0
    upload: float = 0.0
    adam: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Memory that is needed while training, whatever rests where: name, tier, bytes."""

    name: str
    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every chunk rests and what a step costs. Kept by the engine and printed before the first step."""

    device: torch.device
    chunk_numel: int
    specs: tuple[ChunkSpec, ...]
    working: tuple[Working, ...]
    limits: Mapping[Tier, int]
    traffic: Mapping[Lane, int]
    """Bytes a step of one micro-step moves, per lane."""
    rates: Rates
    num_params: int
    prefetch_units: int
    baseline: Mapping[Tier, int] = field(default_factory=dict)
    """What the process held before the engine came, which the budgets do not count."""

    def resting(self, tier: Tier, group: Group | None = None) -> int:
        """Bytes at rest in a tier."""
        return sum(spec.nbytes for spec in self.specs if spec.tier is tier and group in (None, spec.key.group))

    def working_bytes(self, tier: Tier) -> int:
        return sum(item.nbytes for item in self.working if item.tier is tier)

    def spare_bytes(self, tier: Tier) -> int:
        """What the budget of a tier has left over."""
        return max(0, self.limits.get(tier, 0) - self.resting(tier) - self.working_bytes(tier))

    def seconds(self) -> dict[Lane, float]:
        """Expected seconds a step per lane, where the rate is known."""
        rates = {
            Lane.NVME_READ: self.rates.nvme_read,
            Lane.NVME_WRITE: self.rates.nvme_write,
            Lane.UPLOAD: self.rates.upload,
            Lane.DOWNLOAD: self.rates.upload,
        }
        times = {lane: self.traffic.get(lane, 0) / rate for lane, rate in rates.items() if rate}
        on_cpu = sum(spec.nbytes for spec in self.specs if spec.key.group is Group.OPTIMIZER and spec.tier is not Tier.HBM)
        if self.rates.adam and on_cpu:
            times[Lane.ADAM] = on_cpu / len(OPTIMIZER_STATES) / STATE_BYTES / self.rates.adam
        return times

    def render(self) -> str:
        """The plan as a few lines of text."""
        lines = [f"{self.num_params:,} parameters on {self.device}, chunks of {self.chunk_numel:,} elements, {self.prefetch_units} units ahead"]
        lines.append(f"{'':>10} {'param':>12} {'grad':>12} {'optimizer':>12} {'working':>12} {'budget':>12} {'before us':>12}")
        for tier in Tier:
            groups = [self.resting(tier, group) for group in Group]
            budget = format_bytes(self.limits[tier]) if tier in self.limits else "-"
            before = format_bytes(self.baseline[tier]) if tier in self.baseline else "-"
            cells = [*(format_bytes(n) for n in groups), format_bytes(self.working_bytes(tier)), budget, before]
            lines.append(f"{tier.value:>10} " + " ".join(f"{cell:>12}" for cell in cells))
        times = self.seconds()
        for lane, nbytes in self.traffic.items():
            if nbytes:
                expected = f", {times[lane]:.3f} s at {format_rate(nbytes / times[lane])}" if times.get(lane) else ""
                lines.append(f"{lane.value:>10}: {format_bytes(nbytes)} a step{expected}")
        if times.get(Lane.ADAM):
            lines.append(f"{Lane.ADAM.value:>10}: {times[Lane.ADAM]:.3f} s at {self.rates.adam / 1e9:.2f} G elements/s")
        return "\n".join(lines)


def make_plan(
    layouts: Sequence[UnitLayout], wish: Wish, device: torch.device, *, hbm_free: int, cpu_available: int, rates: Rates, root: int | None
) -> Plan:
    """Place every chunk: HBM first, then CPU, and only what does not fit on NVMe.

    `root` is the index of the unit that stays live from the first to the last, if there is one. Raises CapacityError with the
    smallest budget when the working memory alone does not fit, or when a pinned placement does not.
    """
    hbm_limit = (hbm_free // 2 if wish.hbm_limit is None else wish.hbm_limit) if device.type == "cuda" else 0
    cpu_limit = cpu_available * 4 // 5 if wish.cpu_limit is None else wish.cpu_limit
    limits = {Tier.HBM: hbm_limit, Tier.CPU: cpu_limit}
    is_still = any(_rests_in(tier, layouts, wish, device, limits, root) for tier in limits)
    chunk_numel = _longest(layouts) if is_still else _fit_chunk(layouts, wish, cpu_limit)
    working = tuple(_working(layouts, wish, device, chunk_numel, root, is_still))
    room = dict(limits)
    for tier, limit in room.items():
        needed = sum(item.nbytes for item in working if item.tier is tier)
        if needed > limit and (limit or tier is Tier.CPU or device.type == "cuda"):
            parts = ", ".join(f"{item.name} {format_bytes(item.nbytes)}" for item in working if item.tier is tier)
            raise CapacityError(
                f"budgets.{tier.value} = {format_bytes(limit)} is below the minimum of {needed} bytes ({format_bytes(needed)}) "
                f"that training needs at hand: {parts}. "
                f"Raise budgets.{tier.value}, lower prefetch.units, or name smaller units in units.classes."
            )
        room[tier] = limit - needed
    placed = _place(layouts, wish, chunk_numel, room)
    specs = tuple(chunk_spec(layout, flat, key, interval, tier, wish.accumulates) for layout, flat, key, interval, tier in placed)
    return Plan(
        device=device,
        chunk_numel=chunk_numel,
        specs=specs,
        working=working,
        limits=limits,
        traffic=_traffic(specs, device),
        rates=rates,
        num_params=sum(slot.numel for layout in layouts for flat in layout.flats for slot in flat.slots),
        prefetch_units=wish.prefetch_units,
    )


def grad_dtype(flat: FlatLayout, accumulates: bool) -> torch.dtype:
    """The dtype in which gradients rest: their own, or fp32 where micro-steps are added up."""
    return torch.float32 if accumulates else flat.dtype


def chunk_spec(layout: UnitLayout, flat: FlatLayout, key: ChunkKey, interval: Interval, tier: Tier, accumulates: bool) -> ChunkSpec:
    """The named tensors of one chunk, end to end."""
    numel, stem = len(interval), f"{layout.name}|{key.flat}|{interval.start}"
    if key.group is Group.OPTIMIZER:
        parts = tuple(Part(name=f"{stem}|{state.value}", dtype=torch.float32, numel=numel) for state in OPTIMIZER_STATES)
    else:
        dtype = grad_dtype(flat, accumulates) if key.group is Group.GRAD else flat.dtype
        parts = (Part(name=f"{stem}|{key.group.value}", dtype=dtype, numel=numel),)
    return ChunkSpec(key=key, nbytes=sum(part.numel * part.dtype.itemsize for part in parts), tier=tier, parts=parts)


def _longest(layouts: Sequence[UnitLayout]) -> int:
    """Elements of the largest shard of a flat buffer."""
    return max((flat.shard_numel for layout in layouts for flat in layout.flats), default=CHUNK_GRANULE)


def _rests_in(tier: Tier, layouts: Sequence[UnitLayout], wish: Wish, device: torch.device, limits: Mapping[Tier, int], root: int | None) -> bool:
    """All states rest in one memory tier: nothing is staged, and chunks may be whole flat buffers, which take the fewest calls."""
    allowed: set[Tier | None] = {tier, None} if tier is Tier.HBM or device.type == "cpu" else {tier}
    if not {wish.param, wish.grad, wish.optimizer} <= allowed:
        return False
    working = _working(layouts, wish, device, _longest(layouts), root, is_still=True)
    resting = sum(
        flat.shard_numel * sum(_element_bytes(flat, group, wish) for group in (Group if flat.trainable else (Group.PARAM,)))
        for layout in layouts
        for flat in layout.flats
    )
    return resting + sum(item.nbytes for item in working if item.tier is tier) <= limits[tier]


def _fit_chunk(layouts: Sequence[UnitLayout], wish: Wish, cpu_limit: int) -> int:
    """The wished chunk, halved until the rings take at most a quarter of the cpu budget."""
    numel = align_up(min(wish.chunk_numel, _longest(layouts)), CHUNK_GRANULE)
    per_element = RING * (len(OPTIMIZER_STATES) * STATE_BYTES + 2 * STATE_BYTES)
    while numel > 16 * CHUNK_GRANULE and numel * per_element > cpu_limit // 4:
        numel = align_up(numel // 2, CHUNK_GRANULE)
    return numel


def _working(
    layouts: Sequence[UnitLayout], wish: Wish, device: torch.device, chunk_numel: int, root: int | None, is_still: bool
) -> Iterator[Working]:
    compute = Tier.HBM if device.type == "cuda" else Tier.CPU
    blocks = sorted((layout.nbytes for layout in layouts if layout.index != root), reverse=True)
    always = sum(layout.nbytes for layout in layouts if layout.index == root)
    always_grads = sum(_grad_bytes(layout) for layout in layouts if layout.index == root)
    yield Working(name="live units", tier=compute, nbytes=always + sum(blocks[: wish.prefetch_units + 2]))
    yield Working(name="gradients in flight", tier=compute, nbytes=always_grads + 2 * grads_on_their_way(layouts))
    chunk_bytes = chunk_numel * STATE_BYTES
    if device.type == "cuda" and wish.optimizer in (None, Tier.HBM):
        yield Working(name="fp32 gradient of a chunk", tier=Tier.HBM, nbytes=chunk_bytes)
    if is_still:
        return
    yield Working(name="optimizer ring", tier=Tier.CPU, nbytes=RING * len(OPTIMIZER_STATES) * chunk_bytes)
    yield Working(name="parameter ring", tier=Tier.CPU, nbytes=RING * chunk_bytes)
    yield Working(name="gradient ring", tier=Tier.CPU, nbytes=RING * chunk_bytes)
    if device.type == "cuda":
        yield Working(name="upload staging", tier=Tier.CPU, nbytes=STAGING * chunk_bytes)


STAGING = 4
"""Pinned buffers between NVMe reads and uploads."""


def grads_on_their_way(layouts: Sequence[UnitLayout]) -> int:
    """Bytes of gradients that may be moving down at a time: the largest unit's. As many again are being filled meanwhile."""
    return max((_grad_bytes(layout) for layout in layouts), default=0)


def _grad_bytes(layout: UnitLayout) -> int:
    return sum(flat.nbytes for flat in layout.flats if flat.trainable)


def _place(
    layouts: Sequence[UnitLayout], wish: Wish, chunk_numel: int, room: dict[Tier, int]
) -> Iterator[tuple[UnitLayout, FlatLayout, ChunkKey, Interval, Tier]]:
    """Value per byte: parameters first (read twice a step), then states that the GPU can update, gradients, and the other states."""
    wishes = {Group.PARAM: wish.param, Group.GRAD: wish.grad, Group.OPTIMIZER: wish.optimizer}
    on_gpu: set[tuple[int, int, int]] = set()
    for group in (Group.PARAM, Group.GRAD, Group.OPTIMIZER):
        if group is Group.GRAD:
            on_gpu = _claim_hbm(layouts, wish, chunk_numel, room)
        for layout, flat, key, interval in _chunks(layouts, group, chunk_numel):
            if (key.unit, key.flat, key.chunk) in on_gpu:
                tier = Tier.HBM
            else:
                allowed = (Tier.HBM, Tier.CPU) if group is Group.PARAM else (Tier.CPU,)
                tier = _choose(group, len(interval) * _element_bytes(flat, group, wish), wishes[group], allowed, room)
            yield layout, flat, key, interval, tier


def _chunks(layouts: Sequence[UnitLayout], group: Group, chunk_numel: int) -> Iterator[tuple[UnitLayout, FlatLayout, ChunkKey, Interval]]:
    for layout in layouts:
        for f, flat in enumerate(layout.flats):
            if group is Group.PARAM or flat.trainable:
                for c, interval in enumerate(flat.chunks(chunk_numel)):
                    yield layout, flat, ChunkKey(unit=layout.index, flat=f, group=group, chunk=c), interval


def _claim_hbm(layouts: Sequence[UnitLayout], wish: Wish, chunk_numel: int, room: dict[Tier, int]) -> set[tuple[int, int, int]]:
    """Chunks whose states and gradients rest in HBM together: a gradient alone there would only have to come down at the step."""
    claimed: set[tuple[int, int, int]] = set()
    if not {wish.grad, wish.optimizer} <= {None, Tier.HBM}:
        return claimed
    for _, flat, key, interval in _chunks(layouts, Group.OPTIMIZER, chunk_numel):
        nbytes = len(interval) * (_element_bytes(flat, Group.GRAD, wish) + _element_bytes(flat, Group.OPTIMIZER, wish))
        if room[Tier.HBM] >= nbytes:
            room[Tier.HBM] -= nbytes
            claimed.add((key.unit, key.flat, key.chunk))
    return claimed


def _element_bytes(flat: FlatLayout, group: Group, wish: Wish) -> int:
    if group is Group.OPTIMIZER:
        return len(OPTIMIZER_STATES) * STATE_BYTES
    return grad_dtype(flat, wish.accumulates).itemsize if group is Group.GRAD else flat.dtype.itemsize


def _choose(group: Group, nbytes: int, pinned: Tier | None, allowed: Sequence[Tier], room: dict[Tier, int]) -> Tier:
    if pinned is Tier.NVME:
        return Tier.NVME
    for tier in allowed if pinned is None else (pinned,):
        if room[tier] >= nbytes:
            room[tier] -= nbytes
            return tier
    if pinned is None:
        return Tier.NVME
    raise CapacityError(
        f"placement.{group.value} = {pinned.value!r} does not fit: "
        f"budgets.{pinned.value} is short by at least {format_bytes(nbytes - room[pinned])}. "
        f'Raise budgets.{pinned.value} or let placement.{group.value} be "auto".'
    )


def _traffic(specs: Sequence[ChunkSpec], device: torch.device) -> dict[Lane, int]:
    """One micro-step: parameters are fetched twice, everything trained is read and written once."""
    bytes_of = {(tier, group): 0 for tier in Tier for group in Group}
    trained = {(spec.key.unit, spec.key.flat) for spec in specs if spec.key.group is Group.OPTIMIZER}
    written = 0
    for spec in specs:
        bytes_of[spec.tier, spec.key.group] += spec.nbytes
        if spec.tier is Tier.NVME and spec.key.group is Group.PARAM and (spec.key.unit, spec.key.flat) in trained:
            written += spec.nbytes
    states = bytes_of[Tier.NVME, Group.GRAD] + bytes_of[Tier.NVME, Group.OPTIMIZER]
    traffic = {Lane.NVME_READ: 2 * bytes_of[Tier.NVME, Group.PARAM] + states, Lane.NVME_WRITE: written + states}
    if device.type == "cuda":
        traffic[Lane.UPLOAD] = 2 * (bytes_of[Tier.NVME, Group.PARAM] + bytes_of[Tier.CPU, Group.PARAM])
        traffic[Lane.DOWNLOAD] = bytes_of[Tier.NVME, Group.GRAD] + bytes_of[Tier.CPU, Group.GRAD]
    return traffic
