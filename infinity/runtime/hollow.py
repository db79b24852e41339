"""A model with shapes and without values: built on the meta device, for a rank that receives its values from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.runtime.builder import Spooling, check_home, checked_module
from infinity.runtime.spool import Spool
from infinity.runtime.tensors import tensors_in
from infinity.sizes import MiB


def build_hollow_in(spool: Spool, builder: Callable[[], nn.Module]) -> nn.Module:
    """Run `builder` on the meta device and return its module, on the CPU: parameters are one element, expanded, and buffers undefined memory.

    Both are the objects that the builder made, wherever else it keeps them. What it puts on the CPU by name goes to the spool. Raises
    ConfigError for what does not hold without values: a tensor that is neither a parameter nor a buffer, one that autograd, a hook or a view
    holds by its memory. What `builder` raises passes through.
    """
    with Spooling(spool, MiB), torch.device("meta"):
        module = checked_module(builder())
    for name, param in module.named_parameters():
        if param.is_meta:
            _land(name, param, torch.empty((), dtype=param.dtype).expand(param.shape))
    storages: dict[int, torch.UntypedStorage] = {}
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            _land(name, buffer, _memory_of(buffer, storages))
    strays = list(_strays(module))
    if strays:
        raise ConfigError(f"{', '.join(strays)}: a tensor that is neither a parameter nor a buffer")
    check_home(module)
    spool.flush()
    return module


def _memory_of(buffer: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Undefined memory laid out as the buffer; those that share a storage go on doing so."""
    meant = buffer.untyped_storage()
    storage = storages.setdefault(meant._cdata, torch.UntypedStorage(meant.nbytes()))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=buffer.dtype).set_(storage, buffer.storage_offset(), buffer.shape, buffer.stride())


def _land(name: str, tensor: Tensor, memory: Tensor) -> None:
    """Put a tensor of the meta device on the CPU. It stays the object that it is."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    if uses > 1 or not tensor.is_leaf or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # these would stay behind
        raise ConfigError(f"{name} has a hook or a view, or was used under autograd")
    twin = torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]


def _strays(module: nn.Module) -> Iterator[str]:
    """Attributes of modules that still have tensors on the meta device."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if any(tensor.is_meta for tensor in tensors_in(value)):
                yield f"{prefix}.{name}" if prefix else name
