"""An error that ends a rank is told by that rank; what ends several of them alike is told once."""

from __future__ import annotations

import logging
import time
import zlib
from typing import Any

import torch.distributed as dist

from infinity.errors import RankError

logger = logging.getLogger("infinity")

_PATIENCE_S = 5.0
"""How long a rank that has lost another waits for that one to tell why."""

_CAUSE = "a cause"


def whose_news(error: BaseException) -> str | None:
    """Where an error is from that this process is to tell: " on rank 1", or "" where it is alone. None where another rank tells enough.

    What is wrong on several ranks alike is told by the first that comes to it; that a rank is lost, where none tells why.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    try:
        is_news = _is_lost_without_a_word() if isinstance(error, RankError) else _is_new_cause(error)
    except Exception:
        logger.debug("the store of the process group was gone at the end", exc_info=True)
        is_news = True
    return f" on rank {dist.get_rank()}" if is_news else None


def _is_new_cause(error: BaseException) -> bool:
    _count(_CAUSE)
    return _count(f"{type(error).__name__}: {error}") == 1


def _is_lost_without_a_word() -> bool:
    """Waits for a cause. True on one of the ranks that wait in vain."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _store().check([_key(_CAUSE)]):
        if time.monotonic() > deadline:
            return _count("a loss") == 1
        time.sleep(0.05)
    return False


def _count(told: str) -> int:
    """How many ranks were about to tell this, with this one."""
    return int(_store().add(_key(told), 1))


def _key(told: str) -> str:
    return f"infinity/told/{zlib.crc32(told.encode())}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
