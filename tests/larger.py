"""Trains a stack of layers in a process of its own, and prints what came of it as one line of JSON.

    python tests/larger.py engine DIR LAYERS WIDTH CPU_BUDGET    through the engine, everything on NVMe that does not fit in the budget
    python tests/larger.py torch DIR LAYERS WIDTH -              as plain PyTorch does it

Parameters, gradients and Adam states take 16 bytes for each of the about LAYERS * WIDTH**2 elements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.kinds import Tier

STEPS = 3


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def status(field: str) -> int:
    """Bytes, of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def through_engine(folder: str, layers: int, width: int, budget: str) -> dict[str, object]:
    config = {"device": "cpu", "budgets": {"cpu": budget}, "nvme": {"paths": [folder]}, "store": {"resume": "never"}}
    torch.manual_seed(0)
    batch = torch.randn(2, width)
    with infinity.initialize(lambda: Stack(layers, width), config) as engine:
        losses = []
        for _ in range(STEPS):
            loss = engine.model(batch)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item().hex())
        held = engine.statistics()["peak_cpu_bytes"], engine.plan.held_bytes(Tier.CPU)
        return {"losses": losses, "params": engine.plan.num_params, "held": held[0], "planned": held[1], "on_nvme": engine.plan.resting(Tier.NVME)}


def plain(layers: int, width: int) -> dict[str, object]:
    torch.manual_seed(0)
    batch = torch.randn(2, width)
    model = Stack(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return {"losses": losses}


def main() -> None:
    way, folder, layers, width, budget = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    through_engine(folder, 2, 600, "32MiB")  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    result = through_engine(folder, layers, width, budget) if way == "engine" else plain(layers, width)
    print(json.dumps({**result, "grown": status("VmHWM") - before, "before": before}))


if __name__ == "__main__":
    main()
