"""Checkpoints of several real processes: one directory, whole or not at all, for any number of ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import tiny_gpt
from torch import nn

import infinity
from infinity.checkpoint import export_weights
from infinity.errors import InfinityError
from tests.ranks import run_ranks
from tests.test_ranks import ACCUMULATION, calls_of, settings

STEPS = 4
SLOW = pytest.mark.slow


class Loader:
    """Of a rank's own: where it is."""

    def __init__(self, rank):
        self.rank, self.seen, self.can_be_kept = rank, 0, True

    def state_dict(self):
        return {"rank": self.rank, "seen": self.seen, "order": torch.arange(self.seen) if self.can_be_kept else object()}

    def load_state_dict(self, state):
        self.rank, self.seen = state["rank"], state["seen"]
        assert state["order"].tolist() == list(range(self.seen))


class Model(nn.Module):
    """A GPT, a frozen parameter whose size no number of ranks divides, and a buffer that follows what a rank has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gpt, self.frozen = tiny_gpt(recompute=False), nn.Parameter(torch.randn(13), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += ids.sum()
        return nn.functional.dropout(self.gpt(ids), 0.1) + self.frozen.sum()


def go_on(engine, loader, rank, world_size, steps):
    """The losses of some steps, with what a rank draws itself."""
    losses, calls = [], calls_of(tiny_gpt, rank, world_size)
    for call in calls[loader.seen : loader.seen + steps * ACCUMULATION]:
        loss = engine.model(*call) / ACCUMULATION * (1 + random.random() + np.random.random())
        loss.backward()
        losses.append(loss.item())
        loader.seen += 1
        if loader.seen % ACCUMULATION == 0:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return losses


def values_of(engine):
    """(state, parameter, first element) -> values, for each run of elements that rests on this rank; and the buffer."""
    states = engine._parts.states
    found = {("buffer", "seen", 0): engine.model.seen.reshape(1).numpy().copy()}
    for tensor in states.tensors():
        for run in states.held(tensor.name):
            found[tensor.state, tensor.name, run.start] = states.read(tensor.name, tensor.state, run.start, run.stop).numpy()
    return found


def same(a, b):
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def whole(everybodys):
    """(state, parameter) -> values, from the ranks' runs."""
    runs = sorted(((key, values) for found in everybodys for key, values in found.items() if key[0] != "buffer"), key=lambda run: run[0])
    names = dict.fromkeys(key[:2] for key, _ in runs)
    return {name: np.concatenate([values for key, values in runs if key[:2] == name]) for name in names}


