"""Loss scaling follows torch.amp.GradScaler's rule and refuses gradients that were not scaled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import TraceError
from infinity.optim.loss_scale import LossScale


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_grows_and_shrinks_as_torchs(finite: list[bool]):
    ours = LossScale(growth_interval=3)
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    for good in finite:
        ours.update(1.0 if good else math.nan)
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0 if good else 1.0), 2.0, 0.5, 3)
        assert ours.value == scale.item()


def test_it_resumes_where_it_was():
    ours, resumed = LossScale(growth_interval=3), LossScale(growth_interval=3)
    for norm in (1.0, math.inf, 1.0, 1.0):
        ours.update(norm)
    resumed.load_state_dict(ours.state_dict())
    ours.update(1.0)
    resumed.update(1.0)
    assert resumed.value == ours.value == 65536.0


def test_each_step_needs_a_scaled_backward():
    scale = LossScale()
    with pytest.raises(TraceError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        scale.grad_scale()
    scaled = scale.scale(torch.tensor(2.0, dtype=torch.float16))
    assert scaled.dtype is torch.float32 and scaled.item() == 2 * 65536
    assert scale.grad_scale() == 1 / 65536
    scale.update(1.0)
    with pytest.raises(TraceError):
        scale.grad_scale()
