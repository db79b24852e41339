"""bench/adam.py runs from end to end, and the adapter does what benchmarks expect of it; toy figures are not looked at."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_the_adapter_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import adapter

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    args = SimpleNamespace(lr=1e-2, wd=0.0, accum=2, nvme=str(tmp_path), options={"placement": {"param": "cpu", "grad": "cpu", "optimizer": "cpu"}})
    trained = adapter.trainer(Model, args)
    tokens = torch.randint(0, 50, (2, 4, 9), generator=torch.Generator().manual_seed(0)).to(trained._engine.device)
    results = [trained.step(list(tokens)) for _ in range(5)]
    trained.sync()
    trained.close()
    assert set(results[0]) == {"loss", "fwd_s", "bwd_s", "opt_s"}
    assert results[-1]["loss"] < results[0]["loss"]
