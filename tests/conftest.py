"""What all tests share: GPU tests skip with a reason where there is no CUDA, and machines may be slow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("infinity", deadline=None)
settings.load_profile("infinity")

torch.set_num_threads(1)  # the models are tiny: more threads wait for each other longer than they compute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_cuda = pytest.mark.skip(reason="needs CUDA, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_cuda)
