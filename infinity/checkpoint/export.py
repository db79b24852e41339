"""A checkpoint's weights as plain safetensors, named and sharded as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.checkpoint.format import Manifest
from infinity.checkpoint.load import Files
from infinity.checkpoint.staged import staged_directory, staged_file, write_text
from infinity.checkpoint.tensorfile import Entry, Layout, TensorWriter, deal, make_file
from infinity.kinds import State
from infinity.sharding.layout import Interval

SHARD_BYTES = 5_000_000_000
"""Largest file, as in transformers' save_pretrained."""

_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class _Weight:
    """One stored state that is exported."""

    name: str
    state: State
    dtype: torch.dtype
    shape: tuple[int, ...]


def export_weights(checkpoint: str | Path, out: str | Path, dtype: torch.dtype | None = None, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the parameters and the buffers that belong to them to the new directory `out`, or to one file if it ends in .safetensors.

    Parameters come in the dtype they were trained in, or in `dtype`; tied ones once; buffers as they are. Directories get
    model.safetensors, or above `shard_bytes` several files and model.safetensors.index.json. Returns `out`. Raises CheckpointError
    when the checkpoint is damaged or `out` exists, StorageError when the disk is too small.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    manifest = Manifest.read(checkpoint)
    weights = _weights(manifest)
    entries = _entries(manifest, weights, dtype)
    with ExitStack() as stack:
        files = Files(checkpoint, manifest, stack)
        buffers = {name: files.tensor(key) for name, key in manifest.weights.buffers.items()}
        if out.suffix == ".safetensors":
            layout = Layout(entries, _METADATA)
            with staged_file(out, layout.nbytes) as path:
                _write({path: layout}, files, weights, buffers)
        else:
            shards = _shards(entries, shard_bytes)
            with staged_directory(out, sum(layout.nbytes for layout in shards.values())) as folder:
                _write({folder / name: layout for name, layout in shards.items()}, files, weights, buffers)
                if len(shards) > 1:
                    write_text(folder / "model.safetensors.index.json", _index(shards, entries))
    return out


def _weights(manifest: Manifest) -> list[_Weight]:
    states = manifest.states()
    found = []
    for key, entry in states.items():
        state, _, name = key.partition("|")
        if state in (State.MASTER, State.PARAM):
            found.append(_Weight(name, State(state), entry.dtype, entry.shape))
    return found


def _entries(manifest: Manifest, weights: Iterable[_Weight], dtype: torch.dtype | None) -> list[Entry]:
    """What the exported files hold, under plain names."""
    stored = {entry.key: entry for entries in manifest.files.values() for entry in entries}
    found = []
    for weight in weights:
        trained = manifest.weights.dtypes.get(weight.name, weight.dtype)
        found.append(Entry(weight.name, dtype if dtype is not None and trained.is_floating_point else trained, weight.shape))
    return found + [Entry(name, stored[key].dtype, stored[key].shape) for name, key in manifest.weights.buffers.items()]


def _shards(entries: Sequence[Entry], shard_bytes: int) -> dict[str, Layout]:
    dealt = deal(entries, shard_bytes)
    if len(dealt) <= 1:
        return {"model.safetensors": Layout(entries, _METADATA)}
    return {f"model-{i:05d}-of-{len(dealt):05d}.safetensors": Layout(part, _METADATA) for i, part in enumerate(dealt, start=1)}


def _write(layouts: Mapping[Path, Layout], files: Files, weights: Sequence[_Weight], buffers: Mapping[str, torch.Tensor]) -> None:
    for path, layout in layouts.items():
        make_file(path, layout)
    with ExitStack() as stack:
        writers = [stack.enter_context(TensorWriter(path, layout)) for path, layout in layouts.items()]
        owners = {key: (writer, layout.dtypes[key]) for writer, layout in zip(writers, layouts.values(), strict=True) for key in layout.starts}

        numels = {weight.name: torch.Size(weight.shape).numel() for weight in weights}

        def write(name: str, state: State, start: int, values: torch.Tensor) -> None:
            writer, dtype = owners[name]
            writer.write(name, start * dtype.itemsize, values.to(dtype))

        files.read(weights, lambda name: [Interval(0, numels[name])], write)
        for name, buffer in buffers.items():
            owners[name][0].write(name, 0, buffer)
        for writer in writers:
            writer.finish()


def _index(shards: Mapping[str, Layout], entries: Iterable[Entry]) -> str:
    weight_map = {key: name for name, layout in shards.items() for key in layout.starts}
    return json.dumps({"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
