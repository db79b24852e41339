"""Real processes as ranks of one job, over gloo on this machine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 3.0
"""How long ranks wait for each other in tests that lose one."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "infinity.engine"])  # once, and not in every rank


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: str = ""
    """Type and message of what it raised."""
    seconds: float = 0.0
    """From the beginning of its program."""


class Job:
    """Ranks that run `function(rank, world_size, *args)`; the store of their process group lives here, as torchrun's lives in its agent."""

    def __init__(self, function, world_size, *args, timeout_s=60.0):
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes, self._pipes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(function, rank, world_size, self._store.port, timeout_s, theirs, args), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def outcome(self, rank, within_s=60.0):
        """What the rank's function returned or raised; None where the process ended without a word."""
        if not self._pipes[rank].poll(within_s):
            raise AssertionError(f"rank {rank} had no outcome after {within_s} s")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return None

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


@contextmanager
def job(function, world_size, *args, timeout_s=60.0):
    started = Job(function, world_size, *args, timeout_s=timeout_s)
    try:
        yield started
    finally:
        started.close()


def run_ranks(function, world_size, *args, within_s=120.0):
    """What every rank's function returned. Raises AssertionError with what a rank raised."""
    with job(function, world_size, *args) as running:
        outcomes = [running.outcome(rank, within_s=within_s) for rank in range(world_size)]
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and not outcome.error, f"rank {rank}: {outcome and outcome.error}"
    return [outcome.value for outcome in outcomes]


@contextmanager
def torchrun(folder, *program):
    """A program as a user starts it on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def unwatched(folder, *program):
    """The same by rank, with nobody to end one because the other is lost, as torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    everyones = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in ("0", "1"):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            environment = {**os.environ, **everyones, **own}
            processes.append(subprocess.Popen([sys.executable, *program], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _main(function, rank, world_size, port, timeout_s, pipe, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank that ends at once must not leave others that are still connecting
    began = time.monotonic()
    try:
        outcome = Outcome(value=function(rank, world_size, *args))
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    pipe.send(Outcome(outcome.value, outcome.error, time.monotonic() - began))
    pipe.close()
    os._exit(0)  # a process group whose rank is gone would wait in its destructor
