"""What a checkpoint directory holds: `manifest.json`, and the safetensors files that it names.

Tensors are whole parameters and moments by name, so a checkpoint knows nothing of units, chunks, placement, paths or shards; of ranks
it knows what each kept of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity import native
from infinity.checkpoint.tensorfile import DTYPES, Entry, Layout
from infinity.errors import CheckpointError
from infinity.kinds import State
from infinity.sharding.layout import Interval
from infinity.storage.shardfile import DTYPE_NAMES

FORMAT = "infinity-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


class NamedState(Protocol):
    """One whole tensor of a checkpoint: a state of a parameter. Trained ones have MASTER, EXP_AVG, EXP_AVG_SQ; frozen ones PARAM."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class StateSource(Protocol):
    """Where the states of a checkpoint come from, in pieces."""

    def tensors(self) -> Sequence[NamedState]: ...

    def share(self, name: str) -> Sequence[Interval]:
        """The runs of elements of a parameter's states that this rank writes, in rising order: each element is in one rank's share."""

    def read(self, name: str, state: State, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor: flat, contiguous, on the CPU."""


class StateSink(Protocol):
    """Where the states of a checkpoint go, in pieces."""

    def tensors(self) -> Sequence[NamedState]: ...

    def held(self, name: str) -> Sequence[Interval]:
        """The runs of elements of a parameter's states that rest on this rank, in rising order."""

    def write(self, name: str, state: State, start: int, values: torch.Tensor) -> None:
        """Put `values` (flat, CPU, valid during the call only) at element `start` of the flattened tensor."""


def state_key(name: str, state: State) -> str:
    """What a state is called in its safetensors file."""
    return f"{state}|{name}"


def extra_file(rank: int) -> str:
    """Where the tensors are that a rank keeps beside states."""
    return f"extra-{rank:05d}.safetensors" if rank else "extra.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """What an export needs to know beside the states."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which a parameter is trained, where it is not that of its stored state."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied parameters: name -> the name that is stored."""

    buffers: Mapping[str, str] = field(default_factory=dict)
    """Buffers that belong to the weights: name -> the key of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The table of contents."""

    step: int
    files: Mapping[str, Sequence[Entry]]
    """File name -> its tensors."""
    crcs: Mapping[str, int]
    """Key of a tensor -> CRC-32C of its bytes."""
    weights: Weights
    extras: Sequence[Any]
    """Each rank's values as `values.encode` made them; a tensor is the key of one in the rank's `extra_file`."""

    def states(self) -> dict[str, Entry]:
        """Every stored tensor that is a state, by key."""
        beside = {extra_file(rank) for rank in range(len(self.extras))}
        return {entry.key: entry for file, entries in self.files.items() if file not in beside for entry in entries}

    def layouts(self) -> dict[str, Layout]:
        return {name: Layout(entries) for name, entries in self.files.items()}

    def dump(self) -> str:
        """JSON with a checksum of itself."""
        table = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": {name: [_entry_to_json(entry, self.crcs[entry.key]) for entry in entries] for name, entries in self.files.items()},
            "dtypes": {name: DTYPE_NAMES[dtype] for name, dtype in self.weights.dtypes.items()},
            "aliases": dict(self.weights.aliases),
            "buffers": dict(self.weights.buffers),
            "extra": self.extras[0],
            **({"other_extras": list(self.extras[1:])} if len(self.extras) > 1 else {}),
        }
        return json.dumps({**table, "crc32c": _crc(table)}, indent=1, allow_nan=False)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises CheckpointError naming the file when it is missing, damaged, or of another format or version."""
        path = directory / MANIFEST
        try:
            table = json.loads(path.read_bytes())
            crc = table.pop("crc32c")
            kind = (table["format"], table["version"])
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: {directory} is not a complete checkpoint") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a manifest: {error!r}. Use another checkpoint") from error
        if kind != (FORMAT, VERSION):
            raise CheckpointError(f"{path} is {kind[0]!r} version {kind[1]!r}; this program reads {FORMAT!r} version {VERSION}")
        if crc != _crc(table):
            raise CheckpointError(f"{path} does not match its own checksum: it was changed or damaged. Use another checkpoint")
        return _from_json(table)


def _from_json(table: Any) -> Manifest:
    entries = [entry for file in table["files"].values() for entry in file]
    if bad := [name for name in table["files"] if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]:
        raise CheckpointError(f"the manifest names {bad[0]!r}, which is not a file name")
    return Manifest(
        step=table["step"],
        files={name: [Entry(e["key"], DTYPES[e["dtype"]], tuple(e["shape"])) for e in file] for name, file in table["files"].items()},
        crcs={entry["key"]: entry["crc32c"] for entry in entries},
        weights=Weights({name: DTYPES[dtype] for name, dtype in table["dtypes"].items()}, table["aliases"], table["buffers"]),
        extras=[table["extra"], *table.get("other_extras", [])],
    )


def _entry_to_json(entry: Entry, crc: int) -> dict[str, object]:
    return {"key": entry.key, "dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "bytes": entry.nbytes, "crc32c": crc}


def _crc(table: Mapping[str, object]) -> int:
    """Of the JSON in its shortest form, so that white space does not count."""
    text = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
    return native.crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8))