def generators():
    """Where each of them is."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def seed(rank):
    for kind in (torch.manual_seed, np.random.seed, random.seed):
        kind(100 + rank)


def train_and_save(rank, world_size, folder, placement):
    """The losses after the checkpoint `half` was saved, and the states and generators then; the checkpoint `end`."""
    loader = Loader(rank)
    with infinity.initialize(Model(), settings(folder, placement)) as engine:
        engine.register(loader=loader)
        seed(rank)
        go_on(engine, loader, rank, world_size, STEPS // 2)
        engine.save(folder / "half").wait()
        states, drawn = values_of(engine), generators()
        losses = go_on(engine, loader, rank, world_size, STEPS // 2)
        engine.save(folder / "end")
        return losses, states, drawn


def start_from(rank, world_size, folder, checkpoint, steps):
    """The losses of so many steps from a checkpoint on; the states, (loader's rank, what it has seen, steps taken) and generators before; the
    checkpoint `end`.
    """
    folder.mkdir(exist_ok=True)
    loader = Loader(-1)
    seed(rank)
    with infinity.initialize(Model(), settings(folder, "states on nvme"), checkpoint=checkpoint) as engine:
        engine.register(loader=loader)
        loaded, begun, drawn = values_of(engine), (loader.rank, loader.seen, engine.global_step), generators()
        losses = go_on(engine, loader, rank, world_size, steps)
        engine.save(folder / "end")
        return losses, loaded, begun, drawn


def states_in(checkpoint):
    return {path.name: path.read_bytes() for path in checkpoint.glob("states-*")}


OTHER_NUMBERS = {2: (1,), 3: (2,), 4: (1, 3)}


@pytest.mark.parametrize(("world_size", "placement"), [(2, "mixed"), pytest.param(3, "nvme", marks=SLOW), pytest.param(4, "cpu", marks=SLOW)])
def test_a_run_goes_on_to_the_digit_and_other_numbers_of_ranks_get_the_same_states(tmp_path, world_size, placement):
    half, end = tmp_path / "half", tmp_path / "end"
    told = run_ranks(train_and_save, world_size, tmp_path, placement)
    again = run_ranks(start_from, world_size, tmp_path / "again", half, STEPS // 2)
    for rank, ((losses, states, drawn), (losses_again, loaded, begun, drawn_again)) in enumerate(zip(told, again, strict=True)):
        assert losses == losses_again and drawn == drawn_again
        assert same(states, loaded)
        assert begun == (rank, STEPS // 2 * ACCUMULATION, STEPS // 2)
    assert states_in(end) == states_in(tmp_path / "again" / "end")
    for number in OTHER_NUMBERS[world_size]:
        fewer = tmp_path / f"by {number}"
        there = run_ranks(start_from, number, fewer, half, 0)
        back = run_ranks(start_from, world_size, tmp_path / f"back from {number}", fewer / "end", 0)
        for found in (there, back):
            assert same(whole([loaded for _, loaded, _, _ in found]), whole([states for _, states, _ in told]))
        for rank, (_, _, begun, drawn) in enumerate(back):
            assert begun == (rank if rank < number else 0, STEPS // 2 * ACCUMULATION, STEPS // 2), "further ranks take what rank 0 had"
            assert (drawn == told[rank][2]) == (rank < number), "and keep their own generators"
        assert states_in(half) == states_in(fewer / "end"), "byte for byte what another number of ranks writes"
        exported = [export_weights(at, tmp_path / f"{at.parent.name}.safetensors").read_bytes() for at in (half, fewer / "end")]
        assert exported[0] == exported[1]


def damage(path, *, is_cut=False):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data[: len(data) - is_cut])


def refuse(rank, world_size, folder):
    """What each misuse tells, in turn; then the run goes on as if there had been none."""
    loader, told = Loader(rank), {}

    def collect(what, call, directory):
        try:
            call(directory)
        except InfinityError as error:
            told[what] = f"{type(error).__name__}: {error}"

    with infinity.initialize(Model(), settings(folder)) as engine:
        engine.register(loader=loader)
        go_on(engine, loader, rank, world_size, 1)
        for name in ("good", "cut", "flipped", "extra"):
            engine.save(folder / name)
        losses = go_on(engine, loader, rank, world_size, 1)
        engine.save(folder / "later")
        before = values_of(engine), loader.seen, engine.global_step, generators()
        collect("taken", engine.save, folder / "good")
        collect("two places", engine.save, folder / f"of rank {rank}")
        loader.can_be_kept = rank == 0
        collect("object", engine.save, folder / "never")
        loader.can_be_kept = True
        if rank == 0:
            damage(folder / "cut" / "states-00001-of-00001.safetensors", is_cut=True)
            damage(folder / "flipped" / "states-00001-of-00001.safetensors")
            damage(folder / "extra" / "extra-00001.safetensors")
        dist.barrier()
        for name in ("cut", "flipped", "extra"):
            collect(name, engine.load, folder / name)
        collect("two checkpoints", engine.load, folder / ("good" if rank == 0 else "later"))
        assert same(before[0], values_of(engine)) and before[1:] == (loader.seen, engine.global_step, generators())
        engine.load(folder / "good")
        assert go_on(engine, loader, rank, world_size, 1) == losses and same(values_of(engine), before[0])
    return told


def test_what_cannot_be_is_refused_on_all_ranks_and_changes_nothing_on_any(tmp_path):
    one, two = run_ranks(refuse, 2, tmp_path)
    for what, told in (
        ("taken", f"CheckpointError: {tmp_path}/good exists, and nothing is ever overwritten: choose another name, or remove it first"),
        ("cut", f"CheckpointError: {tmp_path}/cut/states-00001-of-00001.safetensors has "),
        ("flipped", f"CheckpointError: {tmp_path}/flipped/states-00001-of-00001.safetensors: the checksum of "),
        ("two checkpoints", "ConfigError: the checkpoint, by its step and checksum, differs between ranks: (1, "),
    ):
        assert one[what].startswith(told) and two[what].startswith(told), what
    for what, doing, told in (
        ("two places", "reaching the directory", f"CheckpointError: rank 1 does not reach {tmp_path}/of rank 1.tmp, which"),
        ("object", "keeping what belongs to the run", "CheckpointError: run.registered.loader.order is a builtins.object"),
        ("extra", "opening a checkpoint", f"CheckpointError: {tmp_path}/extra/extra-00001.safetensors: the checksum of "),
    ):
        assert two[what].startswith(told), what
        assert one[what].startswith(f"RankError: {doing} failed on rank 1, of 1 that failed: {told}"), what
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "never").exists()
