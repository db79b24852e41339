"""infinity: train what does not fit, with parameters, gradients and Adam states in HBM, CPU memory and NVMe files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.engine import Engine, initialize, plan

__all__ = ["Config", "Engine", "initialize", "plan"]


def __getattr__(name: str) -> Any:
    """The engine, and torch with it, is imported on first use: `infinity --help` answers at once."""
    if name not in __all__:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    from infinity import config, engine

    return getattr(config if name == "Config" else engine, name)
