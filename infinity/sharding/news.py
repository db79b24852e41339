"""An error that ends a rank is told by that rank; what ends several of them alike is told once."""

from __future__ import annotations

import logging
import zlib

import torch.distributed as dist

from infinity.errors import RankError

logger = logging.getLogger("infinity")


def whose_news(error: BaseException) -> str | None:
    """Where an error is from that this process is to tell: " on rank 1", or "" where it is alone. None where other ranks have said enough.

    What is wrong on several ranks alike is told by the first that comes to it; that a rank is lost, only until one has told why it ended.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    try:
        is_news = _count(f"{type(error).__name__}: {error}") == 1
        is_first = _count("anything") == 1
    except Exception:
        logger.debug("the store of the process group was gone at the end", exc_info=True)
        is_news = is_first = True
    if not (is_first if isinstance(error, RankError) else is_news):
        return None
    return f" on rank {dist.get_rank()}"


def _count(told: str) -> int:
    """How many ranks were about to tell this, with this one. Waits for none of them."""
    return int(dist.distributed_c10d._get_default_store().add(f"infinity/told/{zlib.crc32(told.encode())}", 1))
