"""Read a checkpoint: everything is checked before anything is changed, on any rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity import native
from infinity.checkpoint.format import Manifest, NamedState, StateSink, state_key
from infinity.checkpoint.pieces import PIECE_BYTES, Runs, in_pieces, move
from infinity.checkpoint.sums import Sum, Sums
from infinity.checkpoint.tensorfile import Entry, TensorReader, as_bytes
from infinity.checkpoint.values import decode
from infinity.errors import CheckpointError
from infinity.kinds import State
from infinity.sharding.ranks import ALONE, Ranks

_NAMES_SHOWN = 20

Accept = Callable[[dict[str, Any]], None]
"""Raises if it has no use for the extra."""

Take = Callable[[str, State, int, torch.Tensor], None]
"""(name, state, first element, values in a buffer that is used again after the call)"""


def load(
    directory: str | Path,
    sink: StateSink,
    *,
    accept: Accept = lambda extra: None,
    begin: Callable[[], None] = lambda: None,
    piece_bytes: int = PIECE_BYTES,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Put a checkpoint's states into `sink`, and return the `extra` that `save` was given on this rank, or on rank 0 where there were fewer ranks.

    Every rank calls it, and reads what it holds. Raises CheckpointError, before any sink is touched, when a file is missing, cut or damaged
    (every checksum is verified first), or when names, shapes or dtypes differ from the sink's: it lists what is missing, unexpected
    and different. The last to be asked is `accept`, on all ranks; `begin` is called just before the sink is touched.
    Raises RankError for what only another rank could not do.
    """
    tensors = sink.tensors()
    with _opened(Path(directory), tensors, ranks, piece_bytes) as (files, extra):
        _verify(files, tensors, sink.held)
        _ask(accept, extra, ranks)
        begin()
        files.read(tensors, sink.held, sink.write)
    return extra


def verify(
    directory: str | Path,
    tensors: Sequence[NamedState],
    held: Runs,
    *,
    accept: Accept,
    thoroughly: bool,
    ranks: Ranks = ALONE,
) -> None:
    """Raise what `load` into a sink with these tensors would raise, where `held` is what it holds; only `thoroughly` are the checksums of the
    states compared.
    """
    with _opened(Path(directory), tensors, ranks, PIECE_BYTES) as (files, extra):
        if thoroughly:
            _verify(files, tensors, held)
        _ask(accept, extra, ranks)


@contextmanager
def _opened(directory: Path, tensors: Sequence[NamedState], ranks: Ranks, piece_bytes: int) -> Iterator[tuple[Files, dict[str, Any]]]:
    with ExitStack() as stack:
        with ranks.all_or_none("opening a checkpoint"):
            manifest = Manifest.read(directory)
            _compare(directory, manifest.states(), tensors)
            files = Files(directory, manifest, stack, ranks, piece_bytes)
            extra = _own_extra(manifest, files, ranks)
        mark = (manifest.step, zlib.crc32(manifest.dump().encode()))
        ranks.check_same(mark, "the checkpoint, by its step and checksum,", f"Load {directory} from a disk that all ranks share")
        yield files, extra


def _own_extra(manifest: Manifest, files: Files, ranks: Ranks) -> dict[str, Any]:
    """Reading verifies, also what ranks have left that are not here today."""
    extras = manifest.extras
    for rank in range(ranks.rank + ranks.world_size, len(extras), ranks.world_size):
        decode(extras[rank], files.tensor)
    extra = decode(extras[ranks.rank if ranks.rank < len(extras) else 0], files.tensor)
    assert isinstance(extra, dict)
    return extra


def _verify(files: Files, tensors: Sequence[NamedState], held: Runs) -> None:
    """Each rank reads what it will load, so together they read everything."""
    files.read(tensors, held, lambda *piece: None)


def _ask(accept: Accept, extra: dict[str, Any], ranks: Ranks) -> None:
    with ranks.all_or_none("comparing what belongs to the run"):
        accept(extra)


class Files:
    """The open files of a checkpoint. What is read whole, by one rank or by all together, is verified against its checksum."""

    def __init__(self, directory: Path, manifest: Manifest, stack: ExitStack, ranks: Ranks = ALONE, piece_bytes: int = PIECE_BYTES) -> None:
        self._ranks, self._piece_bytes = ranks, piece_bytes
        self._crcs = manifest.crcs
        self._entries = {entry.key: entry for entries in manifest.files.values() for entry in entries}
        self._readers: dict[str, TensorReader] = {}
        for name, layout in manifest.layouts().items():
            reader = stack.enter_context(TensorReader(directory / name, layout))
            self._readers.update(dict.fromkeys(layout.starts, reader))

    def read(self, tensors: Iterable[NamedState], runs: Runs, take: Take) -> None:
        """Give this rank's runs to `take`, piece by piece; the runs of all ranks are all elements.

        Raises CheckpointError, on all ranks, when what they read together does not match a checksum.
        """
        sums = Sums()
        buffer = torch.empty(0, dtype=torch.uint8)

        def read_piece(tensor: NamedState, start: int, stop: int) -> None:
            nonlocal buffer
            key, itemsize = state_key(tensor.name, tensor.state), tensor.dtype.itemsize
            if buffer.numel() < (stop - start) * itemsize:
                buffer = torch.empty((stop - start) * itemsize, dtype=torch.uint8)
            piece = buffer[: (stop - start) * itemsize]
            self._readers[key].read_into(key, start * itemsize, piece)
            sums.add(key, start * itemsize, piece)
            take(tensor.name, tensor.state, start, piece.view(tensor.dtype))

        move(in_pieces(tensors, self._piece_bytes, runs), read_piece, self._ranks, "reading a checkpoint")
        for key, found in sums.whole(self._ranks).items():
            self._check(key, found)

    def tensor(self, key: str) -> torch.Tensor:
        """A whole tensor, for those that fit in memory."""
        entry = self._entries[key]
        values = torch.empty(entry.shape, dtype=entry.dtype)
        self._readers[key].read_into(key, 0, values)
        self._check(key, Sum(0, entry.nbytes, native.crc32c(as_bytes(values))))
        return values

    def _check(self, key: str, found: Sum | None) -> None:
        if found != Sum(0, self._entries[key].nbytes, self._crcs[key]):
            path = self._readers[key].path
            raise CheckpointError(f"{path}: the checksum of {key!r} does not match: the file was changed or damaged, use another checkpoint")


def _compare(directory: Path, stored: Mapping[str, Entry], wanted: Sequence[NamedState]) -> None:
    mine = {state_key(tensor.name, tensor.state): tensor for tensor in wanted}
    problems = [
        _listed("missing in the checkpoint", [key for key in mine if key not in stored]),
        _listed("unexpected in the checkpoint", [key for key in stored if key not in mine]),
        _listed("different", [_difference(stored[key], tensor) for key, tensor in mine.items() if key in stored and _differs(stored[key], tensor)]),
    ]
    if any(problems):
        raise CheckpointError(f"{directory} is of another model: {'; '.join(filter(None, problems))}. Nothing was changed")


def _differs(stored: Entry, wanted: NamedState) -> bool:
    return (stored.shape, stored.dtype) != (tuple(wanted.shape), wanted.dtype)


def _difference(stored: Entry, wanted: NamedState) -> str:
    return f"{stored.key} is {stored.dtype} {list(stored.shape)}, the model has {wanted.dtype} {list(wanted.shape)}"


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}" if names else ""
