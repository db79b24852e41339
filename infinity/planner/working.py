"""What training holds beside what rests, by the rules that the parts themselves follow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.device import tier_of
from infinity.kinds import Group, Tier
from infinity.optim.exchange import BUFFERS, is_in_one_piece
from infinity.optim.gpu_adamw import PIECE_NUMEL
from infinity.optim.grad_mover import LOOKAHEAD, landing_bytes, ring_count
from infinity.optim.pipeline import buffer_count
from infinity.optim.staging import Homes, ring_bytes
from infinity.planner.place import STATE_BYTES, Piece, Placement, Wish, element_bytes, grad_dtype
from infinity.sharding.layout import UnitLayout
from infinity.sharding.share import Share
from infinity.storage import publish
from infinity.storage.chunks import FlatGroup, flat_group_of
from infinity.storage.slabs import footprint, slab_bytes

ON_THEIR_WAY = "gradients on their way"
LIVE = "live units"
ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Memory that is needed while training, whatever rests where: name, tier, bytes."""

    name: str
    tier: Tier
    nbytes: int
    is_staging: bool = False
    """It grows with the size of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model to place, and where it computes."""

    layouts: Sequence[UnitLayout]
    around: Collection[int]
    """Indices of the units that stay live beside others: the root, and those whose module contains another unit's."""
    wish: Wish
    ahead: int
    """Units fetched ahead of the one in use."""
    device: torch.device
    share: Share
    busy_paths: int = 1
    """NVMe paths that staging keeps busy at once."""

    @property
    def compute(self) -> Tier:
        """Where units are live."""
        return tier_of(self.device)


def working(job: Job, chunks: Sequence[Piece], placement: Placement) -> list[Working]:
    """Everything held beside what rests, once `chunks` rest where `placement` says."""
    staging = (replace(item, is_staging=True) for item in (*_rings(job, chunks, placement), *_windows(job, chunks, placement)))
    return [item for item in (*_units(job, chunks, placement), *_gradients(job), *_exchange(job, chunks, placement), *staging) if item.nbytes]


def upload_buffers(busy_paths: int) -> int:
    """Pinned buffers between NVMe reads and uploads: one being read from each path, and three so that the next are asked for while these go up."""
    return busy_paths + 3


def _units(job: Job, chunks: Sequence[Piece], placement: Placement) -> Iterator[Working]:
    """Those in use, and those ahead. What rests whole where it is computed with is used in place."""
    away = {
        (piece.key.unit, piece.key.flat)
        for piece in chunks
        if piece.key.group is Group.PARAM and (placement[piece.key] is not job.compute or job.share.is_sharded(Group.PARAM))
    }
    sizes = {
        layout.index: sum(footprint(flat.nbytes, job.device) for f, flat in enumerate(layout.flats) if (layout.index, f) in away)
        for layout in job.layouts
    }
    yield Working(name=LIVE, tier=job.compute, nbytes=live_bytes(sizes, job.around, job.ahead))


def live_bytes(sizes: Mapping[int, int], around: Collection[int], ahead: int) -> int:
    """The units around others, the largest that may be in use, those ahead of it, and the one before it. `sizes`: of each by index."""
    inner = sorted((nbytes for index, nbytes in sizes.items() if index not in around), reverse=True)
    return sum(sizes[index] for index in around) + sum(inner[: ahead + 2])


