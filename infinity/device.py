"""Which device a process computes on, and the tier beside it."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError
from infinity.kinds import Tier


def choose_device(name: str, *, rank_here: int = 0, ranks_here: int = 1) -> torch.device:
    """ "auto" is CUDA where there is one; of several GPUs that nobody has numbered, each rank of a machine takes its own.

    Raises ConfigError for a GPU that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        seen = f"{count} CUDA devices" if count else "no CUDA device"
        raise ConfigError(f'device = "{name}", but torch sees {seen} here. Write "auto", "cpu" or another number')
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if ranks_here == 1 else rank_here % count)


def tier_of(device: torch.device) -> Tier:
    """Where the tensors are that it computes with."""
    return Tier.HBM if device.type == "cuda" else Tier.CPU
