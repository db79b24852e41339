"""Where first values come from: the model of rank 0, whose parameters and buffers become everybody's, piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from infinity import native
from infinity.runtime.builder import is_plain
from infinity.runtime.units import Unit
from infinity.sharding.ranks import Ranks
from infinity.sizes import MiB

_PIECE_BYTES = 8 * MiB
"""Values are read in pieces of this many bytes; a rank that receives them holds one, beside what its budget counts."""

OnRead = Callable[[Tensor], None]
"""Told of each piece that was read: what lies in a file may leave memory again."""


class Origin:
    """Rank 0's values. What asks for them is a collective: every rank asks for the same, in the same order."""

    def __init__(self, ranks: Ranks, on_read: OnRead) -> None:
        self._ranks, self._on_read = ranks, on_read

    def checksum(self, units: Sequence[Unit]) -> str:
        """CRC-32C of all parameters as they are, in hexadecimal: of rank 0's, told to all."""
        with self._ranks.all_or_none("reading the initial values"):
            mine = checksum(units, self._on_read) if self._ranks.rank == 0 else ""
        return self._ranks.everybodys(mine, "the initial values")[0]

    def pieces(self, name: str, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first element, some elements) of rank 0's `values`, in their own dtype and in order; complex ones as real pairs.

        On other ranks `values` may be without values, and of their shape and dtype. A piece is there until the next is asked for.
        """
        for start, piece in _pieces(_flattened(values)) if self._ranks.rank == 0 else _blank_pieces(values):
            self._ranks.broadcast(piece, name).wait()
            yield start, piece
            self._on_read(piece)

    def give_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers become everybody's, each in its place, whether they are saved with the model or not."""
        for name, buffer in model.named_buffers():
            if not is_plain(buffer):
                told = self._ranks.everybodys(buffer if self._ranks.rank == 0 else None, name)[0]
                if self._ranks.rank != 0:
                    torch.utils.swap_tensors(buffer, told)  # type: ignore[no-untyped-call]
                continue
            pieces = [piece.clone() for _, piece in self.pieces(name, buffer) if self._ranks.rank != 0]
            if pieces:
                _overwrite(buffer, torch.cat(pieces))

    def lead_generator(self, before: Tensor) -> None:
        """Where all ranks' CPU generators stood alike `before` the model was built, let them stand where rank 0's does now.

        A builder draws its values on rank 0 alone.
        """
        drawn = torch.get_rng_state() if self._ranks.rank == 0 else None
        told = self._ranks.everybodys((zlib.crc32(before.numpy().tobytes()), drawn), "the random number generator")
        if len({stood for stood, _ in told}) == 1 and told[0][1] is not None:
            torch.set_rng_state(told[0][1])


def checksum(units: Sequence[Unit], on_read: OnRead) -> str:
    """CRC-32C of all parameters as they are, in hexadecimal."""
    crc = 0
    for unit in units:
        for param in unit.params:
            for _, piece in _pieces(_flattened(param)):
                crc = native.crc32c(piece.view(torch.uint8), crc)
                on_read(piece)
    return f"{crc:08x}"


def _pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first element, some elements) of a flat tensor, in order, contiguous on the CPU."""
    step = _step(values.dtype)
    for start in range(0, values.numel(), step):
        yield start, values[start : start + step].cpu().contiguous()


def _blank_pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """As many and as large, without values, in one piece's memory."""
    dtype = values.dtype.to_real() if values.is_complex() else values.dtype
    numel = values.numel() * (2 if values.is_complex() else 1)
    room = torch.empty(min(numel, _step(dtype)), dtype=dtype)
    for start in range(0, numel, _step(dtype)):
        yield start, room[: numel - start]


def _step(dtype: torch.dtype) -> int:
    return max(1, _PIECE_BYTES // dtype.itemsize)


def _flattened(values: Tensor) -> Tensor:
    """[numel], a view where that is possible; a complex tensor as its real pairs."""
    values = values.detach()
    return (torch.view_as_real(values.resolve_conj().resolve_neg()) if values.is_complex() else values).reshape(-1)


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """`values`: flat, in the order of the tensor's elements, complex ones as real pairs. Elements that share memory are written once."""
    values = torch.view_as_complex(values.view(*tensor.shape, 2)) if tensor.is_complex() else values.view(tensor.shape)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    tensor.detach()[once].copy_(values[once])
