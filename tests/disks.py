"""bench/throttle.py's disks of a known speed, for tests: where they cannot be made the test is skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("throttle", Path(__file__).resolve().parents[1] / "bench" / "throttle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def throttled_disks(folder: Path, rates: Mapping[str, int], nbytes: int) -> Iterator[tuple[list[Path], Path]]:
    """See bench/throttle.py."""
    throttle = _load()
    try:
        with throttle.throttled_disks(folder, rates, nbytes) as made:
            yield made
    except throttle.NotPermittedError as error:
        pytest.skip(str(error))
