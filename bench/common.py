"""What benches share: how contenders are timed, how ranks are started, the model of whole steps."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SHAPE = {"layers": 24, "width": 2048, "heads": 16, "vocabulary": 50304, "sequence": 1024}
"""The GPT of 1.3 billion parameters that the benches of whole steps train."""

PAUSE_S = 0.02
"""Between two contenders: OpenMP's threads spin for a while after their work is done, on the cores of whoever comes next."""


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """What each contender returned in each round, after `warmup` rounds that are not counted.

    The order is drawn anew for every round: in a rotation everyone would always run after the same neighbour.
    """
    draw = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmup + rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            time.sleep(PAUSE_S)
            figure = contenders[name]()
            if index >= warmup:
                found[name].append(figure)
    return found


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """`step`, returning its seconds."""

    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


def ratio(over: list[float], under: list[float]) -> float:
    """The median over rounds of the ratio of one round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def fio_memory(block_bytes: int, depth: int) -> str:
    """2 MiB pages where the system has enough reserved; fio takes no transparent ones."""
    page_bytes = 2 << 20
    needed = -(-block_bytes * depth // page_bytes) + 1
    reserved = re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())
    return "mmaphuge" if reserved and int(reserved[1]) >= needed else "malloc"


def add_shape(parser: argparse.ArgumentParser) -> None:
    """An argument for each of SHAPE."""
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def shape_of(args: argparse.Namespace) -> Any:
    """The examples' gpt.Shape that they say, with recompute of each block."""
    import gpt

    return gpt.Shape(layers=args.layers, heads=args.heads, width=args.width, context=args.sequence, vocabulary=args.vocabulary, recompute=True)


def run_ranks(ranks: int, command: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON in the last line of what each of so many processes prints, which are started as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    outputs = [tempfile.TemporaryFile("w+") for _ in own]
    processes = [subprocess.Popen(command, stdout=output, env=env) for output, env in zip(outputs, own, strict=True)]
    try:
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.1)
    finally:
        for process in processes:  # of a job that one has left nobody is of use
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit(f"of {ranks} ranks, these ended with: {[process.returncode for process in processes]}")
    told = []
    for output in outputs:
        output.seek(0)
        told.append(json.loads(output.read().splitlines()[-1]))
    return told
