"""Who of the ranks is missing: each writes a beat to the process group's store, and reads the others'."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from infinity.errors import RankError

logger = logging.getLogger("infinity")

_BEATS_PER_TIMEOUT = 8
_LEFT = "left"
"""What a rank writes that ends in order."""

_RANK = "rank "
"""How every error begins that names a rank."""

FAILED = "an error: "
"""How the last word of a rank begins that ends otherwise."""


class SharedStore(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(slots=True)
class _Peer:
    """What is known of another rank."""

    beat: bytes
    heard_at: float
    """time.monotonic() when its beat last changed."""


class Watch:
    """A thread that beats for this rank and notices when another's beat stands still for `timeout_s`.

    A process that is killed or stopped no longer beats; one whose program hangs still does, and is found by its count of collectives.
    `on_loss` is called once, from the thread, with the RankError that names the rank.
    """

    def __init__(self, store: SharedStore, *, rank: int, world_size: int, timeout_s: float, on_loss: Callable[[RankError], None]) -> None:
        self._store, self._rank, self._timeout_s, self._on_loss = store, rank, timeout_s, on_loss
        self._others = [other for other in range(world_size) if other != rank]
        self._peers: dict[int, _Peer] = {}
        self._count, self._begun, self._activity = 0, 0, "starting"
        self._ending = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)
        self._thread.start()

    def tell(self, begun: int, activity: str) -> None:
        """What this rank is at, after so many collectives were begun. Others read it when they miss this rank."""
        self._begun, self._activity = begun, activity

    def come_to(self, begun: int) -> None:
        """This rank is at its collective of this number, and waits there for all others."""
        self._store.add(_place(begun), 1)

    def have_all_come_to(self, begun: int) -> bool:
        return self._store.add(_place(begun), 0) > len(self._others)

    def laggard(self) -> tuple[int, str] | None:
        """Of the other ranks, the one that had begun the fewest collectives when last heard of, if fewer than this one; and what it was at."""
        behind = [(*_read(peer.beat), other) for other, peer in list(self._peers.items())]
        begun, activity, rank = min(behind, default=(self._begun, "", -1))
        return (rank, activity) if begun < self._begun else None

    def close(self) -> None:
        """Beat no more, and tell the others that it is meant so."""
        self._ending.set()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():  # the store's host does not answer
            return
        if not self._activity.startswith(FAILED):
            self._activity = _LEFT
        try:
            self._beat()
        except Exception:
            logger.debug("the store of the process group was gone at the end", exc_info=True)

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._timeout_s / _BEATS_PER_TIMEOUT):
                self._beat()
                self._look()
        except RankError as error:
            self._on_loss(error)
        except Exception as error:
            lost = RankError(f"rank {self._rank} cannot reach the process group's store any more: rank 0, or torchrun, has ended ({error})")
            lost.__cause__ = error
            self._on_loss(lost)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(_key(self._rank), f"{self._count}|{self._begun}|{self._activity}")

    def _read_all(self) -> dict[int, bytes]:
        return dict(zip(self._others, self._store.multi_get([_key(other) for other in self._others]), strict=True))

    def _look(self) -> None:
        """Raise RankError for a rank whose beat stands still."""
        now = time.monotonic()
        for other, beat in self._read_all().items():
            begun, activity = _read(beat)
            peer = self._peers.setdefault(other, _Peer(beat, now))
            if activity.startswith(FAILED):
                told = activity.removeprefix(FAILED)  # where it misses a rank itself, that one is the news
                raise RankError(told if told.startswith(_RANK) else f"{_RANK}{other} ended, after {begun} collectives, with {activity}")
            if activity == _LEFT and begun < self._begun:
                raise RankError(
                    f"{_RANK}{other} has ended, after {begun} collectives, and this one waits for it in number {self._begun}: {self._activity}. "
                    "Look at its log, then start the job again"
                )
            if beat != peer.beat:
                peer.beat, peer.heard_at = beat, now
            elif now - peer.heard_at > self._timeout_s and activity != _LEFT:
                raise RankError(
                    f"{_RANK}{other} has not been heard of for {now - peer.heard_at:.0f} s: it was killed, or stopped. Its last word, after "
                    f"{begun} collectives (here {self._begun}): {activity}. Look at its log, then start the job again"
                )


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _place(begun: int) -> str:
    return f"place/{begun}"


def _read(beat: bytes) -> tuple[int, str]:
    """(collectives begun, activity)"""
    _, begun, activity = beat.decode().split("|", 2)
    return int(begun), activity
