"""Build a model that fits in no memory in one piece, with the very values that plain construction would give it.

The user's function runs for real, on the CPU, op after op: no replay, so initial values, buffers and the random number generator
come out equal to eager construction to the bit. Only the memory differs: storages of at least `spill_bytes` are shared mappings
of unlinked files, written out as the construction goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from infinity.errors import ConfigError
from infinity.runtime.filled import FillMap
from infinity.runtime.spool import WINDOW_BYTES, Spool
from infinity.sizes import KiB, MiB

aten = torch.ops.aten
Op = torch._ops.OpOverload


def build(builder: Callable[[], nn.Module], spool_dir: str, *, window_bytes: int = WINDOW_BYTES, spill_bytes: int = MiB) -> nn.Module:
    """As `build_in`, in a spool of its own."""
    return build_in(Spool(spool_dir, window_bytes), builder, spill_bytes=spill_bytes)


def build_in(spool: Spool, builder: Callable[[], nn.Module], *, spill_bytes: int = MiB) -> nn.Module:
    """Run `builder` and return its module, whose large storages are file-backed and die with their last tensor.

    At most about the spool's window of them, and one tensor as temporary, are in memory at a time. Raises ConfigError for parameters
    and buffers that are not on the CPU or were never filled, all by name, and StorageError when the spool's disk is full. What `builder`
    raises passes through; no file is left in any case. Tensors that come from outside torch's operators (numpy, files) count
    as filled.
    """
    mode = Spooling(spool, spill_bytes)
    with mode:
        module = checked_module(builder())
    check_home(module)
    _check_filled(module, mode.fills)
    spool.flush()
    return module


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def checked_module(module: object) -> nn.Module:
    """What a builder returned. Raises ConfigError when it is no module."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the model builder returned {type(module).__name__}, not a torch.nn.Module: return the finished model")
    return module


