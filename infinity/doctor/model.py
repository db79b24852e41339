"""What the model of the configuration asks of this machine: its plan, made of shapes alone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from infinity.config import Config
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.errors import InfinityError
from infinity.kinds import Tier
from infinity.planner.hardware import Hardware, available_memory
from infinity.planner.plan import Plan
from infinity.planning import Site, idle_keys, place_units
from infinity.preparation import held_now, paths_of, preview_units
from infinity.sizes import format_bytes

PLAN = "plan"

IDLE = "idle keys"

Load = Callable[[], Callable[[], nn.Module]]
"""Imports what builds the model. Raises ConfigError where there is no such function."""


def check_keys(config: Config, device: torch.device) -> Iterator[Finding]:
    """Keys that a run of this configuration would ignore: a warning each, as the engine logs."""
    for key, reason in idle_keys(config, device):
        yield warning(IDLE, f"{key} has no effect: {reason}", f"remove {key.split()[0]} from the configuration")


def check_plan(config: Config, load: Load, device: torch.device) -> tuple[Plan | None, Finding]:
    """Place the model as `infinity train --plan` does, but measure and write nothing. The paths have to be usable.

    What does not fit is a failure. A builder that raises is a warning: with values it might work, which is how a run builds it.
    """
    site = Site(config=config, hardware=_hardware(device), paths=paths_of(config), before=held_now(device))
    try:
        with _quiet():
            plan = place_units(preview_units(load(), config), site, goes_on=True)
    except InfinityError as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return None, failure(PLAN, text, "change the budgets, nvme.paths or placement; `infinity train CONFIG --plan` shows what fits where")
    except Exception as error:
        found = f"none: train.model raises {type(error).__name__} when it is built without values: {error}"
        return None, warning(PLAN, found, f"see where, by calling {config.train.model} under `with torch.device('meta'):`")
    held = ", ".join(f"{format_bytes(plan.resting(tier))} in {tier.value}" for tier in Tier if plan.resting(tier))
    units = len({spec.key.unit for spec in plan.specs})
    return plan, ok(PLAN, f"fits: {plan.num_params:,} parameters in {units} units, {held}")


def _hardware(device: torch.device) -> Hardware:
    """Room alone: a placement does not depend on rates."""
    return Hardware(
        device=device,
        hbm_free=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0,
        cpu_available=available_memory(),
        cores=len(os.sched_getaffinity(0)),
        upload_rate=0.0,
        adam_rate=0.0,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The import of the model leaves no bytecode. What it prints goes to stderr, since stdout may be JSON; what the planner warns of,
    other findings say."""
    logger = logging.getLogger("infinity")
    before = logger.disabled, sys.dont_write_bytecode
    logger.disabled = sys.dont_write_bytecode = True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.disabled, sys.dont_write_bytecode = before
