"""The byte-level GPT trained by several processes, each of which keeps its share of the states.

    torchrun --nproc-per-node 2 examples/ranks.py DIRECTORY [STEPS]

The states live in DIRECTORY, which every process must reach; a second run goes on where the first one ended.
"""

import sys

import gpt
import torch

import infinity
from infinity.config import load_config


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    config = load_config(
        {
            "nvme": {"paths": [directory]},
            "placement": {"optimizer": "nvme"},
            "train": {"model": "gpt:build_toy", "data": "gpt:data", "batch_size": 4, "sequence_length": 64},
        }
    )
    torch.manual_seed(config.train.seed)  # of the model, whose values rank 0 builds for all
    with infinity.initialize(gpt.build_toy, config) as engine:
        data = gpt.data(config, engine.rank, engine.world_size)
        engine.register(data=data)
        batches = iter(data)
        for _ in range(steps):
            loss = engine.model(**next(batches))  # of this rank's batch; gradients become the mean over all ranks
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if engine.rank == 0:
                print(f"step {engine.global_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
