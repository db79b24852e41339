"""The processes of one training command: torchrun starts them, they read one configuration, and one of them talks."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar, cast

import torch.distributed as dist
from rich.console import Console

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.sharding.groups import leave_world
from infinity.sharding.ranks import Ranks, join_ranks
from infinity.timeline import Timeline

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process of the job. Without torchrun it is the only one."""

    config: Config
    ranks: Ranks
    """For what the command itself agrees on; the engine has its own."""
    console: Console
    """Silent where this process is not to talk."""

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0

    def ask_first(self, what: str, look: Callable[[], T]) -> T:
        """What rank 0 finds, for all: where each looked for itself, files could come in between. RankError where rank 0 fails."""
        with self.ranks.all_or_none(what):
            found = look() if self.is_first else None
        return self.ranks.everybodys(found, what)[0]  # type: ignore[return-value]

    def is_any(self, value: bool, what: str) -> bool:
        """Whether it is so on any rank: the same answer on all."""
        return any(self.ranks.everybodys(value, what))

    def say(self, text: str) -> None:
        """A line or several, as they are."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def join_job(path: Path, words: Sequence[str], *, log_all: bool) -> Iterator[Job]:
    """Read the configuration and join the ranks that torchrun started. Raises ConfigError where it cannot be read, RankError on the other ranks."""
    config, error = _read(path, words)
    before = dist.group.WORLD
    ranks = join_ranks("cpu", timeout_s=config.zero.timeout_s, timeline=Timeline())
    world = None if before is not None else dist.group.WORLD
    try:
        with ranks.all_or_none("reading the configuration"):
            if error is not None:
                raise error
        yield Job(config=config, ranks=ranks, console=_voice(ranks, log_all))
        with ranks.all_or_none("the end"):  # once one has ended as interrupted, torchrun ends those that still publish
            pass
    finally:
        ranks.close()
    if world is not None:  # after an error it ends with the process, as any group does that others may be lost in
        leave_world(world)


def _read(path: Path, words: Sequence[str]) -> tuple[Config, ConfigError | None]:
    """The configuration; where it cannot be read, the one to tell the other ranks with, and why."""
    try:
        return load_config(path, words), None
    except ConfigError as error:
        return load_config({"device": "cpu"}), error


def _voice(ranks: Ranks, log_all: bool) -> Console:
    """What this process says goes through here; over ranks, logging and warnings are set up to match.

    Rank 0 talks alone, or all do and each line begins with its rank. Errors are told wherever they are.
    """
    if ranks.world_size == 1:
        return Console()
    prefix = f"rank {ranks.rank}: "
    if log_all:
        logging.basicConfig(format="%(message)s", stream=_Prefixed(sys.stderr, prefix))
        logging.captureWarnings(True)
        return Console(file=cast(TextIO, _Prefixed(sys.stdout, prefix)))
    if ranks.rank:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        return Console(quiet=True, force_terminal=False)
    return Console()


class _Prefixed(io.TextIOBase):
    """Lines on their way to a stream, with the same words before each. No terminal: bars of several processes would overwrite each other."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix = stream, prefix
        self._begun = ""
        """A line without its end."""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