def check_home(module: nn.Module) -> None:
    """Raise ConfigError for parameters and buffers without a shape, or not on the CPU, by name."""
    lazy = [name for name, tensor in _named_tensors(module) if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ConfigError(f"lazy parameters have no shape yet: {', '.join(lazy)}. Run one forward inside the builder, or give fixed shapes")
    away = [f"{name} ({tensor.device})" for name, tensor in _named_tensors(module) if tensor.device.type != "cpu"]
    if away:
        raise ConfigError(
            f"the model builder left tensors off the CPU: {', '.join(away)}. Leave device out, or pass device='cpu': "
            "large tensors go to files as they are built, so there is nothing to save with device='meta'"
        )


def _check_filled(module: nn.Module, fills: FillMap) -> None:
    unfilled = [name for name, tensor in _named_tensors(module) if is_plain(tensor) and not fills.is_filled(tensor)]
    if unfilled:
        raise ConfigError(
            f"the model builder left tensors without values: {', '.join(unfilled)}. Initialise them inside the builder "
            "(torch.nn.init, or in-place torch operators; writes through numpy cannot be seen)"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has a CPU storage of its own: not sparse, not a subclass made of other tensors."""
    wrapped = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized and not wrapped


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators that return memory without values."""

_OVERWRITE = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
"""In-place operators that never read what they overwrite."""

_PIECEWISE = {aten.fill_.Scalar, aten.zero_.default, aten.normal_.default, aten.uniform_.default, aten.copy_.default}
"""Operators that give the same bits, and draw the same random numbers, when a long contiguous tensor is worked off in pieces of
whole 16s of elements: torch's CPU normal_ draws serially and transforms groups of 16, the last one anew when it is short."""

_GROUP = 16


def _filler(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Op, tuple[Any, ...], dict[str, Any]] | None:
    """The in-place operator that makes an empty tensor what the factory `func` returns, with its arguments after self."""
    name = func._schema.name.removeprefix("aten::")
    generator = {"generator": kwargs["generator"]} if "generator" in kwargs else {}
    if name in ("zeros", "zeros_like", "new_zeros"):
        return aten.zero_.default, (), {}
    if name in ("ones", "ones_like", "new_ones"):
        return aten.fill_.Scalar, (1,), {}
    if name in ("full", "full_like", "new_full") and "fill_value" not in kwargs:
        return aten.fill_.Scalar, (args[2 if name == "new_full" else 1],), {}
    if name in ("rand", "rand_like"):
        return aten.uniform_.default, (), generator
    if name in ("randn", "randn_like"):
        return aten.normal_.default, (), generator
    if name in ("clone", "_to_copy"):
        return aten.copy_.default, (args[0],), {}
    return None


class Spooling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives large tensors file-backed storages, and keeps book of what was filled."""

    def __init__(self, spool: Spool, spill_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fills = FillMap(self._blank_flags)
        self._spool = spool
        self._spill_bytes = max(1, spill_bytes)
        self._piece_bytes = max(spool.window_bytes // 4, 64 * KiB)

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):  # type: ignore[attr-defined]
            return NotImplemented  # a subclass unwraps itself; its inner tensors come here one by one
        kwargs = kwargs or {}
        written, read = _split(func, args, kwargs)
        before = [(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()) for tensor in written]
        values = _reads_shapes_only(func) or all(map(self.fills.is_filled, read))
        out = self._run(func, args, kwargs)
        for tensor, (storage, nbytes) in zip(written, before, strict=True):
            if tensor.untyped_storage()._cdata == storage and tensor.untyped_storage().nbytes() > nbytes:
                self.fills.blank(tensor)  # it was resized
            if _overwrites(func) or not values:
                self.fills.write(tensor, values)
        return self._adopt(func, out, [*read, *written], values and func not in _EMPTY)

    def _run(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _PIECEWISE and self._worth_cutting(args):
            return self._run_in_pieces(func, args[0], args[1:], kwargs)
        filler = _filler(func, args, kwargs)
        shape = _shape_of_result(func, args, kwargs) if filler is not None or func in _EMPTY else None
        if shape is None or shape.untyped_storage().nbytes() < self._spill_bytes:
            return self._call(func, args, kwargs)
        out = self._spool.empty(tuple(shape.shape), shape.stride(), shape.dtype)
        if filler is not None and filler[0] is not aten.zero_.default:  # a fresh file reads as zeros
            self._run(filler[0], (out, *filler[1]), filler[2])
        return out

    def _call(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and is_plain(leaf) and self._spool.holds(leaf):
                self._spool.touched(leaf)
        return out

    def _worth_cutting(self, args: tuple[Any, ...]) -> bool:
        target = args[0]
        if target.nbytes <= self._piece_bytes or not self._spool.holds(target) or not target.is_contiguous():
            return False
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else target
        return is_plain(source) and source.shape == target.shape and source.is_contiguous()

    def _run_in_pieces(self, func: Op, target: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        flat = target.view(-1)
        step = self._piece_bytes // (flat.element_size() * _GROUP) * _GROUP
        start = 0
        while start < len(flat):
            stop = start + step if start + step + _GROUP <= len(flat) else len(flat)
            pieces = [value.view(-1)[start:stop] if isinstance(value, torch.Tensor) else value for value in rest]
            self._call(func, (flat[start:stop], *pieces), kwargs)
            start = stop
        return target

    def _adopt(self, func: Op, out: Any, known: list[torch.Tensor], filled: bool) -> Any:
        """Move large fresh results to files, and note whether they hold values."""
        storages = {tensor.untyped_storage()._cdata for tensor in known}

        def adopt(tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor) or tensor.untyped_storage()._cdata in storages or func is aten.lift_fresh.default:
                return tensor
            if self._spill_bytes <= tensor.nbytes == tensor.untyped_storage().nbytes() and not self._spool.holds(tensor):
                tensor = self._spool.empty(tuple(tensor.shape), tensor.stride(), tensor.dtype).copy_(tensor)
                self._spool.touched(tensor)
            if not filled:
                self.fills.blank(tensor)
            return tensor

        return tree_map_only(torch.Tensor, adopt, out)

    def _blank_flags(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bool) if count < self._spill_bytes else self._spool.empty((count,), (1,), torch.bool)


def _split(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The plain tensors that `func` writes, and those whose values it uses."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and is_plain(leaf)]
        (written if argument.alias_info is not None and argument.alias_info.is_write else read).extend(tensors)
    return written, read


def _reads_shapes_only(func: Op) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _overwrites(func: Op) -> bool:
    """Whether every written argument gets new values whatever it held: `fill_` and its kin, and out= variants."""
    name = func._schema.name.removeprefix("aten::")
    return name in _OVERWRITE or any(a.is_out for a in func._schema.arguments)


def _shape_of_result(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What a factory would return, on the meta device; None when it would not be a plain CPU tensor."""
    device = kwargs.get("device")
    sources = [a for a in args if isinstance(a, torch.Tensor)]
    home = torch.device(device) if device is not None else sources[0].device if sources else torch.device("cpu")
    if home.type != "cpu" or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided) or not all(map(is_plain, sources)):
        return None
    metas = tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args)
    result = func(*metas, **{**kwargs, **_if_taken(func, device="meta", generator=None, pin_memory=None)})
    return result if isinstance(result, torch.Tensor) and result.numel() else None


def _if_taken(func: Op, **values: Any) -> dict[str, Any]:
    names = {argument.name for argument in func._schema.arguments}
    return {name: value for name, value in values.items() if name in names}
