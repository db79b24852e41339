"""Every setting of the engine as checked, frozen values; read from TOML or JSON, written back with comments."""

from infinity.config.load import load_config
from infinity.config.schema import (
    Budgets,
    Config,
    Nvme,
    NvmePath,
    Optimizer,
    Placement,
    Precision,
    Prefetch,
    Store,
    Train,
    Units,
)
from infinity.config.section import Section
from infinity.config.template import write_commented

__all__ = [
    "Budgets",
    "Config",
    "Nvme",
    "NvmePath",
    "Optimizer",
    "Placement",
    "Precision",
    "Prefetch",
    "Section",
    "Store",
    "Train",
    "Units",
    "load_config",
    "write_commented",
]