def _gradients(job: Job) -> Iterator[Working]:
    """One unit's are being filled, and those of the units around it; on their way down are as many as the largest units have, half as many as
    are fetched ahead."""
    sizes = {layout.index: sum(footprint(flat.nbytes, job.device) for flat in layout.flats if flat.trainable) for layout in job.layouts}
    always = sum(sizes[index] for index in job.around)
    inner = max((nbytes for index, nbytes in sizes.items() if index not in job.around), default=0)
    yield Working(name="gradients being filled", tier=job.compute, nbytes=always + inner)
    yield Working(name=ON_THEIR_WAY, tier=job.compute, nbytes=sum(sorted(sizes.values(), reverse=True)[: max(1, job.ahead // 2)]))


def _exchange(job: Job, chunks: Sequence[Piece], placement: Placement) -> Iterator[Working]:
    """Flat buffers that are whole on every rank, and on their way between ranks around an update: those that these do not reach where they rest."""
    tiers: dict[FlatGroup, set[Tier]] = {}
    sizes: dict[FlatGroup, int] = {}
    for piece in chunks:
        if piece.flat.trainable and job.share.is_exchanged(piece.key.group):
            flat_group = flat_group_of(piece.key)
            tiers.setdefault(flat_group, set()).add(placement[piece.key])
            sizes[flat_group] = piece.flat.numel * element_bytes(piece.flat, piece.key.group, job.wish.accumulates)
    in_pieces = [nbytes for flat_group, nbytes in sizes.items() if not is_in_one_piece(tiers[flat_group])]
    yield Working(name="buffers between ranks", tier=Tier.CPU, nbytes=BUFFERS * slab_bytes(max(in_pieces, default=0)))
    beside = [nbytes for flat_group, nbytes in sizes.items() if job.compute is Tier.HBM and tiers[flat_group] == {Tier.CPU}]
    yield Working(name="buffers between ranks", tier=Tier.HBM, nbytes=BUFFERS * footprint(max(beside, default=0), job.device))


def _rings(job: Job, chunks: Sequence[Piece], placement: Placement) -> Iterator[Working]:
    """The buffers of the update and of arriving gradients: as large as the largest chunk that passes through them."""
    ring: dict[str, int] = {}
    for piece in chunks:
        if piece.key.group is not Group.OPTIMIZER:
            continue
        homes = Homes.of(placement.__getitem__, piece.key)
        dtype, resting = piece.flat.dtype, grad_dtype(piece.flat, job.wish.accumulates)
        wanted = ring_bytes(piece.numel, dtype, resting, homes)
        addend, total = landing_bytes(piece.numel, dtype, resting, homes.grad, is_cuda=job.device.type == "cuda")
        wanted.update(addends=addend, totals=total, update=min(piece.numel, PIECE_NUMEL) * STATE_BYTES if homes.on_gpu else 0)
        ring.update((name, max(nbytes, ring.get(name, 0))) for name, nbytes in wanted.items())
    yield Working(name="optimizer ring", tier=Tier.CPU, nbytes=buffer_count(job.busy_paths) * slab_bytes(ring.get("states", 0)))
    yield Working(name="parameter ring", tier=Tier.CPU, nbytes=buffer_count(job.busy_paths) * slab_bytes(ring.get("params", 0)))
    yield Working(name="gradient ring", tier=Tier.CPU, nbytes=buffer_count(job.busy_paths) * slab_bytes(ring.get("grads", 0)))
    landing = LOOKAHEAD * slab_bytes(ring.get("addends", 0)) + ring_count(job.busy_paths) * slab_bytes(ring.get("totals", 0))
    yield Working(name="landing gradients", tier=Tier.CPU, nbytes=landing)
    device_rings = ring.get("device_grads", 0) + ring.get("device_params", 0)
    yield Working(name="rings of the update", tier=Tier.HBM, nbytes=buffer_count(job.busy_paths) * device_rings)
    yield Working(name="fp32 gradient of a piece", tier=Tier.HBM, nbytes=ring.get("update", 0))


def _windows(job: Job, chunks: Sequence[Piece], placement: Placement) -> Iterator[Working]:
    """What passes between tiers outside of the update: parameters that are fetched, and chunks that are saved, loaded or published."""
    largest = {group: 0 for group in Group}
    for piece in chunks:
        if placement[piece.key] is Tier.NVME:
            largest[piece.key.group] = max(largest[piece.key.group], slab_bytes(piece.nbytes))
    if job.device.type == "cuda":
        yield Working(name="upload staging", tier=Tier.CPU, nbytes=upload_buffers(job.busy_paths) * largest[Group.PARAM])
    yield Working(name="chunks to save and load", tier=Tier.CPU, nbytes=largest[Group.PARAM] + largest[Group.OPTIMIZER])
    in_hbm = (piece.nbytes for piece in chunks if piece.key.group is not Group.GRAD and placement[piece.key] is Tier.HBM)
    yield Working(name="publishing from HBM", tier=Tier.CPU, nbytes=publish.staging_bytes(max(in_hbm, default=0)))
