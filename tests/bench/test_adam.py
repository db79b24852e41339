"""bench/adam.py runs from end to end; its toy figures mean nothing and are not looked at."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_the_adam_bench_prints_a_table_and_one_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["adam.py", "--toy"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(BENCH / "adam.py"), run_name="__main__")
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)["results"][0]
    assert set(result["contenders"]) >= {"infinity fp32", "infinity bf16 grad + bf16 out", "torch fused fp32", "torch cast, fused, cast"}
    assert all(any(name in line for line in table) for name in (*result["contenders"], *result["ratios"]))


@pytest.mark.parametrize("with_out", [False, True])
def test_the_adapter_steps_as_torch_does(monkeypatch: pytest.MonkeyPatch, with_out: bool) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import adapter

    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    params, grads = torch.randn(4096), torch.randn(4096)
    leaf = torch.nn.Parameter(params.clone())
    leaf.grad = grads
    optimizer = torch.optim.AdamW([leaf], fused=True, **hyper)
    out = torch.zeros(4096, dtype=torch.bfloat16) if with_out else None
    step = adapter.cpu_adam(params, grads, torch.zeros(4096), torch.zeros(4096), bf16_out=out, **hyper)
    for _ in range(3):
        optimizer.step()
        step()
    torch.testing.assert_close(params, leaf.data, rtol=1e-6, atol=0)
    if out is not None:
        assert torch.equal(out, params.bfloat16())
