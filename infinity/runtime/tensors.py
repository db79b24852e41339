"""Tensors inside the containers that modules take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

MAX_DEPTH = 6
"""Containers nested deeper than this are not looked into."""


def tensors_in(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, mappings and objects with attributes (dataclasses, caches), modules left out."""
    if isinstance(tree, Tensor):
        yield tree
    elif tree is None or isinstance(tree, (str, bytes, int, float, bool, nn.Module, type)) or depth > MAX_DEPTH:
        return
    elif isinstance(tree, (tuple, list, set, frozenset)):
        for item in tree:
            yield from tensors_in(item, depth + 1)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item, depth + 1)
    else:
        for item in _attributes(tree):
            yield from tensors_in(item, depth + 1)


def _attributes(thing: Any) -> Iterator[Any]:
    """The values of an object's attributes, in its dictionary and its slots; nothing of functions and modules of code."""
    if hasattr(thing, "__code__") or hasattr(thing, "__loader__"):
        return
    yield from getattr(thing, "__dict__", {}).values()
    for name in getattr(type(thing), "__slots__", ()):
        yield getattr(thing, name, None)
