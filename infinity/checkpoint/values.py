"""Python values as JSON and tensors, exactly and without pickle: what `state_dict()` of a scheduler, a loader or a generator holds.

JSON keeps None, bool, int, str, finite floats, lists and dicts with string keys as they are. Everything else is an object with one
key that starts with "%", as `{"%tuple": [1, 2]}`. Tensors come back on the CPU, subclasses of tensors as plain ones.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from infinity.checkpoint.tensorfile import DTYPES, as_bytes
from infinity.errors import CheckpointError
from infinity.storage.shardfile import DTYPE_NAMES

Put = Callable[[torch.Tensor, str], Any]
"""(real, contiguous CPU tensor, path of the value) -> the JSON that stands for it."""
Get = Callable[[Any], torch.Tensor]

_ARRAY_KINDS = "biufcSUmM"
"""Kinds of numpy dtypes that their `str` describes completely."""


def to_json(value: object) -> Any:
    """`value` as one JSON value, tensors in base64. Raises CheckpointError naming what cannot be kept, by its path."""
    return encode(value, _inline)


def from_json(json: Any) -> Any:
    """The value that `to_json` was given."""
    return decode(json, _from_inline)


def encode(value: object, put: Put) -> Any:
    """`value` as JSON, with tensors wherever `put` puts them. Raises CheckpointError naming what cannot be kept, by its path."""
    return _Encoder(put).encode(value, "")


def decode(json: Any, get: Get) -> Any:
    """The value that `encode` was given. Raises CheckpointError when `json` is not what `encode` makes."""
    try:
        return _decode(json, get)
    except CheckpointError:
        raise  # a tensor's, which names its file
    except (KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"a saved value cannot be read: {error!r}") from error


class _Encoder:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._open: set[int] = set()
        """Containers that we are inside of."""

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"%float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return {"%tensor": self._tensor(value, path)}
        if kind in (list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, torch.Size):
            return self._container(value, path)
        return self._atom(value, path)

    def _atom(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in (bytes, bytearray):
            return {f"%{kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"%complex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is torch.dtype:
            return {"%dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"%device": str(value)}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            data = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]
            return {"%array": [value.dtype.str, list(value.shape), self._put(data, path)]}
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return {"%scalar": [value.dtype.str, value.tobytes().hex()]}
        raise CheckpointError(
            f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept without pickle: "
            "let state_dict() return tensors, numbers, strings, lists, tuples and dicts"
        )

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        plain = value.detach()
        if plain.layout != torch.strided or plain.is_quantized or type(plain) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(f"{path or 'the value'} is a {type(value).__name__} with layout {plain.layout}: only dense tensors can be kept")
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
        if plain.is_complex():
            return {"complex": self._tensor(torch.view_as_real(plain), path)}
        if plain.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path or 'the value'} is a tensor of {plain.dtype}, which safetensors does not know: cast it in state_dict()")
        return self._put(plain, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path} contains itself: such a value cannot be kept")
        self._open.add(id(value))
        kind = type(value)
        try:
            if kind is dict and all(type(key) is str and not key.startswith("%") for key in value):
                return {key: self.encode(item, _join(path, key)) for key, item in value.items()}
            if isinstance(value, dict):
                pairs = [[self.encode(key, f"a key of {path}"), self.encode(item, _join(path, key))] for key, item in value.items()]
                return {f"%{kind.__name__}": pairs}
            items = [self.encode(item, _join(path, index)) for index, item in enumerate(value)]
            if kind is deque:
                return {"%deque": [value.maxlen, items]}
            return items if kind is list else {f"%{kind.__name__}": items}
        finally:
            self._open.remove(id(value))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _decode(json: Any, get: Get) -> Any:
    if isinstance(json, list):
        return [_decode(item, get) for item in json]
    if not isinstance(json, dict):
        return json
    if not (len(json) == 1 and next(iter(json)).startswith("%")):
        return {key: _decode(item, get) for key, item in json.items()}
    ((tag, body),) = json.items()
    return _READERS[tag](body, get)


def _pairs(body: Any, get: Get) -> list[tuple[Any, Any]]:
    return [(_decode(key, get), _decode(item, get)) for key, item in body]


def _tensor(body: Any, get: Get) -> torch.Tensor:
    if isinstance(body, dict) and set(body) == {"complex"}:
        return torch.view_as_complex(get(body["complex"]))
    return get(body)


def _array(body: Any, get: Get) -> np.ndarray[Any, Any]:
    dtype, shape, data = body
    return np.ndarray(shape, np.dtype(dtype), bytearray(get(data).numpy().tobytes()))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


_READERS: dict[str, Callable[[Any, Get], Any]] = {
    "%float": lambda body, get: struct.unpack(">d", bytes.fromhex(body))[0],
    "%complex": lambda body, get: complex(*struct.unpack(">dd", bytes.fromhex(body))),
    "%bytes": lambda body, get: base64.b64decode(body),
    "%bytearray": lambda body, get: bytearray(base64.b64decode(body)),
    "%dtype": lambda body, get: _dtype(body),
    "%device": lambda body, get: torch.device(body),
    "%tensor": _tensor,
    "%array": _array,
    "%scalar": lambda body, get: np.ndarray((), np.dtype(body[0]), bytearray.fromhex(body[1]))[()],
    "%tuple": lambda body, get: tuple(_decode(body, get)),
    "%Size": lambda body, get: torch.Size(body),
    "%set": lambda body, get: set(_decode(body, get)),
    "%frozenset": lambda body, get: frozenset(_decode(body, get)),
    "%deque": lambda body, get: deque(_decode(body[1], get), maxlen=body[0]),
    "%dict": lambda body, get: dict(_pairs(body, get)),
    "%OrderedDict": lambda body, get: OrderedDict(_pairs(body, get)),
    "%Counter": lambda body, get: Counter(dict(_pairs(body, get))),
}


def _inline(tensor: torch.Tensor, path: str) -> Mapping[str, object]:
    data = as_bytes(tensor).numpy().tobytes()
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "base64": base64.b64encode(data).decode()}


def _from_inline(body: Any) -> torch.Tensor:
    data = bytearray(base64.b64decode(body["base64"]))
    flat = torch.frombuffer(data, dtype=DTYPES[body["dtype"]]) if data else torch.empty(0, dtype=DTYPES[body["dtype"]])
    return flat.view(body["shape"])
