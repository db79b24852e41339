"""The buffers between a chunk's home and the kernel that updates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.kinds import OPTIMIZER_STATES, Group, Tier
from infinity.optim.chunks import Chunk
from infinity.optim.ring import Ring
from infinity.storage.chunks import ChunkKey
from infinity.storage.store import Store
from infinity.storage.tiers import Pools


@dataclass(frozen=True, slots=True)
class Homes:
    """Where a chunk's three groups live. The kernel runs where the states can be: on the GPU if they are in HBM, else on the CPU."""

    states: Tier
    grad: Tier
    param: Tier

    @classmethod
    def of(cls, tier_of: Callable[[ChunkKey], Tier], key: ChunkKey) -> Homes:
        """The homes of the chunk that `key`, of any group, belongs to."""
        states, grad, param = (ChunkKey(key.unit, key.flat, group, key.chunk) for group in (Group.OPTIMIZER, Group.GRAD, Group.PARAM))
        return cls(tier_of(states), tier_of(grad), tier_of(param))

    @property
    def on_gpu(self) -> bool:
        return self.states is Tier.HBM

    @property
    def stages_states(self) -> bool:
        return self.states is Tier.NVME

    @property
    def stages_grad(self) -> bool:
        """The gradient passes through CPU memory that is not its home."""
        return self.grad is Tier.NVME or (self.grad is Tier.HBM and not self.on_gpu)

    @property
    def stages_param(self) -> bool:
        """The new parameters pass through CPU memory that is not their home."""
        return self.param is Tier.NVME or (self.param is Tier.HBM and not self.on_gpu)

    @property
    def uploads_grad(self) -> bool:
        return self.on_gpu and self.grad is not Tier.HBM

    @property
    def downloads_param(self) -> bool:
        return self.on_gpu and self.param is not Tier.HBM


class Staging:
    """One ring for each way that a chunk's bytes may have to go; each buffer holds one chunk. Rings that no chunk needs are empty."""

    def __init__(self, chunks: Iterable[Chunk], store: Store, *, pools: Pools, device: torch.device, count: int) -> None:
        sizes = dict.fromkeys(("states", "grads", "params", "device_grads", "device_params"), 0)
        for chunk in chunks:
            homes = Homes.of(store.tier, chunk.key(Group.OPTIMIZER))
            for name, nbytes in ring_bytes(chunk.numel, chunk.dtype, chunk.grad_dtype, homes).items():
                sizes[name] = max(sizes[name], nbytes)

        def take_hbm(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        self.states = Ring(pools.plain.take, count=count, nbytes=sizes["states"])
        self.grads = Ring(pools.pinned.take, count=count, nbytes=sizes["grads"])
        self.params = Ring(pools.pinned.take, count=count, nbytes=sizes["params"])
        self.device_grads = Ring(take_hbm, count=count, nbytes=sizes["device_grads"])
        self.device_params = Ring(take_hbm, count=count, nbytes=sizes["device_params"])

    @property
    def cpu_bytes(self) -> int:
        return self.states.nbytes + self.grads.nbytes + self.params.nbytes

    @property
    def hbm_bytes(self) -> int:
        return self.device_grads.nbytes + self.device_params.nbytes

    def can_read(self, homes: Homes) -> bool:
        """Whether a chunk with these homes can be read without waiting for a buffer."""
        return (not homes.stages_states or self.states.has_free()) and (not homes.stages_grad or self.grads.has_free())

    def close(self) -> None:
        """Let go of all buffers."""
        for ring in self._rings:
            ring.close()

    @property
    def _rings(self) -> tuple[Ring, ...]:
        return self.states, self.grads, self.params, self.device_grads, self.device_params

    def drain(self) -> None:
        """Wait until no returned buffer is in use; raise the first error after having waited for all."""
        failure: Exception | None = None
        for ring in self._rings:
            try:
                ring.drain()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


def states_nbytes(numel: int) -> int:
    """Of a chunk's optimizer states, end to end."""
    return len(OPTIMIZER_STATES) * numel * torch.float32.itemsize


def ring_bytes(numel: int, dtype: torch.dtype, grad_dtype: torch.dtype, homes: Homes) -> dict[str, int]:
    """Bytes that a chunk of `numel` elements with these homes needs in a buffer of each ring."""
    wanted = {}
    if homes.stages_states:
        wanted["states"] = states_nbytes(numel)
    if homes.stages_grad:
        wanted["grads"] = numel * grad_dtype.itemsize
    if homes.stages_param:
        wanted["params"] = numel * dtype.itemsize
    if homes.uploads_grad:
        wanted["device_grads"] = numel * grad_dtype.itemsize
    if homes.downloads_param:
        wanted["device_params"] = numel * dtype.itemsize
    return wanted
