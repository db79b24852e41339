"""Write a checkpoint: under a temporary name, piece by piece, synced, then renamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from infinity.checkpoint.format import EXTRA_FILE, MANIFEST, Manifest, NamedState, StateSource, Weights, state_key
from infinity.checkpoint.staged import staged_directory, write_text
from infinity.checkpoint.tensorfile import Entry, Layout, TensorWriter, deal
from infinity.checkpoint.values import encode
from infinity.errors import CheckpointError
from infinity.sizes import GiB, MiB

PIECE_BYTES = 4 * MiB
"""States are read and written in pieces of this many bytes. Smaller than a chunk of the engine, so that most pieces lie in one."""


def save(
    directory: str | Path,
    source: StateSource,
    extra: Mapping[str, object],
    step: int,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    aliases: Mapping[str, str] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    file_bytes: int = 4 * GiB,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write all states of `source` and `extra` (plain values and tensors, nested) as the new directory `directory`.

    For a later export: `dtypes` in which parameters are trained, `aliases` of tied ones (name -> stored name), and the module
    `buffers` that belong to the weights. A file holds at most `file_bytes`, or one tensor. The directory appears complete or not
    at all. Raises CheckpointError when it exists or `extra` holds what cannot be kept, StorageError with needed and free bytes
    when the disk is too small.
    """
    tensors = source.tensors()
    keeper = _Keeper()
    json = encode(extra, keeper.put)
    kept_buffers = {name: keeper.put(buffer.detach().cpu().contiguous(), f"buffer.{name}") for name, buffer in (buffers or {}).items()}
    files = _files([Entry(state_key(t.name, t.state), t.dtype, t.shape) for t in tensors], keeper.entries(), file_bytes)
    layouts = {name: Layout(entries) for name, entries in files.items()}
    longest = {entry.key: 0xFFFFFFFF for entries in files.values() for entry in entries}
    weights = Weights(dtypes or {}, aliases or {}, kept_buffers)
    manifest = Manifest(step=step, files=files, crcs=longest, weights=weights, extra=json)
    nbytes = sum(layout.nbytes for layout in layouts.values()) + len(manifest.dump())
    with staged_directory(Path(directory), nbytes) as folder:
        crcs = _write_files(folder, layouts, tensors, source, keeper.tensors, piece_bytes)
        write_text(folder / MANIFEST, replace(manifest, crcs=crcs).dump())


class _Keeper:
    """Collects the tensors among the extra values, under keys that say where they were."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor, path: str) -> str:
        key = f"extra|{len(self.tensors)}|{path}"
        self.tensors[key] = tensor
        return key

    def entries(self) -> list[Entry]:
        return [Entry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in self.tensors.items()]


def _files(states: Sequence[Entry], extras: Sequence[Entry], file_bytes: int) -> dict[str, Sequence[Entry]]:
    if len({entry.key for entry in states}) != len(states):
        raise CheckpointError("two states of one name: every parameter has each state once")
    dealt = deal(states, file_bytes)
    files: dict[str, Sequence[Entry]] = {f"states-{i:05d}-of-{len(dealt):05d}.safetensors": entries for i, entries in enumerate(dealt, start=1)}
    return {**files, **({EXTRA_FILE: extras} if extras else {})}


def _write_files(
    folder: Path,
    layouts: Mapping[str, Layout],
    tensors: Sequence[NamedState],
    source: StateSource,
    extras: Mapping[str, torch.Tensor],
    piece_bytes: int,
) -> dict[str, int]:
    """Fill every file and return the checksum of each tensor. Files are preallocated first: a full disk shows before hours of work."""
    with ExitStack() as stack:
        writers = [stack.enter_context(TensorWriter(folder / name, layout)) for name, layout in layouts.items()]
        owners = {key: writer for writer in writers for key in writer.crcs}
        for tensor, start, stop in in_pieces(tensors, piece_bytes):
            key = state_key(tensor.name, tensor.state)
            values = source.read(tensor.name, tensor.state, start, stop)
            assert values.dtype == tensor.dtype and values.shape == (stop - start,), f"{key}: the source gave {values.dtype} {tuple(values.shape)}"
            owners[key].write(key, values.contiguous())
        for key, value in extras.items():
            owners[key].write(key, value)
        for writer in writers:
            writer.finish()
        return {key: writer.crcs[key] for key, writer in owners.items()}


def in_pieces(tensors: Iterable[NamedState], piece_bytes: int) -> Iterable[tuple[NamedState, int, int]]:
    """(tensor, first element, last element + 1): piece after piece of a parameter, and all its states of each, since they rest together."""
    for _, group in groupby(tensors, key=lambda tensor: tensor.name):
        sizes = [(tensor, torch.Size(tensor.shape).numel()) for tensor in group]
        step = max(1, piece_bytes // max(tensor.dtype.itemsize for tensor, _ in sizes))
        for start in range(0, max(numel for _, numel in sizes), step):
            for tensor, numel in sizes:
                if start < numel:
                    yield tensor, start, min(start + step, numel)
