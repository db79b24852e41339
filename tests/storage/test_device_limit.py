"""torch takes no more than the HBM budget, and says which budget it was."""

from __future__ import annotations

import logging

import pytest
import torch

from infinity.sizes import MiB
from infinity.storage.device_limit import SLACK_BYTES, DeviceLimit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BUDGET = 256 * MiB


@pytest.fixture
def device():
    torch.cuda.empty_cache()
    return torch.device("cuda", torch.cuda.current_device())


def test_what_is_over_the_budget_is_refused_and_the_log_names_the_key(device, caplog):
    limit = DeviceLimit(device, BUDGET, engine_bytes=16 * MiB)
    try:
        kept = torch.empty(BUDGET - 32 * MiB, dtype=torch.uint8, device=device)
        with caplog.at_level(logging.ERROR, logger="infinity"), pytest.raises(torch.OutOfMemoryError):
            torch.empty(32 * MiB + SLACK_BYTES + MiB, dtype=torch.uint8, device=device)
        assert "budgets.hbm = 256.00 MiB" in caplog.text and "16.00 MiB" in caplog.text
        assert torch.cuda.memory_reserved(device) <= limit._before_bytes + BUDGET + SLACK_BYTES
        del kept
    finally:
        limit.close()
    assert torch.empty(2 * BUDGET, dtype=torch.uint8, device=device).numel() == 2 * BUDGET


def test_what_was_there_before_is_not_counted(device):
    before = torch.empty(BUDGET, dtype=torch.uint8, device=device)
    limit = DeviceLimit(device, BUDGET, engine_bytes=0)
    try:
        assert torch.empty(BUDGET - 2 * MiB, dtype=torch.uint8, device=device).numel() + before.numel() > BUDGET
    finally:
        limit.close()
