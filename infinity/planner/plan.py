"""What fits where, how many bytes a step moves, and how long that takes: computed before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from infinity.errors import CapacityError
from infinity.kinds import OPTIMIZER_STATES, Group, Lane, Tier
from infinity.planner.place import STATE_BYTES, Piece, Placement, Wish, pieces, place, specs_of
from infinity.planner.working import ACTIVATIONS, Job, Working, live_bytes, working
from infinity.sharding.layout import CHUNK_GRANULE, UnitLayout
from infinity.sharding.share import ALONE, Share
from infinity.sizes import SECTOR_BYTES, align_up, format_bytes, format_rate
from infinity.storage.chunks import ChunkSpec
from infinity.storage.slabs import PAGE_BYTES, slab_bytes

_FEWEST_ELEMENTS = 16 * CHUNK_GRANULE
"""Smaller chunks are not worth their requests, however small the budget."""

_FEWEST_AHEAD, _MOST_AHEAD = 2, 32
"""Units fetched ahead where nobody says how many. Those of the next forward come under the update; what a forward has to ask for itself takes
time from the thread that launches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of the lanes, elements per second of Adam; 0 means unknown."""

    nvme_read: float = 0.0
    nvme_write: float = 0.0
    upload: float = 0.0
    adam: float = 0.0


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
    busy_paths: int = 1
    """NVMe paths that staging keeps busy at once."""
    baseline: Mapping[Tier, int] = field(default_factory=dict)
    """What the process held before the engine came, which the budgets do not count."""

    def resting(self, tier: Tier, group: Group | None = None) -> int:
        """Bytes at rest in a tier."""
        return sum(spec.nbytes for spec in self.specs if spec.tier is tier and group in (None, spec.key.group))

    def working_bytes(self, tier: Tier, name: str | None = None) -> int:
        """Bytes in a tier beside those at rest, or those of one purpose."""
        return sum(item.nbytes for item in self.working if item.tier is tier and name in (None, item.name))

    def held_bytes(self, tier: Tier) -> int:
        """The most that is ever held in a tier, activations included, gathering apart."""
        return self.resting(tier) + self.working_bytes(tier)

    def spare_bytes(self, tier: Tier) -> int:
        """What the budget of a tier has left over."""
        return max(0, self.limits.get(tier, 0) - self.held_bytes(tier))

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
        activations = self.working_bytes(Tier.HBM, ACTIVATIONS)
        if activations:
            lines.append(f"{'':>10} {format_bytes(activations)} of what works in hbm are left to activations")
        times = self.seconds()
        for lane, nbytes in self.traffic.items():
            if nbytes:
                expected = f", {times[lane]:.3f} s at {format_rate(nbytes / times[lane])}" if times.get(lane) else ""
                lines.append(f"{lane.value:>10}: {format_bytes(nbytes)} a step{expected}")
        if times.get(Lane.ADAM):
            lines.append(f"{Lane.ADAM.value:>10}: {times[Lane.ADAM]:.3f} s at {self.rates.adam / 1e9:.2f} G elements/s")
        return "\n".join(lines)


def make_plan(
    layouts: Sequence[UnitLayout],
    wish: Wish,
    device: torch.device,
    *,
    hbm_free: int,
    cpu_available: int,
    rates: Rates,
    around: Collection[int],
    num_paths: int = 1,
    share: Share = ALONE,
) -> Plan:
    """Place every chunk: HBM first, then CPU, and only what does not fit on NVMe.

    `around`: indices of the units that stay live beside others (see Job). A limit of 0 lets nothing rest in a tier, and training take
    there what it needs. Raises CapacityError with the smallest budget that works when what has to be there does not fit. HBM also holds activations.
    """
    hbm_limit = (hbm_free if wish.hbm_limit is None else wish.hbm_limit) if device.type == "cuda" else 0
    cpu_limit = cpu_available * 4 // 5 if wish.cpu_limit is None else wish.cpu_limit
    activations = _activations(wish, hbm_limit)
    limits = {Tier.HBM: hbm_limit - activations.nbytes, Tier.CPU: cpu_limit}
    job = Job(layouts=layouts, around=around, wish=wish, ahead=wish.prefetch_units or 0, device=device, share=share)
    if wish.prefetch_units is None:
        job = replace(job, ahead=_units_ahead(job, limits[job.compute]))
    settled = (None if wish.is_cut else _settle_whole(job, limits)) or _settle(job, _chunk_numel(job, limits), limits)
    if settled is None:
        raise _too_small(job, limits, activations)
    job, settled = _with_staging(job, settled, limits, num_paths)
    if wish.prefetch_units is None:
        job, settled = _with_units_ahead(job, settled, limits)
    specs = specs_of(settled.chunks, settled.placement, wish.accumulates)
    return Plan(
        device=device,
        chunk_numel=settled.chunk_numel,
        specs=specs,
        working=(*settled.items, *_rounding(job, settled), *([activations] if activations.nbytes else [])),
        limits={**limits, Tier.HBM: hbm_limit},
        traffic=_traffic(specs, device),
        rates=rates,
        num_params=sum(slot.numel for layout in layouts for flat in layout.flats for slot in flat.slots),
        prefetch_units=job.ahead,
        busy_paths=job.busy_paths,
    )


def _with_staging(job: Job, settled: _Settled, limits: Mapping[Tier, int], num_paths: int) -> tuple[Job, _Settled]:
    """As much staging as keeps every path busy.

    Where it does not fit in what the budgets have left, or would take more than a quarter of the CPU's, it is for as many as do.
    """
    for paths in range(num_paths, job.busy_paths, -1):
        wider = replace(job, busy_paths=paths)
        held = _beside(wider, settled)
        if _leaves_room(wider, held, limits):
            return wider, held
    return job, settled


def _with_units_ahead(job: Job, settled: _Settled, limits: Mapping[Tier, int]) -> tuple[Job, _Settled]:
    """As many units ahead as half of what the budget has left over takes. The other half, or room for all parameters if there was, stays for
    modules that are gathered."""
    held_bytes = _resting(job, settled, job.compute) + settled.working_bytes(job.compute)
    left, everything = limits[job.compute] - held_bytes, sum(layout.nbytes for layout in job.layouts)
    limit = held_bytes + min(left // 2, left - everything if left >= everything else left)
    for ahead in range(_most_ahead(job), job.ahead, -1):
        wider = replace(job, ahead=ahead)
        held = _beside(wider, settled)
        if not _over(wider, held, job.compute, limit):
            return wider, held
    return job, settled


def _beside(job: Job, settled: _Settled) -> _Settled:
    """The same placement, with what this job holds beside it."""
    return settled._replace(items=working(job, settled.chunks, settled.placement))


def _leaves_room(job: Job, settled: _Settled, limits: Mapping[Tier, int]) -> bool:
    """Whether staging takes at most a quarter of the cpu budget, and every tier holds what it is to hold."""
    staged = sum(item.nbytes for item in settled.items if item.tier is Tier.CPU and item.is_staging)
    return staged <= limits[Tier.CPU] // 4 and not any(_over(job, settled, tier, limit) for tier, limit in limits.items())


def _most_ahead(job: Job) -> int:
    return min(_MOST_AHEAD, len(job.layouts) - 1)


def _units_ahead(job: Job, limit: int) -> int:
    """What "auto" means: a deep queue keeps the lanes full where compute is uneven, and brings the first units while the last step ends."""
    sizes = {layout.index: layout.nbytes for layout in job.layouts}
    roomy = (ahead for ahead in range(_most_ahead(job), _FEWEST_AHEAD, -1) if live_bytes(sizes, job.around, ahead) <= limit // 8)
    return next(roomy, _FEWEST_AHEAD)


def _activation_share(wish: Wish) -> int:
    """One in how many bytes is for activations where nobody says: a quarter of a budget that somebody set, half of free memory."""
    return 2 if wish.hbm_limit is None else 4


def _activations(wish: Wish, hbm_limit: int) -> Working:
    """What the states leave to them."""
    part = hbm_limit // _activation_share(wish) if wish.activation_bytes is None else wish.activation_bytes
    if 0 < hbm_limit <= part:
        raise CapacityError(
            f"budgets.activations = {format_bytes(part)} leaves nothing of budgets.hbm = {format_bytes(hbm_limit)} to the engine. Lower it, or raise "
            "budgets.hbm"
        )
    return Working(name=ACTIVATIONS, tier=Tier.HBM, nbytes=part if hbm_limit else 0)


def _activations_beside(wish: Wish, nbytes: int) -> int:
    """What goes to them of the smallest budget that leaves `nbytes` to the engine."""
    return -(-nbytes // (_activation_share(wish) - 1)) if wish.activation_bytes is None else wish.activation_bytes


class _Settled(NamedTuple):
    """Chunks with places, and what is held beside them."""

    chunk_numel: int
    chunks: Sequence[Piece]
    placement: Placement
    items: Sequence[Working]

    def at_rest(self, tier: Tier) -> list[Piece]:
        return [piece for piece in self.chunks if self.placement[piece.key] is tier]

    def working_bytes(self, tier: Tier) -> int:
        return sum(item.nbytes for item in self.items if item.tier is tier)


def _settle_whole(job: Job, limits: Mapping[Tier, int]) -> _Settled | None:
    """Everything rests in one memory tier: nothing is staged, so chunks may be whole flat buffers, which take the fewest calls."""
    settled = _settle(job, _longest(job.layouts), limits)
    return settled if settled is not None and set(settled.placement.values()) in ({Tier.HBM}, {Tier.CPU}) else None


def _settle(job: Job, chunk_numel: int, limits: Mapping[Tier, int]) -> _Settled | None:
    """Fill the tiers. What rests decides what has to be held beside it, and the other way round: hold back more until both fit.

    None when they never do.
    """
    chunks = pieces(job.layouts, chunk_numel, job.wish.accumulates, job.share)
    reserve = dict.fromkeys(limits, 0)
    step = dict.fromkeys(limits, 0)
    before: Placement = {}
    while True:
        room = {tier: _room(job, tier, limit - reserve[tier]) for tier, limit in limits.items()}
        placement = place(chunks, job.wish, room)
        settled = _Settled(chunk_numel, chunks, placement, working(job, chunks, placement))
        over = {tier: _over(job, settled, tier, limit) for tier, limit in limits.items()}
        if not any(over.values()):
            return settled
        if not any(room.values()):
            return None
        if all(room[tier] == 0 for tier in over if over[tier]):
            reserve = dict(limits)  # what rests in one tier may need staging in the other
        for tier, nbytes in over.items():
            step[tier] = max(nbytes, 2 * step[tier]) if placement == before else nbytes  # what is pinned does not move for a byte
            reserve[tier] = max(reserve[tier] + step[tier], settled.working_bytes(tier)) if nbytes else reserve[tier]
        before = placement


def _over(job: Job, settled: _Settled, tier: Tier, limit: int) -> int:
    """Bytes by which a tier is too small. With a limit of 0 only what rests there is."""
    resting = _resting(job, settled, tier)
    return resting if limit == 0 else max(0, resting + settled.working_bytes(tier) - limit)


def _resting(job: Job, settled: _Settled, tier: Tier) -> int:
    """What the chunks at rest in a tier take: one piece of memory, or in CPU memory beside a GPU one pinned and one plain."""
    sizes = [0, 0]
    for piece in settled.at_rest(tier):
        sizes[job.compute is Tier.HBM and piece.key.group is Group.OPTIMIZER] += align_up(piece.nbytes, SECTOR_BYTES)
    return sum(sizes) if tier is Tier.HBM else sum(map(slab_bytes, sizes))


def _room(job: Job, tier: Tier, nbytes: int) -> int:
    """What may rest in `nbytes`: whole pages, for each of two pieces of memory beside a GPU."""
    if tier is Tier.CPU and job.compute is Tier.HBM:
        nbytes -= PAGE_BYTES
    page = PAGE_BYTES if nbytes >= PAGE_BYTES else SECTOR_BYTES
    return max(0, nbytes) // page * page


def _rounding(job: Job, settled: _Settled) -> list[Working]:
    found = []
    for tier in (Tier.HBM, Tier.CPU):
        nbytes = _resting(job, settled, tier) - sum(piece.nbytes for piece in settled.at_rest(tier))
        found.append(Working(name="rounding to whole pages", tier=tier, nbytes=nbytes))
    return [item for item in found if item.nbytes]


def _longest(layouts: Sequence[UnitLayout]) -> int:
    """Elements of the largest shard of a flat buffer."""
    return max((flat.shard_numel for layout in layouts for flat in layout.flats), default=CHUNK_GRANULE)


def _chunk_numel(job: Job, limits: Mapping[Tier, int]) -> int:
    """The wished chunk, halved until its staging takes at most a quarter of the cpu budget and leaves room for the rest.

    What is left over then is not lost where nothing rests: modules are gathered in it, and the run, whose chunks stay as they are, goes
    on with a smaller budget or with gradients that are added up.
    """
    numel = align_up(min(job.wish.chunk_numel, _longest(job.layouts)), CHUNK_GRANULE)
    while numel > _FEWEST_ELEMENTS and not job.wish.is_cut:
        if _leaves_room(job, _least(job, numel), limits):
            break
        numel = max(_FEWEST_ELEMENTS, align_up(numel // 2, CHUNK_GRANULE))
    return numel


def _least(job: Job, chunk_numel: int) -> _Settled:
    """Nothing rests in memory but what is pinned there. For its bytes only: shards stand whole for their chunks.

    What is held beside them depends on the largest chunk, and the first of a shard is as large as any.
    """
    wholes = pieces(job.layouts, _longest(job.layouts), job.wish.accumulates, job.share)
    placement = place(wholes, job.wish, dict.fromkeys((Tier.HBM, Tier.CPU), 0))
    return _Settled(chunk_numel, wholes, placement, working(job, [piece.head(chunk_numel) for piece in wholes], placement))


def _most(job: Job) -> _Settled:
    """Everything rests in memory but what is pinned to NVMe, and nothing has to be staged for it."""
    chunks = pieces(job.layouts, _longest(job.layouts), job.wish.accumulates, job.share)
    placement = {piece.key: job.wish.tier(piece.key.group) or Tier.CPU for piece in chunks}
    return _Settled(_longest(job.layouts), chunks, placement, working(job, chunks, placement))


def _too_small(job: Job, limits: Mapping[Tier, int], activations: Working) -> CapacityError:
    """Which budget is below its minimum, and what that is made of."""
    numel = align_up(min(job.wish.chunk_numel, _longest(job.layouts)), CHUNK_GRANULE)
    numel = numel if job.wish.is_cut else min(_FEWEST_ELEMENTS, numel)
    ways = [_least(job, numel)] if job.compute is Tier.HBM else [_least(job, numel), _most(job)]
    settled = min(ways, key=lambda way: _resting(job, way, Tier.CPU) + way.working_bytes(Tier.CPU))
    tier = next((tier for tier, limit in limits.items() if _over(job, settled, tier, limit)), Tier.CPU)
    needed = _resting(job, settled, tier) + settled.working_bytes(tier)
    resting = {group: sum(piece.nbytes for piece in settled.at_rest(tier) if piece.key.group is group) for group in Group}
    pinned = [f'placement.{group} = "{tier}" {format_bytes(nbytes)}' for group, nbytes in resting.items() if nbytes and job.wish.tier(group)]
    parts = pinned + [f"{item.name} {format_bytes(item.nbytes)}" for item in settled.items if item.tier is tier]
    if tier is Tier.HBM and job.compute is not Tier.HBM:
        return CapacityError(f"{', '.join(pinned)}: device is {job.device}, which has no HBM. Use cpu or nvme, or run on a GPU")
    limit = limits[tier]
    if tier is Tier.HBM:
        part = _activations_beside(job.wish, needed)
        parts.append(f"{activations.name} {format_bytes(part)}")
        limit, needed = limit + activations.nbytes, needed + part
    kept = (
        f" The run on these paths has chunks of {numel} elements, which it keeps: to change them, save a checkpoint and start from it"
        if job.wish.is_cut
        else ""
    )
    return CapacityError(
        f"budgets.{tier} = {format_bytes(limit)} is below the minimum of {needed} bytes ({format_bytes(needed)}) for this model: "
        f"{', '.join(parts)}. Raise budgets.{tier}, lower prefetch.units, or name smaller units in units.classes.{kept}"
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
