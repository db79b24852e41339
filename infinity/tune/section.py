"""What was found, as the [nvme] section of a configuration and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infinity.config.template import toml_size, toml_value
from infinity.sizes import format_rate
from infinity.storage.probe import Rates
from infinity.tune.choice import Choice
from infinity.tune.setting import Setting
from infinity.tune.sweep import Measured, Mode

JSON_VERSION = 1
"""Raised when a key changes its meaning or goes."""

_GB_S = 1e9


def rates_of(measured: Measured, setting: Setting) -> Rates:
    """A path's rates under a setting; their `weight` is its share."""
    read, write = (measured.rate(setting, mode) for mode in (Mode.READ, Mode.WRITE))
    return Rates(read=read, write=write)


def render_toml(measured: Sequence[Measured], choice: Choice) -> str:
    """A configuration with nothing but an [nvme] section. The choice has a setting."""
    setting = choice.setting
    assert setting is not None
    lines = [
        f"# Measured by `infinity tune` on {time.strftime('%Y-%m-%d')}: {choice.reason}.",
        "[nvme]",
        f"block_size = {toml_size(setting.block_bytes)}",
        f"queue_depth = {setting.depth}",
        f"readers = {setting.workers}",
        f"writers = {setting.workers}",
        "paths = [",
    ]
    for path in measured:
        rates = rates_of(path, setting)
        both = format_rate(path.rate(setting, Mode.MIX))
        lines.append(f"    # reads {format_rate(rates.read)}, writes {format_rate(rates.write)}, both at once {both}")
        entry = {"path": str(path.path), "weight": round(rates.weight / _GB_S, 4), "read_rate": round(rates.read), "write_rate": round(rates.write)}
        lines.append(f"    {toml_value(entry)},")
    return "\n".join([*lines, "]"]) + "\n"


def render_json(measured: Sequence[Measured], choice: Choice, conditions: dict[str, Any]) -> str:
    """Every trial, in bytes per second."""
    return json.dumps(
        {
            "version": JSON_VERSION,
            "conditions": conditions,
            "choice": asdict(choice),
            "paths": [
                {
                    "path": str(path.path),
                    "trials": [
                        {**asdict(setting), "mode": str(mode), "lanes": [str(lane) for lane in mode.lanes], "rates": rates}
                        for (setting, mode), rates in path.rates.items()
                    ],
                }
                for path in measured
            ],
        },
        indent=1,
    )
