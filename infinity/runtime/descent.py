"""Gradients on their way from the hooks to the ranks that keep them, and to rest, within one byte budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinity.device import tier_of
from infinity.kinds import Group, Lane, Tier
from infinity.optim.grads import Grads
from infinity.runtime.compute_clock import ComputeClock
from infinity.runtime.units import Unit
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.storage.budget import Budget, Held
from infinity.storage.slabs import SlabPool, footprint
from infinity.storage.store import Store
from infinity.storage.work import Work, follow


@dataclass(frozen=True, slots=True)
class _Reducing:
    """A collective under way, and what to call once nobody uses its tensor any more."""

    work: Work
    give: Callable[[], None]


class Descent:
    """Flat gradients of a backward pass: each is filled by the hooks, reduced over the ranks where they are sharded, and handed to `Grads`.

    Asked by the autograd thread, which waits only while too many gradients are still on their way.
    """

    def __init__(
        self,
        grads: Grads,
        ranks: Ranks,
        share: Share,
        store: Store,
        slabs: SlabPool,
        clock: ComputeClock,
        device: torch.device,
        *,
        budget_bytes: int,
        deadline_s: float,
    ) -> None:
        self._grads, self._ranks, self._share, self._slabs, self._clock, self._device = grads, ranks, share, slabs, clock, device
        self._budget = Budget(tier_of(device), budget_bytes)
        self._lane = Lane.NVME_WRITE if store.holds(Tier.NVME, Group.GRAD) else Lane.DOWNLOAD
        self._deadline_s = deadline_s
        self._reducing: deque[_Reducing] = deque()
        """Collectives of this pass that are not known to be over, oldest first."""
        self._is_broken_off = False

    def buffer(self, unit: Unit, flat: int) -> Tensor:
        """A fresh buffer for a full flat gradient on the compute device, contents undefined."""
        rest = None if self._share.is_sharded(Group.GRAD) else self._grads.in_place(unit.layout.index, flat)
        if rest is not None:
            return rest
        layout = unit.layout.flats[flat]
        if self._device.type == "cuda":
            return torch.empty(layout.numel, dtype=layout.dtype, device=self._device)
        return self._slabs.take(layout.nbytes).view(layout.dtype)

    def flats_to_reduce(self, unit: Unit, begun: Collection[int]) -> Sequence[int]:
        """Those in `begun`; where ranks reduce, everything trained of the unit: another rank may have gradients where this one has none."""
        if not self._share.is_sharded(Group.GRAD):
            return sorted(begun)
        return [f for f, flat in enumerate(unit.layout.flats) if flat.trainable]

    def reduce(self, unit: Unit, flat: int, grad: Tensor, present: frozenset[int]) -> None:
        """A full flat gradient goes to rest; ownership passes."""
        if self._is_broken_off:
            return
        self._let_go()
        held = Held(footprint(grad.nbytes, self._device))
        layout = unit.layout.flats[flat]
        start = self._share.run(layout, Group.GRAD).start
        arrive = partial(self._grads.arrive, unit.layout.index, flat, start=start)
        try:
            if not self._budget.try_take(held):
                self._wait_for_room(held, unit.name)
            if self._share.is_sharded(Group.GRAD):
                both = _Both(partial(self._budget.give, held))
                name, then = unit.layout.flat_name(flat), partial(arrive, on_release=both.shard_has_landed)
                self._reducing.append(_Reducing(self._ranks.reduce(grad, present, len(layout.slots), name, then), both.ranks_have_let_go))
            else:
                arrive(grad, present, on_release=partial(self._budget.give, held))
        except BaseException:
            self._budget.give(held)  # it was not taken over, or nobody knows
            raise

    def _let_go(self) -> None:
        """Of what is over by now. Never waits."""
        while self._reducing and self._reducing[0].work.is_completed():
            oldest = self._reducing[0]
            try:
                oldest.work.wait()  # no longer than it takes to raise
            except Exception:
                self._reducing.popleft()
                raise
            oldest.give()
            self._reducing.popleft()
        self._grads.let_go()

    def _wait_for_room(self, held: Held, name: str) -> None:
        """Take it of what gradients on their way may hold. Raises RankError where one of them waits for a rank that is lost."""
        while self._wait_for_oldest(name):
            self._let_go()
            if self._budget.try_take(held):
                return
        with self._clock.waiting(self._lane, name):
            self._budget.take(held, f"the gradient of {name}", self._deadline_s)

    def _wait_for_oldest(self, name: str) -> bool:
        """Of those that no other thread lands: first between the ranks, then on its way down. False where there is none."""
        if self._reducing:
            with self._clock.waiting(Lane.COMM, name):
                self._reducing[0].work.wait()
            return True
        with self._clock.waiting(self._lane, name):
            return self._grads.land_oldest()

    def break_off(self) -> None:
        """The pass has raised on this rank. Where ranks reduce nothing more of it goes down: the others learn why from the end of this rank's
        program, and not from collectives that do not match theirs."""
        self._is_broken_off = self._share.is_sharded(Group.GRAD)

    def end(self) -> None:
        """The pass is over: from here on all ranks know the same gradients, and the current stream comes after them."""
        self._is_broken_off = False
        for reducing in self._reducing:
            if not reducing.work.is_completed():
                with self._clock.waiting(Lane.COMM, "the last gradients"):
                    follow(reducing.work)
        self._let_go()

    def drop(self) -> None:
        """Forget every gradient that came down since the last step."""
        self._grads.clear()


class _Both:
    """Leads on once two threads are done with a flat gradient. `then` may be called twice."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._has_landed = self._is_let_go = False

    def shard_has_landed(self) -> None:
        """What this rank keeps of it."""
        self._has_landed = True
        if self._is_let_go:
            self._then()

    def ranks_have_let_go(self) -> None:
        """The collective needs it no more."""
        self._is_let_go = True
        if self._has_landed:
            self._then()
