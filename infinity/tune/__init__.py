"""From measurements of NVMe paths to the [nvme] section of a configuration."""

from infinity.tune.choice import Choice, choose
from infinity.tune.setting import Setting, grid
from infinity.tune.sweep import Measured, Mode, sweep

__all__ = ["Choice", "Measured", "Mode", "Setting", "choose", "grid", "sweep"]
