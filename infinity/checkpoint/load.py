"""Read a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity import native
from infinity.checkpoint.format import Manifest, NamedState, StateSink, state_key
from infinity.checkpoint.save import PIECE_BYTES, in_pieces
from infinity.checkpoint.tensorfile import Entry, TensorReader, as_bytes
from infinity.checkpoint.values import decode
from infinity.errors import CheckpointError

_NAMES_SHOWN = 20


def load(
    directory: str | Path, sink: StateSink, *, accept: Callable[[dict[str, Any]], None] = lambda extra: None, piece_bytes: int = PIECE_BYTES
) -> dict[str, Any]:
    """Put a checkpoint's states into `sink`, and return the `extra` that `save` was given.

    Raises CheckpointError, before the sink is touched, when a file is missing, cut or damaged (every checksum is verified first),
    or when names, shapes or dtypes differ from the sink's: it lists what is missing, unexpected and different. The last to be
    asked is `accept`, which raises if it has no use for the extra.
    """
    tensors = sink.tensors()
    with _opened(Path(directory), tensors) as (files, extra):
        _read_all(files, tensors, piece_bytes)
        accept(extra)
        for tensor, start, values in files.pieces(in_pieces(tensors, piece_bytes)):
            sink.write(tensor.name, tensor.state, start, values)
    return extra


def verify(directory: str | Path, tensors: Sequence[NamedState], *, accept: Callable[[dict[str, Any]], None], thoroughly: bool) -> None:
    """Raise what `load` into a sink with these tensors would raise; only `thoroughly` are the checksums of the states compared."""
    with _opened(Path(directory), tensors) as (files, extra):
        if thoroughly:
            _read_all(files, tensors, PIECE_BYTES)
        accept(extra)


@contextmanager
def _opened(directory: Path, tensors: Sequence[NamedState]) -> Iterator[tuple[Files, dict[str, Any]]]:
    manifest = Manifest.read(directory)
    _compare(directory, manifest.states(), tensors)
    with ExitStack() as stack:
        files = Files(directory, manifest, stack)
        extra = decode(manifest.extra, files.tensor)
        assert isinstance(extra, dict)
        yield files, extra


def _read_all(files: Files, tensors: Sequence[NamedState], piece_bytes: int) -> None:
    """Reading verifies."""
    for _ in files.pieces(in_pieces(tensors, piece_bytes)):
        pass


class Files:
    """The open files of a checkpoint. What is read whole is verified against its checksum."""

    def __init__(self, directory: Path, manifest: Manifest, stack: ExitStack) -> None:
        self._crcs = manifest.crcs
        self._entries = {entry.key: entry for entries in manifest.files.values() for entry in entries}
        self._readers: dict[str, TensorReader] = {}
        for name, layout in manifest.layouts().items():
            reader = stack.enter_context(TensorReader(directory / name, layout))
            self._readers.update(dict.fromkeys(layout.starts, reader))

    def pieces(self, pieces: Iterable[tuple[NamedState, int, int]]) -> Iterable[tuple[NamedState, int, torch.Tensor]]:
        """(tensor, first element, values in a buffer that is used again) for pieces in rising order of each tensor."""
        crcs: dict[str, int] = {}
        buffer = torch.empty(0, dtype=torch.uint8)
        for tensor, start, stop in pieces:
            key, itemsize = state_key(tensor.name, tensor.state), tensor.dtype.itemsize
            if buffer.numel() < (stop - start) * itemsize:
                buffer = torch.empty((stop - start) * itemsize, dtype=torch.uint8)
            piece = buffer[: (stop - start) * itemsize]
            self._readers[key].read_into(key, start * itemsize, piece)
            crcs[key] = native.crc32c(piece, crcs.get(key, 0))
            if stop == self._entries[key].numel:
                self._verify(key, crcs.pop(key))
            yield tensor, start, piece.view(tensor.dtype)

    def tensor(self, key: str) -> torch.Tensor:
        """A whole tensor, for those that fit in memory."""
        entry = self._entries[key]
        values = torch.empty(entry.shape, dtype=entry.dtype)
        self._readers[key].read_into(key, 0, values)
        self._verify(key, native.crc32c(as_bytes(values)))
        return values

    def _verify(self, key: str, crc: int) -> None:
        if crc != self._crcs[key]:
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
