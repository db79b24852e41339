"""Tensors in the arguments of the model's calls go to the compute device, so that a plain loop need not name it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle


def move_arguments(model: nn.Module, device: torch.device) -> RemovableHandle:
    """From now on every tensor in tuples, lists and dicts of `model`'s arguments is moved to `device`; one that is there stays as it is."""

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        return moved

    return model.register_forward_pre_hook(move, prepend=True, with_kwargs=True)
