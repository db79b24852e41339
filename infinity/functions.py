"""`module:function` as configurations and the command line name models, data and rules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


def load_function(key: str, spec: str | None, folders: Sequence[Path]) -> Callable[..., Any]:
    """Import what `spec` names; modules in `folders` come first, in that order.

    `key` is the configuration key, for errors. Raises ConfigError when it is unset, or the module or function is
    missing; an error inside the module is the user's own and passes through.
    """
    if spec is None:
        raise ConfigError(f'{key} is not set: name a function as {key} = "module:function" or with --{key.rpartition(".")[2]}.')
    module_name, _, name = spec.partition(":")
    _make_importable(folders)
    if not _exists(module_name):
        places = ", ".join(map(str, folders or [Path.cwd()]))
        raise ConfigError(f"{key} = {spec!r}: no module {module_name!r} in {places} or among the installed packages.")
    module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{key} = {spec!r}: {module.__file__} has no function {name!r}; it has {', '.join(offered) or 'none'}.")
    return function  # type: ignore[no-any-return]


def _make_importable(folders: Sequence[Path]) -> None:
    wanted = [str(folder) for folder in folders]
    sys.path[:] = wanted + [entry for entry in sys.path if entry not in wanted]


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
