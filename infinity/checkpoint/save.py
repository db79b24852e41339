"""Write a checkpoint: under a temporary name, piece by piece, synced, then renamed. Each rank writes its own elements into the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import MANIFEST, Manifest, NamedState, StateSource, Weights, extra_file, state_key
from infinity.checkpoint.pieces import PIECE_BYTES, in_pieces, move
from infinity.checkpoint.staged import staged_directory, write_text
from infinity.checkpoint.sums import Sum, Sums
from infinity.checkpoint.tensorfile import Entry, Layout, TensorWriter, as_bytes, deal, make_file
from infinity.checkpoint.values import encode
from infinity.errors import CheckpointError
from infinity.sharding.ranks import ALONE, Ranks
from infinity.sizes import GiB


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
    ranks: Ranks = ALONE,
) -> None:
    """Write all states of `source` and `extra` (plain values and tensors, nested) as the new directory `directory`.

    For a later export: `dtypes` in which parameters are trained, `aliases` of tied ones (name -> stored name), and the module
    `buffers` that belong to the weights. A file holds at most `file_bytes`, or one tensor. The directory appears complete or not
    at all. Every rank calls it, with an `extra` of its own; what rank 0 gives for an export counts. Raises CheckpointError when the directory exists
    or is not the same on all ranks, and when `extra` holds what cannot be kept, StorageError with needed and free bytes when the disk is too small,
    RankError for what only another rank could not do.
    """
    tensors = source.tensors()
    keeper = _Keeper(ranks.rank)
    with ranks.all_or_none("keeping what belongs to the run"):
        mine = keeper.keep(extra, buffers or {})
    kept = ranks.everybodys(mine, "what belongs to the run")
    files = _files([Entry(state_key(t.name, t.state), t.dtype, t.shape) for t in tensors], [own.entries for own in kept], file_bytes)
    layouts = {name: Layout(entries) for name, entries in files.items()}
    longest = {entry.key: 0xFFFFFFFF for entries in files.values() for entry in entries}
    weights = Weights(dtypes or {}, aliases or {}, kept[0].buffers)
    manifest = Manifest(step=step, files=files, crcs=longest, weights=weights, extras=[own.json for own in kept])
    nbytes = sum(layout.nbytes for layout in layouts.values()) + len(manifest.dump())
    with staged_directory(Path(directory), nbytes, ranks) as folder:
        crcs = _write_files(folder, layouts, tensors, source, keeper.tensors, piece_bytes, ranks)
        with ranks.all_or_none("writing the manifest"):
            if ranks.rank == 0:
                write_text(folder / MANIFEST, replace(manifest, crcs=crcs).dump())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What a rank keeps beside states, without the tensors themselves."""

    json: Any
    buffers: Mapping[str, str]
    """As in Weights."""
    entries: Sequence[Entry]


class _Keeper:
    """Collects the tensors among a rank's extra values, under keys that say where they were."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: dict[str, torch.Tensor] = {}

    def keep(self, extra: Mapping[str, object], buffers: Mapping[str, torch.Tensor]) -> _Kept:
        """The module's buffers are kept once, by rank 0. Raises CheckpointError for what cannot be kept."""
        json = encode(extra, self._put)
        of_weights = buffers if self._rank == 0 else {}
        kept_buffers = {name: self._put(buffer.detach().cpu().contiguous(), f"buffer.{name}") for name, buffer in of_weights.items()}
        entries = [Entry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in self.tensors.items()]
        return _Kept(json=json, buffers=kept_buffers, entries=entries)

    def _put(self, tensor: torch.Tensor, path: str) -> str:
        key = f"extra{self._rank or ''}|{len(self.tensors)}|{path}"
        self.tensors[key] = tensor
        return key


def _files(states: Sequence[Entry], extras: Sequence[Sequence[Entry]], file_bytes: int) -> dict[str, Sequence[Entry]]:
    """`extras`: by rank."""
    if len({entry.key for entry in states}) != len(states):
        raise CheckpointError("two states of one name: every parameter has each state once")
    dealt = deal(states, file_bytes)
    files: dict[str, Sequence[Entry]] = {f"states-{i:05d}-of-{len(dealt):05d}.safetensors": entries for i, entries in enumerate(dealt, start=1)}
    return {**files, **{extra_file(rank): entries for rank, entries in enumerate(extras) if entries}}


def _write_files(
    folder: Path,
    layouts: Mapping[str, Layout],
    tensors: Sequence[NamedState],
    source: StateSource,
    extras: Mapping[str, torch.Tensor],
    piece_bytes: int,
    ranks: Ranks,
) -> dict[str, int]:
    """Fill every file, and return the checksum of each tensor. `extras`: this rank's."""
    for name, layout in layouts.items():
        with ranks.all_or_none(f"making {name}"):
            if ranks.rank == 0:
                make_file(folder / name, layout)
    with ExitStack() as stack:
        with ranks.all_or_none("opening the new files"):
            files = _OpenFiles(folder, layouts, stack)

        def write(tensor: NamedState, start: int, stop: int) -> None:
            files.write_piece(tensor, start, stop, source.read(tensor.name, tensor.state, start, stop))

        move(in_pieces(tensors, piece_bytes, source.share), write, ranks, "writing a checkpoint")
        with ranks.all_or_none("completing a checkpoint"):
            for key, value in extras.items():
                files.write(key, 0, value)
            files.finish()
    return _crcs(files.sums.whole(ranks), layouts)


class _OpenFiles:
    """The files of a new checkpoint, open on this rank, and the checksums of what it writes."""

    def __init__(self, folder: Path, layouts: Mapping[str, Layout], stack: ExitStack) -> None:
        self.sums = Sums()
        self._writers = [stack.enter_context(TensorWriter(folder / name, layout)) for name, layout in layouts.items()]
        self._owners = {key: writer for writer, layout in zip(self._writers, layouts.values(), strict=True) for key in layout.starts}

    def write_piece(self, tensor: NamedState, start: int, stop: int, values: torch.Tensor) -> None:
        """Put `values` (flat, CPU) at elements [start, stop)."""
        key = state_key(tensor.name, tensor.state)
        assert values.dtype == tensor.dtype and values.shape == (stop - start,), f"{key}: the source gave {values.dtype} {tuple(values.shape)}"
        self.write(key, start * tensor.dtype.itemsize, values.contiguous())

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Put `values` (contiguous, CPU) at byte `start`."""
        self._owners[key].write(key, start, values)
        self.sums.add(key, start, as_bytes(values))

    def finish(self) -> None:
        """Everything that was written here is on the disk when this returns."""
        for writer in self._writers:
            writer.finish()


def _crcs(found: Mapping[str, Sum | None], layouts: Mapping[str, Layout]) -> dict[str, int]:
    """A tensor without elements passed through nobody."""
    crcs = {}
    for key, nbytes in ((key, nbytes) for layout in layouts.values() for key, nbytes in layout.sizes.items()):
        whole = found.get(key, Sum(0, 0, 0))
        assert whole is not None and whole.nbytes == nbytes, f"{key}: the ranks' shares are not the whole tensor of {nbytes} bytes: {whole}"
        crcs[key] = whole.crc
    return crcs
