"""A unit's parameters become views of its flat buffers while it is live, and placeholders again when it is released."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import gt
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import TraceError
from infinity.runtime.cutter import Cutters
from infinity.runtime.flat_grads import FlatGrads
from infinity.runtime.parameter import Seat, WakeUp
from infinity.runtime.residency import Residency
from infinity.runtime.units import Unit


class AttachedUnit:
    """A unit of a running model: live or at rest, and who needs it live."""

    def __init__(self, unit: Unit, residency: Residency, cutters: Cutters, device: torch.device, wake_up: WakeUp, guard: bool) -> None:
        self.unit = unit
        self.flats: list[Tensor] | None = None
        """Full flat buffers while live, None at rest."""
        self.users = 0
        """Calls in progress that need the unit live; with none it is released when the next unit comes."""
        self.in_use = False
        """`users > 0`, and `caller` the module whose call was the first: what compiled code may guard on without recompiling."""
        self.caller: nn.Module | None = None
        self._cutters = [cutters.of(flat) for flat in unit.layout.flats]
        self.grads = FlatGrads(unit, residency, self._cutters)
        self.parents: frozenset[AttachedUnit] = frozenset()
        """Units whose module contains this one's: in backward they stay live beside it."""
        self.is_writable = False
        """Values may be changed in place now; the release commits them."""
        self.is_shown = False
        """In the user's hands, who may write past torch's notice (`p.data`)."""
        self.began_ns = 0
        self._uses: list[int] = []
        """Of each flat buffer's storage, before the parameters became views of it."""
        self._version = unit.version
        self._versions = 0
        self._holders: tuple[list[int], list[int]] = [], []
        self._trained: list[Any] = [param for param in unit.params if param.requires_grad]
        self._frozen: list[Any] = [param for param in unit.params if not param.requires_grad]
        params = dict(zip(unit.names, unit.params, strict=True))
        self.seats = [
            Seat(slot.name, params[slot.name], f, s, flat, device, wake_up, guard)
            for f, flat in enumerate(unit.layout.flats)
            for s, slot in enumerate(flat.slots)
        ]
        self._params: list[Any] = [seat.param for seat in self.seats]
        self._plain_classes = [seat.plain_class for seat in self.seats]
        self._resting_classes = [seat.resting_class for seat in self.seats]
        self._placeholders = [seat.placeholder for seat in self.seats]
        self._trainable = [seat.trainable for seat in self.seats]

    def take_over(self) -> None:
        """Put the placeholders in. Whoever built the units has the values by now."""
        for seat in self.seats:
            seat.param.__dict__["_infinity_seat"] = seat
        self.rest()

    def use(self, caller: nn.Module) -> None:
        """A call that needs the unit live has begun."""
        self.users += 1
        if self.users == 1:
            self.in_use, self.caller = True, caller

    def unuse(self) -> None:
        """That call is over."""
        self.users -= 1
        if self.users == 0:
            self.in_use, self.caller = False, None

    def rise(self, flats: Sequence[Tensor]) -> None:
        """Make every parameter a view of `flats`, one 1-D tensor per flat of the layout."""
        places = self._places(flats)
        self._uses = [_count_uses(flat) for flat in flats]
        for param, plain_class, place in zip(self._params, self._plain_classes, places, strict=True):
            param.__class__ = plain_class
            param.data = place
        self._version = self.unit.version
        self._versions = self._count_versions()
        self._holders = self._count_holders()
        self.flats = list(flats)  # last: after an interrupt in the middle the unit is not live

    def _places(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Every seat's view of its flat buffer."""
        return [place for flat, cutter in zip(flats, self._cutters, strict=True) for place in cutter.cut(flat).places]

    def is_regraded(self) -> bool:
        """Whether `requires_grad` of a live parameter is not what it was when the files were laid out."""
        with torch._C.DisableTorchFunctionSubclass():  # a user's own Parameter class may have one
            return [param.requires_grad for param in self._params] != self._trainable

    def regraded(self) -> TraceError:
        """What that leads to."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = next(seat for seat in self.seats if seat.param.requires_grad is not seat.trainable)
        was = "trainable" if changed.trainable else "frozen"
        return TraceError(
            f"requires_grad of {changed.name!r} is now {not changed.trainable}, but it was {was} when the engine laid out its files. "
            "Set it back, or freeze and thaw before infinity.initialize"
        )

    def is_outdated(self) -> bool:
        """Whether the unit's values were updated since it came."""
        return self._version != self.unit.version

    def is_kept(self) -> bool:
        """Whether autograd or a checkpoint has saved a live parameter as itself since the unit came: after the release it would be a placeholder.

        Happens inside backward only, where parts of a model run forward outside of hooked calls. A trained parameter is held by itself
        and its gradient accumulator, by each operation that saved it on top of that; a frozen one has no accumulator, and checkpoints
        hold it from Python.
        """
        trained, frozen = self._count_holders()
        before_trained, before_frozen = self._holders
        return any(map(gt, trained, before_trained)) or any(map(gt, frozen, before_frozen))

    def show(self) -> None:
        """Live parameters are in the user's hands: values can be read and changed, held gradients still raise."""
        self.is_shown = True
        for seat in self.seats:
            seat.show()

    def absorb(self) -> TraceError | None:
        """What the user put in a parameter's place (`p.data = values`) goes into the flat buffer, or the error that forbids it."""
        assert self.flats is not None
        pairs = list(zip(self.seats, self._places(self.flats), strict=True))
        for seat, place in pairs:
            if seat.param.shape != place.shape:
                return TraceError(
                    f"{seat.name!r} was given shape {tuple(seat.param.shape)}, but the engine laid it out as {tuple(place.shape)}: nothing of unit "
                    f"{self.unit.name!r} is changed. Give it values of its own shape, or change the model before infinity.initialize"
                )
        with torch.no_grad():
            for seat, place in pairs:
                if seat.param.data_ptr() != place.data_ptr():
                    place.copy_(seat.param)
        return None

    def is_modified(self) -> bool:
        """Whether a live parameter was written to in place, as far as torch counts it (not through `.data`)."""
        return self._count_versions() != self._versions

    def modified(self) -> TraceError:
        """What a write to a live parameter during forward or backward leads to: its release would lose it."""
        names = ", ".join(self.unit.names[:4]) + (", ..." if len(self.unit.names) > 4 else "")
        return TraceError(
            f"a parameter of unit {self.unit.name!r} ({names}) was changed in place during forward or backward, and the change is lost. "
            "Change values under `with engine.gathered(module):`, or keep what the forward updates in a buffer"
        )

    def rest(self) -> bool:
        """Drop the flat buffers; every parameter is a placeholder again. True when something else still holds their memory."""
        flats, self.flats = self.flats or [], None
        for param, plain_class, placeholder, resting_class in zip(
            self._params, self._plain_classes, self._placeholders, self._resting_classes, strict=True
        ):
            param.__class__ = plain_class
            param.data = placeholder
            param.__class__ = resting_class
        return [_count_uses(flat) for flat in flats] != self._uses

    def leave(self, flats: Sequence[Tensor], device: torch.device) -> None:
        """Give every parameter values of its own on `device`, and its own class: the engine is done with it."""
        self.flats = None
        for seat in self.seats:
            seat.param.__class__ = seat.plain_class
            seat.param.data = seat.slot.view(flats[seat.flat_index]).to(device, copy=True)
            del seat.param.__dict__["_infinity_seat"]

    def _count_holders(self) -> tuple[list[int], list[int]]:
        trained = [max(param._use_count(), 2) for param in self._trained]
        return trained, [sys.getrefcount(param) + param._use_count() for param in self._frozen]

    def _count_versions(self) -> int:
        return sum([param._version for param in self._params])


def _count_uses(flat: Tensor) -> int:
    """How many tensors share the memory, this one and whoever asks included."""
    uses: int = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
    return uses
