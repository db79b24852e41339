"""A parameter under the engine: live as a view of its unit's flat buffer, or at rest as a placeholder that fails loudly.

At rest its class is a subclass of `nn.Parameter`, so that Python code that reads it or its gradient is told so, while autograd in
C++ and everything that asks `isinstance(p, nn.Parameter)` see an ordinary parameter. Live, it has its own class again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from infinity.errors import ClosedError, TraceError
from infinity.sharding.layout import FlatLayout, Slot

WakeUp = Callable[[list["Seat"], str], None]
"""Makes the parameters of these seats live for the operation named, or raises TraceError."""

_Grad: Any = torch._C.TensorBase.__dict__["grad"]
_Data: Any = torch._C.TensorBase.__dict__["data"]
"""The attributes themselves, as autograd in C++ sees them."""


class Seat:
    """One parameter's place in its unit: where it lies in the flat buffer, and what stands for it at rest."""

    def __init__(
        self, name: str, param: nn.Parameter, flat_index: int, slot_index: int, flat: FlatLayout, device: torch.device, wake_up: WakeUp, guard: bool
    ) -> None:
        self.name, self.param = name, param
        self.flat_index, self.slot_index, self.slot = flat_index, slot_index, flat.slots[slot_index]
        self.trainable = flat.trainable
        self.placeholder = placeholder(self.slot, flat.dtype, device)
        self.wake_up = wake_up
        self.plain_class: type[nn.Parameter] = type(param)
        self.resting_class: type[nn.Parameter] = GuardedParameter if guard else RestingParameter
        self.is_held = False
        """The engine holds this parameter's gradient: `p.grad` raises."""

    def show(self) -> None:
        """While a live parameter is in the user's hands: values are readable, a gradient that the engine holds still is not."""
        self.param.__class__ = RestingParameter

    def take_grad(self) -> Tensor | None:
        """The gradient that autograd has just left on the parameter, which loses it."""
        if type(self.param) is self.plain_class:
            grad: Tensor | None = self.param.grad
            self.param.grad = None
            return grad
        with torch._C.DisableTorchFunctionSubclass():
            grad = _Grad.__get__(self.param)
            _Grad.__set__(self.param, None)
        return grad


def refuse_use(seats: Sequence[Seat], operation: str) -> NoReturn:
    """In place of `Seat.wake_up` once the engine is closed, of which this function holds nothing. Raises ClosedError."""
    raise ClosedError(f"{operation} needs the values of parameter {seats[0].name!r}, whose engine is closed: call infinity.initialize again")


def refuse_grad(param: Tensor) -> None:
    """For autograd to call once a gradient is on the parameter of a closed engine, of which this function holds nothing. Raises ClosedError."""
    with torch._C.DisableTorchFunctionSubclass():
        _Grad.__set__(param, None)
    raise ClosedError("a gradient has come after the engine was closed: call infinity.initialize again")


def placeholder(slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element expanded to the slot's shape: NaN, or the largest value where the dtype has no NaN."""
    if slot.is_complex:
        dtype = dtype.to_complex()
    has_nan = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if has_nan else 1 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.tensor(value, device=device).to(dtype).expand(slot.shape)


def seat_of(param: nn.Parameter) -> Seat:
    """The seat of a parameter that an engine has taken over."""
    seat: Seat = param.__dict__["_infinity_seat"]
    return seat


class RestingParameter(nn.Parameter):
    """A parameter in the engine's hands: its gradient, copies and pickles are refused in words."""

    @property
    def grad(self) -> Tensor | None:
        seat = seat_of(self)
        if seat.is_held:
            raise TraceError(
                f"the gradient of {seat.name!r} is held by the engine, in the tier of its placement. Clip with optimizer.max_grad_norm, "
                "and clear with engine.optimizer.zero_grad(): torch's own clipping, scaling and optimizers cannot see it."
            )
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = _Grad.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        seat = seat_of(self)
        if seat.is_held or value is not None:
            raise TraceError(
                f"the engine holds the gradient of {seat.name!r}: clear it with engine.optimizer.zero_grad(). It cannot be set from outside"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TraceError(
            f"parameter {seat_of(self).name!r} cannot be copied: the engine holds its values. Copy the model before infinity.initialize, "
            "read values with engine.gathered(module), or take them all with model.state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TraceError(
            f"parameter {seat_of(self).name!r} cannot be pickled: the engine holds its values. "
            "Save with engine.save(path), or torch.save(model.state_dict(), path)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        seat = seat_of(self)
        return f"Parameter {seat.name!r} at rest: shape {tuple(seat.slot.shape)}, {seat.placeholder.dtype}, values with the engine"


class GuardedParameter(RestingParameter):
    """At rest, with every operation that needs values caught: it wakes the unit inside a forward or backward, and raises outside."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or _changes_nothing(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        seats = [seat_of(param) for param in _guarded((args, kwargs))]
        seats[0].wake_up(seats, _operation(func))
        return func(*args, **kwargs)


def _guarded(tree: Any) -> Iterator[GuardedParameter]:
    if isinstance(tree, GuardedParameter):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _guarded(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _guarded(item)


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is `p.to(its own device and dtype)` or `p.data = p`, which modules do when they are moved to where they are."""
    if func == _Data.__set__:
        return args[1] is args[0]
    if func is not Tensor.to or kwargs.get("copy") or not isinstance(args[0], GuardedParameter):
        return False
    device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    at_rest = seat_of(args[0]).placeholder
    return (device is None or torch.device(device) == at_rest.device) and dtype in (None, at_rest.dtype)


def _operation(func: Any) -> str:
    """A name a reader knows: `norm`, `linear`, `.data`."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return "." + str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
    return str(name)


_ATTRIBUTES = (
    "_backward_hooks _base _cdata _grad_fn _post_accumulate_grad_hooks _version device dtype grad_dtype grad_fn is_cpu is_cuda is_leaf is_maia "
    "is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name names nbytes ndim "
    "output_nr requires_grad retains_grad shape"
)
_METHODS = (
    "__hash__ __len__ _is_view dim element_size get_device is_complex is_distributed is_floating_point is_inference is_same_size is_shared is_signed "
    "ndimension nelement new_empty new_full new_ones new_zeros numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size"
)
_FUNCTIONS = (
    "_has_compatible_shallow_copy_type empty_like full_like is_complex is_floating_point is_inference is_same_size is_signed numel ones_like "
    "rand_like randn_like result_type zeros_like"
)


def _metadata() -> frozenset[Any]:
    """What can be asked of a parameter without its values. torch versions differ in which of these exist."""
    attributes: list[Any] = [getattr(Tensor, name) for name in _ATTRIBUTES.split() if hasattr(Tensor, name)]
    found: list[Any] = [attribute.__get__ for attribute in attributes if hasattr(attribute, "__get__")]
    found += [getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name)]
    requires_grad: Any = Tensor.requires_grad
    return frozenset([*found, requires_grad.__set__, torch.autograd.grad])


_METADATA = _metadata()
