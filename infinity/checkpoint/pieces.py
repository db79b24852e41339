"""In which order states move: piece after piece of a parameter, in rounds that all ranks begin together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from infinity.checkpoint.format import NamedState
from infinity.sharding.layout import Interval
from infinity.sharding.ranks import Ranks
from infinity.sizes import MiB

PIECE_BYTES = 4 * MiB
"""States are read and written in pieces of this many bytes. Smaller than a chunk of the engine, so that most pieces lie in one."""

_ROUND_PIECES = 128
"""Half a GiB: seconds at a disk's speed, while ranks wait minutes for each other."""

Piece = tuple[NamedState, int, int]
"""A tensor, the first of its elements, the last + 1."""

Runs = Callable[[str], Sequence[Interval]]
"""A parameter's name -> the runs of elements that this rank moves of each of its states."""


def in_pieces(tensors: Iterable[NamedState], piece_bytes: int, runs: Runs) -> Iterator[Piece]:
    """Piece after piece of a parameter, and all its states of each, since they rest together."""
    for name, group in groupby(tensors, key=lambda tensor: tensor.name):
        states = list(group)
        step = max(1, piece_bytes // max(tensor.dtype.itemsize for tensor in states))
        for run in runs(name):
            for start in range(run.start, run.stop, step):
                for tensor in states:
                    yield tensor, start, min(start + step, run.stop)


def move(pieces: Iterable[Piece], each: Callable[[NamedState, int, int], None], ranks: Ranks, what: str) -> None:
    """Call `each` with this rank's pieces, however many other ranks have.

    Who has finished a round waits for the others: so nobody waits for longer than a round takes, and all hear of a failure at its end.
    """
    mine = list(pieces)
    rounds = max(ranks.everybodys(-(-len(mine) // _ROUND_PIECES), f"the rounds of {what}"))
    for index in range(rounds):
        with ranks.all_or_none(what):
            for piece in mine[index * _ROUND_PIECES : (index + 1) * _ROUND_PIECES]:
                each(*piece)
